"""Which files are listed, in which order; each kind of image file becomes a square of RGB bytes, or a reason."""

from __future__ import annotations

import io
import os
import struct
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image, ImageOps

from byov._core.memory import Budget
from byov.data import image_files
from byov.data.image_files import Unusable, decode, list_images, pillow_unlimited

# -------------------------------------------------------------------------------------------------------------- listing


def put(root: Path, *names: str) -> Path:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(b"x")
    return root


def paths(root: Path) -> list[str]:
    return [file.path for file in list_images(root).files]


def test_any_nesting_sorted_and_by_suffix(tmp_path: Path) -> None:
    put(tmp_path, "b.JPG", "a.jpeg", "z/y/x/deep.Png", "z/a.gif", "m/notes.txt", "none", "a b/ü.webp", "two.tar.tif")
    assert paths(tmp_path) == ["a b/ü.webp", "a.jpeg", "b.JPG", "two.tar.tif", "z/a.gif", "z/y/x/deep.Png"]
    assert list_images(tmp_path).files[0].size == 1


def test_hidden_files_are_skipped(tmp_path: Path) -> None:
    put(tmp_path, ".a.jpg", "._b.jpg", ".thumbs/c.jpg", "d/.e/f.jpg", "d/g.jpg")
    assert paths(tmp_path) == ["d/g.jpg"]


def test_links(tmp_path: Path) -> None:
    root = put(tmp_path / "root", "real/a.jpg", "b.jpg")
    put(tmp_path / "elsewhere", "c.jpg")
    (root / "file.jpg").symlink_to(tmp_path / "elsewhere" / "c.jpg")
    (root / "folder").symlink_to(tmp_path / "elsewhere")
    (root / "again").symlink_to(root / "real")  # listed under its own name
    (root / "real" / "up").symlink_to(root)
    (root / "self").symlink_to(root / "self")
    (root / "self.jpg").symlink_to(root / "self.jpg")
    (root / "nowhere.jpg").symlink_to(tmp_path / "nothing.jpg")
    assert paths(root) == ["b.jpg", "file.jpg", "folder/c.jpg", "nowhere.jpg", "real/a.jpg", "self.jpg"]
    assert [file.size for file in list_images(root).files] == [1, 1, 1, -1, 1, -1]


def test_a_pipe_is_not_a_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.jpg")
    assert paths(tmp_path) == []


def test_photographs_in_other_formats_are_named(tmp_path: Path) -> None:
    put(tmp_path, "a.HEIC", "b.jpg", "c.doc")
    assert list_images(tmp_path).unread == [("a.HEIC", "the format heic is not read")]


def test_an_unreadable_folder_is_reported_and_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(tmp_path, "a/b.jpg", "closed/c.jpg")
    scandir = os.scandir

    def guarded(path: str) -> Any:
        if path.endswith("closed"):
            raise PermissionError(13, "Permission denied", path)
        return scandir(path)

    monkeypatch.setattr(image_files.os, "scandir", guarded)
    found = list_images(tmp_path)
    assert [file.path for file in found.files] == ["a/b.jpg"]
    assert found.unread == [("closed/", "permission denied")]
    with pytest.raises(PermissionError):
        list_images(tmp_path / "closed")


def test_the_digest_changes_with_every_change(tmp_path: Path) -> None:
    put(tmp_path, "a.jpg", "b/c.jpg", "notes.txt")
    seen = {list_images(tmp_path).digest()}

    def changed() -> bool:
        before = len(seen)
        seen.add(list_images(tmp_path).digest())
        return len(seen) > before

    assert not changed()
    put(tmp_path, "notes.txt", "more.txt", ".d.jpg")
    assert not changed()
    put(tmp_path, "d.jpg")
    assert changed()
    (tmp_path / "a.jpg").write_bytes(b"xy")
    assert changed()
    os.utime(tmp_path / "a.jpg", ns=(1, 1))
    assert changed()
    (tmp_path / "a.jpg").rename(tmp_path / "e.jpg")
    assert changed()
    (tmp_path / "b" / "c.jpg").unlink()
    assert changed()


