"""Folders as sources: layouts, skipped files, and the cache of decoded images."""

from __future__ import annotations

import errno
import json
import os
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from byov._core.errors import BadInput
from byov.data import image_folder
from byov.data.image_files import File, Unusable, decode
from byov.data.image_folder import class_names, split_roots, storage_side
from byov.data.images import ImageSet
from byov.data.sources import Source, open_source

SIZE = 16  # of the network's input; the cached images have 24


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the caches: empty at first."""
    monkeypatch.setenv("BYOV_DATA", str(tmp_path / "data"))
    return tmp_path / "data" / "folders"


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    return tmp_path / "photos"


def put(root: Path, *names: str) -> Path:
    """Small images, each of a different colour."""
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        number = sum(name.encode()) % 251
        Image.new("RGB", (30, 20), (number, 255 - number, number // 2)).save(root / name)
    return root


def spoil(root: Path, *names: str) -> None:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(b"")


def source(root: Path) -> Source:
    return open_source(f"folder:{root}", SIZE)


def load(root: Path, split: Any = "train") -> tuple[ImageSet, list[str]]:
    """The images, and the messages."""
    said: list[str] = []
    return source(root).load(split, say=said.append), said


def refused(root: Path, split: Any = "train") -> str:
    with pytest.raises(BadInput) as caught:
        load(root, split)
    assert "\n" not in str(caught.value) and str(caught.value).endswith(".")
    return str(caught.value)


def left_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


# ------------------------------------------------------------------------------------------------------------- images


def test_images_are_the_decoded_files_in_the_order_of_their_names(photos: Path) -> None:
    put(photos, "b/2.png", "a.jpg", "b/1.gif", "c/d/e/f.bmp")
    images, said = load(photos)
    assert images.images.shape == (4, 3, 24, 24) and images.labels is None and said == []
    for pixels, name in zip(images.images, ("a.jpg", "b/1.gif", "b/2.png", "c/d/e/f.bmp"), strict=True):
        assert np.array_equal(pixels.numpy(), decode(photos / name, 24))
    batch = images.images[torch.tensor([2, 0])]
    assert torch.equal(batch[1], images.images[0])
    batch.zero_()  # a copy: the cache does not change
    assert images.images[0].any()


def test_grey_folders_are_rgb(photos: Path) -> None:
    photos.mkdir()
    for i in range(2):
        Image.new("L", (9, 9), i).save(photos / f"{i}.png")
    assert load(photos)[0].images.shape == (2, 3, 24, 24)


@pytest.mark.parametrize(("size", "side"), [(8, 16), (16, 24), (32, 48), (64, 96), (100, 152), (128, 152), (224, 256)])
def test_storage_side(size: int, side: int) -> None:
    assert storage_side(size) == side


@given(st.integers(4, 1024))
def test_the_storage_side_is_a_little_larger(size: int) -> None:
    assert size < storage_side(size) <= 1.5 * size + 8 and storage_side(size) % 8 == 0


def test_the_number_of_threads_changes_nothing(photos: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(photos, *(f"{i}.jpg" for i in range(30)))
    spoil(photos, "11.jpg", "5.jpg")
    monkeypatch.setattr(image_folder, "DECODED_AT_ONCE", 2)
    threads, files = torch.get_num_threads(), []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            images, _ = load(photos)
            assert len(images) == 28
            files.append((next(cache.iterdir()) / "images.u8").read_bytes())
            shutil.rmtree(cache)
    finally:
        torch.set_num_threads(threads)
    assert files[0] == files[1] == files[2]


def test_progress_is_told(photos: Path) -> None:
    put(photos, *(f"{i}.jpg" for i in range(5)))
    told: list[tuple[str, int, int]] = []
    source(photos).load("train", lambda *step: told.append(step))
    assert told == [(f"decoding {photos}", 0, 5), (f"decoding {photos}", 5, 5)]
    source(photos).load("train", lambda *step: told.append(step))
    assert len(told) == 2  # cached: no progress to report


# ------------------------------------------------------------------------------------------------------------- layout


@pytest.mark.parametrize(
    ("names", "roots"),
    [
        (["a.jpg"], {"train": ""}),
        (["x/a.jpg", "y/a.jpg"], {"train": ""}),
        (["train/a.jpg", "test/b.jpg"], {"train": "train", "test": "test"}),
        (["Train/a.jpg", "VAL/b.jpg"], {"train": "Train", "test": "VAL"}),
        (["train/a.jpg", "valid/b.jpg", "other/c.jpg"], {"train": "train", "test": "valid"}),
        (["train/x/a.jpg", "test/b.jpg", "val/x/c.jpg"], {"train": "train", "test": "val"}),  # as ImageNet's
        (["train/a.jpg", "test/b.jpg", "val/c.jpg"], {"train": "train", "test": "test"}),
        (["train/a.jpg"], {"train": "train"}),
        (["train/a.jpg", "bus/b.jpg"], {"train": ""}),  # a train is a vehicle
        (["train/a.jpg", "b.jpg"], {"train": ""}),
        (["test/a.jpg", "val/b.jpg"], {"train": ""}),
    ],
)
def test_splits(photos: Path, names: list[str], roots: dict[str, str]) -> None:
    put(photos, *names)
    assert split_roots(photos) == {split: photos / name for split, name in roots.items()}
    assert source(photos).splits == tuple(roots)


def labels_of(names: str) -> tuple[str, ...] | None:
    return class_names([[File(name, 1, 1) for name in names.split()]])


def test_classes() -> None:
    assert labels_of("cat/1 cat/2 dog/x/1 dog/y/2") == ("cat", "dog")
    assert labels_of("cat/1 cat/2 dog/1 loose") is None
    assert labels_of("images/1 images/2") is None
    assert labels_of("1 2 3") is None
    assert labels_of("a/1 b/1 c/1") is None  # one folder per image: these are not classes


def test_splits_share_their_classes(photos: Path) -> None:
    put(
        photos,
        *(f"train/{c}/{i}.png" for c in "ac" for i in range(3)),
        *(f"val/{c}/{i}.png" for c in "bc" for i in "1"),
    )
    spoil(photos, "train/a/1.png")
    train, test = load(photos)[0], load(photos, "test")[0]
    assert train.classes == test.classes == ("a", "b", "c")
    assert train.labels is not None and train.labels.tolist() == [0, 0, 2, 2, 2]
    assert test.labels is not None and test.labels.tolist() == [1, 2]


def test_one_split_may_have_no_labels(photos: Path) -> None:
    put(photos, *(f"train/{c}/{i}.png" for c in "ab" for i in range(2)), "test/1.png", "test/2.png")
    assert load(photos)[0].classes == ("a", "b")
    assert load(photos, "test")[0].labels is None


def test_a_split_by_suffix(photos: Path) -> None:
    put(photos, "train/1.png", "test/2.png")
    assert open_source(f"folder:{photos}@test").splits == ("test",)
    with pytest.raises(BadInput, match="no test images"):
        open_source(f"folder:{photos / 'train'}@test")


# --------------------------------------------------------------------------------------------------- skipped, refused


def test_bad_files_are_skipped_counted_and_named(photos: Path, cache: Path) -> None:
    put(photos, *(f"good/{i}.jpg" for i in range(10)))
    spoil(photos, "bad/1.jpg", "bad/2.jpg", "bad/3.jpg")
    (photos / "bad" / "4.jpg").write_text("no picture")
    (photos / "phone.heic").touch()
    whole = (photos / "good" / "0.jpg").read_bytes()
    (photos / "cut.jpg").write_bytes(whole[:-20])
    for _ in range(2):  # also when they are cached
        images, (warning,) = load(photos)
        assert len(images) == 10
        assert warning.startswith(f"warning: 6 of 16 files in {photos} are skipped: bad/1.jpg (empty file), bad/2.jpg")
        assert "bad/3.jpg (empty file) and 3 more; " in warning and "\n" not in warning
    names = next(cache.iterdir()) / "skipped.txt"
    assert str(names) in warning
    assert names.read_text().splitlines() == [
        *(f"bad/{i}.jpg: empty file" for i in (1, 2, 3)),
        "bad/4.jpg: not an image",
        "cut.jpg: damaged or truncated",
        "phone.heic: the format heic is not read",
    ]


def test_unprintable_names_are_escaped(photos: Path, cache: Path) -> None:
    put(photos, "a.jpg")
    spoil(photos, "evil\x1b[2J\n.jpg")
    images, (warning,) = load(photos)
    assert len(images) == 1 and warning.isprintable() and "evil\\x1b[2J\\n.jpg" in warning
    try:
        spoil(photos, os.fsdecode(b"\xff.jpg"))
    except OSError:
        return  # this file system refuses such names
    for _ in range(2):
        assert "\\udcff" in load(photos)[1][-1]


def test_not_a_folder_of_images(photos: Path, cache: Path, tmp_path: Path) -> None:
    assert refused(photos) == f"there is no folder {photos}; check the path."
    photos.mkdir()
    assert f"there are no images in {photos};" in refused(photos)
    (photos / "a.heic").touch()
    assert "but a.heic (the format heic is not read); give a folder with files that end in" in refused(photos)
    spoil(photos, "a.jpg", "b.jpg")
    sentence = refused(photos)
    assert f"none of the 2 image files in {photos} can be decoded (the first is a.jpg: empty file)" in sentence
    assert f"{photos / 'a.jpg'} is a file; give the folder" in refused(photos / "a.jpg")
    assert left_in(cache) == []
    for spec in ("folder:", "folder"):
        with pytest.raises(BadInput, match="folder:PATH"):
            open_source(spec)
    with pytest.raises(BadInput, match=f"did you mean folder:{photos}"):
        open_source(str(photos))


def test_an_empty_split(photos: Path) -> None:
    put(photos, "train/a.jpg")
    (photos / "test").mkdir()
    assert len(load(photos)[0]) == 1
    assert f"there are no images in {photos / 'test'}" in refused(photos, "test")


def test_a_folder_that_may_not_be_looked_into(photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(photos, "a.jpg")

    def closed(path: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(os, "scandir", closed)
    assert refused(photos) == (f"cannot open the folder {photos}: permission denied; fix that, or give another folder.")


@pytest.mark.parametrize("size", [0, -5, 3])
def test_a_size_that_cannot_be(photos: Path, size: int) -> None:
    put(photos, "a.jpg")
    with pytest.raises(BadInput, match="at least 4"):
        open_source(f"folder:{photos}", size)


# ---------------------------------------------------------------------------------------------------------------- cache


@pytest.fixture
def no_decoding(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """After this call, decoding anything fails."""

    def forbid() -> None:
        def fail(*_: object) -> None:
            raise AssertionError("decoded again")

        monkeypatch.setattr("byov.data.image_files.decode", fail)

    yield forbid


def test_decoded_once(photos: Path, cache: Path, no_decoding: Any) -> None:
    put(photos, *(f"{c}/{i}.jpg" for c in "ab" for i in range(2)))
    first, _ = load(photos)
    no_decoding()
    second, said = load(photos)
    assert torch.equal(first.images, second.images) and said == []
    assert first.labels is not None and second.labels is not None and torch.equal(first.labels, second.labels)
    assert len(left_in(cache)) == 1
    (cache.parent / "folders").chmod(0o500)  # a cache made by others is enough
    try:
        assert len(load(photos)[0]) == 4
    finally:
        (cache.parent / "folders").chmod(0o700)


def test_each_side_has_a_separate_cache(photos: Path, cache: Path) -> None:
    put(photos, "a.jpg")
    for size in (16, 32):
        assert open_source(f"folder:{photos}", size).load("train").images.shape[-1] == storage_side(size)
    assert open_source(f"folder:{photos}").load("train").images.shape[-1] == 96
    assert len(left_in(cache)) == 3


def test_a_changed_folder_is_decoded_again(photos: Path, cache: Path) -> None:
    put(photos, "a.jpg", "b.jpg")
    before, _ = load(photos)
    old = left_in(cache)
    put(photos, "c.jpg")
    after, said = load(photos)
    assert len(after) == 3 and said == [f"{photos} has changed since its images were decoded: decoding them again."]
    assert len(left_in(cache)) == 1 and left_in(cache) != old
    assert before.images.shape == (2, 3, 24, 24) and before.images.any()  # whoever has mapped them can still read them
    Image.new("RGB", (30, 20), "black").save(photos / "c.jpg")
    os.utime(photos / "c.jpg", ns=(5, 5))
    assert not load(photos)[0].images[2].any()


@pytest.mark.parametrize("damage", ["cut", "no images", "no list", "bad list"])
def test_a_damaged_cache_is_made_again(photos: Path, cache: Path, damage: str) -> None:
    put(photos, "a.jpg", "b.jpg")
    load(photos)
    entry = next(cache.iterdir())
    images = (entry / "images.u8").read_bytes()
    if damage == "cut":
        (entry / "images.u8").write_bytes(images[:-1])
    elif damage == "no images":
        (entry / "images.u8").unlink()
    elif damage == "no list":
        (entry / "kept.json").unlink()
    else:
        (entry / "kept.json").write_text("{")
    assert len(load(photos)[0]) == 2
    assert (entry / "images.u8").read_bytes() == images and json.loads((entry / "kept.json").read_text())["images"] == 2


def test_a_file_that_may_be_read_by_now(photos: Path, monkeypatch: pytest.MonkeyPatch, no_decoding: Any) -> None:
    put(photos, "a.jpg", "b.jpg")

    def guarded(path: Path, side: int) -> Any:
        if path.name == "b.jpg":
            raise Unusable("permission denied", lasting=False)
        return decode(path, side)

    monkeypatch.setattr("byov.data.image_files.decode", guarded)
    assert "b.jpg (permission denied)" in load(photos)[1][0]
    images, said = load(photos)
    assert len(images) == 1 and len(said) == 1  # still unreadable
    monkeypatch.setattr("byov.data.image_files.decode", decode)
    assert len(load(photos)[0]) == 2
    no_decoding()
    assert len(load(photos)[0]) == 2


def test_an_interruption_leaves_nothing(photos: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(photos, *(f"{i}.jpg" for i in range(9)))
    monkeypatch.setattr(image_folder, "DECODED_AT_ONCE", 2)

    def interrupt(what: str, done: int, total: int) -> None:
        if done >= 4:
            raise KeyboardInterrupt  # not by a signal, which shells ignore in background jobs

    with pytest.raises(KeyboardInterrupt):
        source(photos).load("train", interrupt)
    assert left_in(cache) == []
    assert len(load(photos)[0]) == 9


def test_leftovers_of_killed_processes_are_removed(photos: Path, cache: Path) -> None:
    put(photos, "a.jpg")
    load(photos)
    stem = left_in(cache)[0].rpartition("-")[0]
    fresh, stale = cache / f".{stem}-1.2.tmp", cache / f".{stem}-1.3.tmp"
    for folder in (fresh, stale):
        folder.mkdir()
        (folder / "images.u8").touch()
    for path in (stale / "images.u8", stale):
        os.utime(path, times=(time.time() - 9000,) * 2)
    put(photos, "b.jpg")
    load(photos)
    assert fresh.exists() and not stale.exists()


def test_no_space(photos: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, files_up_to: Any) -> None:
    put(photos, *(f"{i}.jpg" for i in range(20)))
    with files_up_to(5000):
        assert "no space left to write" in refused(photos)
    assert left_in(cache) == []
    usage = shutil.disk_usage(photos)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    assert "BYOV_DATA" in refused(photos)
    assert left_in(cache) == []


def test_a_data_folder_that_cannot_be_made(photos: Path, cache: Path) -> None:
    put(photos, "a.jpg")
    cache.parent.write_text("a file")
    assert "cannot cache the images of" in refused(photos)


def test_several_at_once(photos: Path, cache: Path) -> None:
    put(photos, *(f"{i}.jpg" for i in range(40)))
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda _: load(photos)[0].images, range(4)))
    assert all(torch.equal(images, results[0]) for images in results)
    assert len(left_in(cache)) == 1


def test_a_cache_that_is_truncated_while_mapped(tmp_path: Path) -> None:
    """Reading it would end the process: SIGBUS."""
    path = tmp_path / "images.u8"
    path.write_bytes(bytes(100 * 3 * 16 * 16))
    images = image_folder._mapped(path, 100, 16)
    assert ImageSet(images).subset(torch.tensor([3, 99])).images.sum() == 0
    os.truncate(path, 5000)
    for use in (lambda: images[torch.tensor([99])], lambda: torch.split(images, 10), lambda: images.numpy()):
        with pytest.raises(BadInput, match=r"images.u8 was truncated while in use: repeat the command"):
            use()


def test_a_cache_that_is_removed_while_mapped_can_still_be_read(tmp_path: Path) -> None:
    path = tmp_path / "images.u8"
    path.write_bytes(bytes(100 * 3 * 16 * 16))
    images = image_folder._mapped(path, 100, 16)
    path.unlink()
    assert int(images[torch.tensor([99])].sum()) == 0