def test_names_that_are_not_unicode(tmp_path: Path) -> None:
    try:
        Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff\n.jpg")).write_bytes(b"x")
    except OSError:
        pytest.skip("this file system takes no such names")
    found = list_images(tmp_path)
    assert len(found.files) == 1 and len(found.digest()) == 64


def test_it_reports_how_many_were_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image_files, "REPORT_EVERY", 2)
    put(tmp_path, "a/1.jpg", "a/2.jpg", "b/1.jpg", "c/1.jpg")
    told: list[int] = []
    list_images(tmp_path, told.append)
    assert told == [2, 4]


@pytest.fixture
def fresh(tmp_path: Path) -> Iterator[Any]:
    """Make a new folder on every call: hypothesis runs many examples per test."""
    yield (tmp_path / f"{i}" for i in range(10_000)).__next__


NAME = st.text("aB1 -_é", min_size=1, max_size=3)


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(names=st.sets(st.lists(NAME, min_size=1, max_size=4).map("/".join), max_size=12), data=st.data())
def test_the_order_of_creation_does_not_matter(fresh: Any, names: set[str], data: st.DataObject) -> None:
    files = [f"{name}.jpg" for name in names]
    first, second = fresh(), fresh()
    for root in (first, second):
        root.mkdir()
        put(root, *data.draw(st.permutations(files)))
    assert paths(first) == paths(second) == sorted(files)


# ------------------------------------------------------------------------------------------------------------- decoding

SIDE = 16
RED, GREEN, BLUE = (255, 0, 0), (0, 255, 0), (0, 0, 255)


def picture(width: int = 60, height: int = 40) -> Image.Image:
    """A smooth image that looks different in every orientation."""
    x, y = np.meshgrid(np.linspace(0, 1, width), np.linspace(0, 1, height))
    return Image.fromarray(np.uint8(255 * np.stack([x, y, x * y], 2)))


def saved(path: Path, image: Image.Image, **options: object) -> Path:
    image.save(path, **options)
    return path


def colour(path: Path) -> list[int]:
    """Decode an image of a single colour and return that colour."""
    pixels = decode(path, SIDE)
    assert pixels.dtype == np.uint8 and pixels.shape == (3, SIDE, SIDE) and pixels.flags.c_contiguous
    assert (pixels == pixels[:, :1, :1]).all()
    return pixels[:, 0, 0].tolist()


def reason(path: Path) -> str:
    with pytest.raises(Unusable) as caught, pillow_unlimited():
        decode(path, SIDE)
    return str(caught.value)


# ---------------------------------------------------------------------------------------------------------- odd kinds


@pytest.mark.parametrize(
    ("name", "image", "expected"),
    [
        ("bits.png", Image.new("1", (20, 20), 1), (255, 255, 255)),
        ("grey.png", Image.new("L", (20, 20), 77), (77, 77, 77)),
        ("grey.jpg", Image.new("L", (20, 20), 77), (77, 77, 77)),
        ("grey.pgm", Image.new("L", (20, 20), 77), (77, 77, 77)),
        ("sixteen.png", Image.fromarray(np.full((20, 20), 257 * 77, np.uint16)), (77, 77, 77)),
        ("sixteen.tif", Image.fromarray(np.full((20, 20), 257 * 77, np.uint16)), (77, 77, 77)),
        ("sixteen.pgm", Image.fromarray(np.full((20, 20), 257 * 77, np.uint16)), (77, 77, 77)),
        ("float.tiff", Image.fromarray(np.full((20, 20), 77 / 255, np.float32)), (77, 77, 77)),
        ("high.tiff", Image.fromarray(np.full((20, 20), 1e6, np.float32)), (255, 255, 255)),
        ("palette.gif", Image.new("RGB", (20, 20), RED).convert("P"), RED),
        ("bitmap.bmp", Image.new("RGB", (20, 20), BLUE), BLUE),
        ("any.ppm", Image.new("RGB", (20, 20), BLUE), BLUE),
        ("clear.png", Image.new("RGBA", (20, 20), (0, 0, 0, 0)), (255, 255, 255)),
        ("clear.webp", Image.new("RGBA", (20, 20), (0, 0, 0, 0)), (255, 255, 255)),
        ("half.png", Image.new("RGBA", (20, 20), (0, 0, 255, 51)), (204, 204, 255)),
        ("grey-alpha.png", Image.new("LA", (20, 20), (0, 51)), (204, 204, 204)),
        ("inks.tif", Image.new("CMYK", (20, 20), (0, 255, 255, 0)), RED),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_odd_kinds(tmp_path: Path, name: str, image: Image.Image, expected: tuple[int, ...]) -> None:
    assert colour(saved(tmp_path / name, image)) == list(expected)


def test_cmyk_jpeg(tmp_path: Path) -> None:
    found = colour(saved(tmp_path / "inks.jpg", Image.new("CMYK", (64, 64), (0, 255, 255, 0)), quality=95))
    assert np.abs(np.subtract(found, RED)).max() <= 3


def test_palette_with_transparency(tmp_path: Path) -> None:
    image = Image.new("P", (20, 20), 1)
    image.putpalette([0, 0, 0, *RED])
    assert colour(saved(tmp_path / "seen.png", image, transparency=0)) == list(RED)
    assert colour(saved(tmp_path / "unseen.png", image, transparency=1)) == [255, 255, 255]
    assert colour(saved(tmp_path / "unseen.gif", image, transparency=1)) == [255, 255, 255]
    keyed = saved(tmp_path / "keyed.png", Image.new("RGB", (20, 20), RED), transparency=RED)
    assert colour(keyed) == [255, 255, 255]


@pytest.mark.parametrize("suffix", ["gif", "png", "webp"])
def test_an_animation_shows_its_first_picture(tmp_path: Path, suffix: str) -> None:
    frames = [Image.new("RGB", (20, 20), c) for c in (RED, GREEN, BLUE)]
    options = {"lossless": True} if suffix == "webp" else {}
    path = saved(tmp_path / f"a.{suffix}", frames[0], save_all=True, append_images=frames[1:], **options)
    assert colour(path) == list(RED)


def test_sixteen_bits_of_colour(tmp_path: Path) -> None:
    """Written by hand, since Pillow cannot: 2 x 2 pixels of (1, 1/2, 0)."""
    row = b"\0" + struct.pack(">3H", 65535, 32896, 0) * 2
    (tmp_path / "deep.png").write_bytes(png(2, 2, 16, zlib.compress(row * 2)))
    assert colour(tmp_path / "deep.png") == [255, 128, 0]


def png(width: int, height: int, depth: int, data: bytes) -> bytes:
    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    header = struct.pack(">IIBBBBB", width, height, depth, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", data) + chunk(b"IEND", b"")


@pytest.mark.parametrize("suffix", ["jpg", "png", "webp", "tif"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_sets_it_upright(tmp_path: Path, suffix: str, orientation: int) -> None:
    notes = Image.Exif()
    notes[0x0112] = orientation
    path = saved(tmp_path / f"turned.{suffix}", picture(), exif=notes, **({"quality": 95} if suffix == "jpg" else {}))
    with Image.open(path) as turned:
        upright = ImageOps.exif_transpose(turned).convert("RGB")
    assert upright.size == ((60, 40) if orientation < 5 else (40, 60))
    expected = decode(saved(tmp_path / "upright.png", upright), SIDE)
    assert np.abs(decode(path, SIDE).astype(int) - expected).max() <= 4
    plain = decode(saved(tmp_path / "plain.png", picture()), SIDE)
    assert (np.abs(plain.astype(int) - expected).max() > 100) == (orientation != 1)


def test_damaged_exif_is_ignored(tmp_path: Path) -> None:
    path = saved(tmp_path / "a.jpg", picture(), exif=b"Exif\0\0II*\0\xff\xff\xff\xff rubbish")
    with pillow_unlimited():
        assert decode(path, SIDE).shape == (3, SIDE, SIDE)


# --------------------------------------------------------------------------------------------------------- size, crop


def test_the_middle_is_taken(tmp_path: Path) -> None:
    wide = Image.new("RGB", (120, 40), RED)
    wide.paste(GREEN, (30, 0, 90, 40))  # a little more than the middle: the filter looks beyond the cut
    assert colour(saved(tmp_path / "wide.png", wide)) == list(GREEN)
    assert colour(saved(tmp_path / "tall.png", wide.transpose(Image.Transpose.ROTATE_90))) == list(GREEN)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(width=st.integers(1, 90), height=st.integers(1, 90), side=st.sampled_from([8, 16, 96]))
def test_any_size_gives_the_side(tmp_path: Path, width: int, height: int, side: int) -> None:
    path = saved(tmp_path / "any.png", Image.new("RGB", (width, height), (10, 200, 30)))
    pixels = decode(path, side)
    assert pixels.shape == (3, side, side)
    assert (pixels == np.reshape([10, 200, 30], (3, 1, 1))).all()


def test_a_reduced_jpeg_is_the_same_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = saved(tmp_path / "large.jpg", picture(1200, 800), quality=95)
    quick = decode(path, SIDE).astype(int)
    monkeypatch.setattr(Image.Image, "draft", lambda *_: None)
    monkeypatch.setattr("PIL.JpegImagePlugin.JpegImageFile.draft", lambda *_: None)
    assert np.abs(quick - decode(path, SIDE)).max() <= 3


def test_too_large_images_are_refused_by_their_header(tmp_path: Path) -> None:
    (tmp_path / "bomb.png").write_bytes(png(60_000, 60_000, 8, zlib.compress(bytes(1000))))
    assert reason(tmp_path / "bomb.png") == "too large (3,600 megapixels)"
    with pytest.raises(Unusable, match="too large"):
        decode(tmp_path / "bomb.png", SIDE)  # Pillow's own guard
    assert Image.MAX_IMAGE_PIXELS is not None, "Pillow's guard is back"


def test_a_jpeg_may_be_larger_because_it_is_reduced_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image_files, "DECODING", Budget(100_000))
    image = picture(400, 300)
    assert decode(saved(tmp_path / "a.jpg", image), SIDE).shape == (3, SIDE, SIDE)
    assert "too large" in reason(saved(tmp_path / "a.png", image))
    assert "too large" in reason(saved(tmp_path / "b.jpg", image, progressive=True))  # held whole at any scale
    (tmp_path / "c.jpg").write_bytes(jpeg_with_a_scan_per_channel(400, 300))
    assert "too large" in reason(tmp_path / "c.jpg")


# ------------------------------------------------------------------------------------------------------------- memory


def jpeg_with_a_scan_per_channel(width: int, height: int) -> bytes:
    """A sequential JPEG, written by hand, since Pillow writes all channels in one scan. It is grey."""

    def segment(marker: int, body: bytes) -> bytes:
        return struct.pack(">BBH", 0xFF, marker, len(body) + 2) + body

    frame = struct.pack(">BHHB", 8, height, width, 3) + bytes((1, 0x11, 0, 2, 0x11, 0, 3, 0x11, 0))
    one_code = bytes((1, *[0] * 15, 0))  # a single bit 0: the constant is as before; no others
    tables = (
        segment(0xDB, bytes((0, *[1] * 64))) + segment(0xC4, b"\x00" + one_code) + segment(0xC4, b"\x10" + one_code)
    )
    blocks = bytes(-(-(-(-width // 8) * -(-height // 8)) // 4))  # of two bits each
    scans = (segment(0xDA, bytes((1, channel, 0, 0, 63, 0))) + blocks for channel in (1, 2, 3))
    return b"\xff\xd8" + tables + segment(0xC0, frame) + b"".join(scans) + b"\xff\xd9"


def tiny_gif(width: int, height: int) -> bytes:
    """One pixel on a large transparent screen, in 43 bytes."""
    screen = b"GIF89a" + struct.pack("<HH", width, height) + b"\x80\0\0" + b"\0\0\0\xff\xff\xff"
    return screen + b"!\xf9\4\1\0\0\0\0," + struct.pack("<4H", 0, 0, 1, 1) + b"\0\x02\x02\x44\x01\0;"


def tiff_with_a_large_tile(side: int) -> bytes:
    """An image of 16 x 16 pixels in one compressed tile of `side` x `side`."""
    tags = [(256, 16), (257, 16), (258, 8), (259, 5), (262, 1), (277, 1), (322, side), (323, side), (324, 8), (325, 4)]
    entries = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags)
    return b"II*\0" + struct.pack("<I", 12) + bytes(4) + struct.pack("<H", len(tags)) + entries + bytes(4)


LARGE = 3000
COLOURS = {mode: Image.new(mode, (LARGE, LARGE), 77) for mode in ("1", "L", "RGB", "RGBA", "LA", "P", "CMYK", "F")}
COLOURS["P"].putpalette([0, 0, 0, *RED])
COLOURS["I;16"] = Image.fromarray(np.full((LARGE, LARGE), 999, np.uint16))
TURNED = Image.Exif()
TURNED[0x0112] = 6


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="measures memory as Linux does")
@pytest.mark.parametrize(
    ("mode", "suffix", "options"),
    [
        *((mode, "png", {}) for mode in ("1", "L", "RGB", "RGBA", "LA", "P", "I;16")),
        ("P", "png", {"transparency": 1}),
        ("P", "gif", {}),
        ("RGB", "jpg", {}),
        ("RGB", "jpg", {"progressive": True}),
        ("CMYK", "jpg", {"progressive": True}),
        ("RGB", "bmp", {}),
        ("RGB", "webp", {}),
        ("RGBA", "webp", {"lossless": True}),
        ("RGB", "tif", {"compression": "tiff_lzw", "strip_size": 1 << 30}),
        ("RGB", "tif", {"compression": "tiff_lzw", "exif": TURNED}),
        ("F", "tif", {"compression": "tiff_lzw"}),
        ("I;16", "pgm", {}),
        ("RGB", "ppm", {}),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value) or "plain",
)
def test_the_memory_is_known_before_decoding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str, suffix: str, options: dict[str, Any]
) -> None:
    check_memory(saved(tmp_path / f"large.{suffix}", COLOURS[mode], **options), monkeypatch)


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="measures memory as Linux does")
@pytest.mark.parametrize("make", [jpeg_with_a_scan_per_channel, tiny_gif])
def test_the_memory_of_handmade_files_is_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Callable[[int, int], bytes]
) -> None:
    (tmp_path / "large").write_bytes(make(LARGE, LARGE))
    check_memory(tmp_path / "large", monkeypatch)


def check_memory(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare what is taken from the budget with the growth of the resident memory."""
    taken: list[int] = []
    budget = image_files.DECODING.taken
    monkeypatch.setattr(image_files.DECODING, "taken", lambda count: (taken.append(count), budget(count))[1])
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = resident("VmRSS")
    with pillow_unlimited():
        decode(path, 96)
    grown = resident("VmHWM") - before
    assert grown < 1.1 * taken[0] + 2**22, "more memory than was taken from the budget"


def resident(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(f"{field}:"))


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="measures memory as Linux does")
def test_all_threads_share_one_budget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.gif").write_bytes(tiny_gif(2 * LARGE, 2 * LARGE))
    monkeypatch.setattr(image_files, "DECODING", Budget(250 << 20))  # one at a time
    Path("/proc/self/clear_refs").write_text("5")
    before = resident("VmRSS")
    with pillow_unlimited(), ThreadPoolExecutor(4) as threads:
        assert len(list(threads.map(lambda _: decode(tmp_path / "a.gif", SIDE), range(4)))) == 4
    assert resident("VmHWM") - before < 400 << 20  # all four at once: 0.9 GiB


def test_bombs_are_refused(tmp_path: Path) -> None:
    bombs = {
        "screen.gif": tiny_gif(65_000, 65_000),
        "scans.jpg": jpeg_with_a_scan_per_channel(22_000, 22_000),
        "tile.tif": tiff_with_a_large_tile(40_000),
    }
    for name, data in bombs.items():
        (tmp_path / name).write_bytes(data)
        assert "too large" in reason(tmp_path / name), name


def test_a_jpeg_with_thousands_of_scans_is_refused(tmp_path: Path) -> None:
    """Each costs a pass over the whole image."""
    data = saved(tmp_path / "a.jpg", picture(), progressive=True).read_bytes()
    (tmp_path / "a.jpg").write_bytes(data[:-2] + data[data.rindex(b"\xff\xda") : -2] * 1000 + data[-2:])
    assert reason(tmp_path / "a.jpg") == "a JPEG with too many scans"


# ------------------------------------------------------------------------------------------------------- broken files


def test_damaged_files_have_a_reason(tmp_path: Path) -> None:
    whole = {
        suffix: saved(tmp_path / f"a.{suffix}", picture(200, 200)).read_bytes() for suffix in ("jpg", "png", "bmp")
    }
    for suffix, data in whole.items():
        (tmp_path / f"cut.{suffix}").write_bytes(data[: len(data) // 2])
        assert reason(tmp_path / f"cut.{suffix}") == "damaged or truncated"
    (tmp_path / "empty.jpg").touch()
    assert reason(tmp_path / "empty.jpg") == "empty file"
    (tmp_path / "text.jpg").write_text("<html>404</html>")
    assert reason(tmp_path / "text.jpg") == "not an image"
    (tmp_path / "script.jpg").write_text("%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\nshowpage\n")
    assert reason(tmp_path / "script.jpg") == "not an image"  # PostScript is never run
    saved(tmp_path / "nan.tiff", Image.fromarray(np.full((9, 9), np.nan, np.float32)))
    assert reason(tmp_path / "nan.tiff") == "non-finite values"


def test_temporary_failures_are_marked(tmp_path: Path) -> None:
    with pytest.raises(Unusable, match="no such file") as missing:
        decode(tmp_path / "missing.jpg", SIDE)
    assert not missing.value.lasting
    (tmp_path / "empty.jpg").touch()
    with pytest.raises(Unusable) as empty:
        decode(tmp_path / "empty.jpg", SIDE)
    assert empty.value.lasting


def test_the_content_counts_not_the_name(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    Image.new("RGB", (20, 20), RED).save(buffer, "PNG")
    (tmp_path / "named.jpg").write_bytes(buffer.getvalue())
    assert colour(tmp_path / "named.jpg") == list(RED)


FORMATS = ("JPEG", "PNG", "GIF", "BMP", "WEBP", "TIFF", "PPM")


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    kind=st.sampled_from(FORMATS),
    cut=st.floats(0, 1),
    damage=st.lists(st.tuples(st.floats(0, 1), st.binary(max_size=4))),
)
def test_damage_costs_no_more_than_the_file(
    tmp_path: Path, kind: str, cut: float, damage: list[tuple[float, bytes]]
) -> None:
    buffer = io.BytesIO()
    picture(30, 20).save(buffer, kind)
    data = bytearray(buffer.getvalue())
    for place, junk in damage:
        start = int(place * (len(data) - 1))
        data[start : start + len(junk)] = junk
    (tmp_path / "damaged").write_bytes(data[: int(len(data) * cut)])
    with pillow_unlimited():
        try:
            assert decode(tmp_path / "damaged", SIDE).shape == (3, SIDE, SIDE)
        except Unusable as told:
            assert "\n" not in str(told)
