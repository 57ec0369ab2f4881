"""Image files: list those below a folder in a fixed order, and decode one to a square of RGB bytes."""

from __future__ import annotations

import hashlib
import os
import stat
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError
from PIL.Image import Resampling, Transpose
from PIL.JpegImagePlugin import JpegImageFile
from PIL.TiffImagePlugin import TiffImageFile

from byov._core.memory import Budget

# -------------------------------------------------------------------------------------------------------------- listing

SUFFIXES = frozenset(("jpg", "jpeg", "jpe", "jfif", "png", "bmp", "gif", "webp", "tif", "tiff", "ppm", "pgm"))
# Photographs in formats that are not supported: they are reported, since a folder may be full of them.
OTHER_SUFFIXES = frozenset(("heic", "heif", "avif", "jxl", "jp2", "psd", "dng", "cr2", "cr3", "nef", "arw", "orf"))
REPORT_EVERY = 10_000  # files


class File(NamedTuple):
    """An image file; the size and time of a broken link are -1."""

    path: str
    """Below the listed folder, with / as separator."""
    size: int
    mtime_ns: int


@dataclass(frozen=True)
class Listing:
    """The image files below a folder, sorted by path."""

    files: list[File] = field(default_factory=list)
    unread: list[tuple[str, str]] = field(default_factory=list)
    """Folders that cannot be listed, and image files in unsupported formats: path and reason."""

    def digest(self) -> str:
        """Return a SHA-256 that changes when a file is added, removed, renamed or written to."""
        lines = ["\0".join(map(str, row)) for rows in (self.files, self.unread) for row in rows]
        return hashlib.sha256(os.fsencode("\n".join(lines))).hexdigest()


def list_images(root: Path, report: Callable[[int], None] = lambda found: None) -> Listing:
    """List all image files below `root`, by their suffix; `report` is called now and then with their number.

    Hidden files and folders are skipped. Links are followed; a folder that is reached twice is listed once, so a link
    to a parent does not loop. Only an error at `root` itself is raised. Listing a million files, with their digest,
    took 15 seconds on two busy cores, and 35 when the disk had to be read.
    """
    listing, reported = Listing(), 0
    seen: set[tuple[int, int]] = set()
    waiting = [(str(root), "")]
    while waiting:
        folder, prefix = waiting.pop()
        try:
            status = Path(folder).stat()
            if (status.st_dev, status.st_ino) in seen:
                continue
            seen.add((status.st_dev, status.st_ino))
            with os.scandir(folder) as entries:
                folders = _take(entries, prefix, listing)
        except OSError as error:
            if not prefix:
                raise
            listing.unread.append((prefix, (error.strerror or str(error)).lower()))
            continue
        # Popped from the end: in the order of names, links last, so that a folder reached twice has its own name.
        waiting += [(f"{folder}/{name}", f"{prefix}{name}/") for _, name in sorted(folders, reverse=True)]
        if len(listing.files) - reported >= REPORT_EVERY:
            reported = len(listing.files)
            report(reported)
    listing.files.sort()
    listing.unread.sort()
    return listing


def _take(entries: Iterable[os.DirEntry[str]], prefix: str, listing: Listing) -> list[tuple[bool, str]]:
    """Add a folder's images to the listing; returns its folders: whether a link, and the name."""
    folders = []
    for entry in entries:
        name = entry.name
        if name.startswith("."):
            continue
        if is_folder(entry):
            folders.append((entry.is_symlink(), name))
            continue
        suffix = suffix_of(name)
        if suffix in SUFFIXES:
            try:
                status = entry.stat()
            except OSError:  # a broken link: decoding reports it
                listing.files.append(File(prefix + name, -1, -1))
                continue
            if stat.S_ISREG(status.st_mode):  # reading a pipe would block
                listing.files.append(File(prefix + name, status.st_size, status.st_mtime_ns))
        elif suffix in OTHER_SUFFIXES:
            listing.unread.append((prefix + name, f"the format {suffix} is not read"))
    return folders


def is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link to itself, or no permission
        return False


def suffix_of(name: str) -> str:
    return name.rpartition(".")[2].lower()


# ------------------------------------------------------------------------------------------------------------- decoding

Pixels = NDArray[np.uint8]
Box = tuple[int, int, int, int]

# All threads that decode share it. A phone's JPEG of 200 megapixels takes a fraction: it is decoded at a smaller scale.
DECODING = Budget(1 << 30)
_STRIP = 1 << 20  # pixels that are converted at a time: a conversion takes up to five times the memory of the image
_SCANS = 100  # of a JPEG; usual are 1 to 14, and each costs a pass over the whole image
# No others: PostScript and the like would start programs. (Pillow opens a phone's MPO as a JPEG.)
FORMATS = ("JPEG", "PNG", "BMP", "GIF", "WEBP", "TIFF", "PPM")
_ORIENTATION = 0x0112  # EXIF's tag; below, the transposition that undoes each value
_UPRIGHT = {
    2: Transpose.FLIP_LEFT_RIGHT,
    3: Transpose.ROTATE_180,
    4: Transpose.FLIP_TOP_BOTTOM,
    5: Transpose.TRANSPOSE,
    6: Transpose.ROTATE_270,
    7: Transpose.TRANSVERSE,
    8: Transpose.ROTATE_90,
}

DECODED_AT_ONCE = 32  # files per task of a thread

_pillow = Lock()
_blocks: Any = Image.core  # type: ignore[attr-defined]


class Unusable(Exception):
    """Why a file is skipped, in a few words."""

    def __init__(self, reason: str, lasting: bool = True) -> None:
        super().__init__(reason)
        self.lasting = lasting
        """Whether the same bytes will fail again, unlike a missing permission."""


def printable(path: str) -> str:
    """Escape what cannot be printed, so that a path is one line of text in messages and on pages."""
    return path if path.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in path)


@contextmanager
def pillow_unlimited() -> Iterator[None]:
    """Turn off Pillow's warnings and its pixel limit, which does not know a JPEG's scale: ours does.

    Large images are also allocated in blocks that glibc returns to the system when they are freed. With Pillow's own,
    each of eight threads kept up to 0.5 GiB after an image of 100 megapixels.
    """
    with _pillow:  # all of them are global
        limit, block = Image.MAX_IMAGE_PIXELS, _blocks.get_block_size()
        Image.MAX_IMAGE_PIXELS = None
        _blocks.set_block_size(64 << 20)
        try:
            with warnings.catch_warnings(action="ignore"):
                yield
        finally:
            Image.MAX_IMAGE_PIXELS = limit
            _blocks.set_block_size(block)


def decode(path: str | os.PathLike[str], side: int) -> Pixels:
    """Decode a file, turn it upright, resize its shorter side to `side`, crop the centre: uint8 (3, side, side).

    A JPEG is decoded at the smallest scale of 1/1, 1/2, 1/4, 1/8 that is still large enough. Transparent pixels become
    white, 16 bits become 8, small images are enlarged, and of an animation the first frame is taken.
    """
    try:
        if Path(path).stat().st_size > DECODING.total:  # Pillow reads some formats whole
            raise Unusable("too large")
        with Image.open(path, formats=FORMATS) as picture:
            return _square(picture, side)
    except Unusable:
        raise
    except Exception as error:  # a broken file makes Pillow raise almost anything
        raise _unusable(path, error) from error


def decode_picture(picture: Image.Image, side: int) -> Pixels:
    """Convert an open Pillow image as `decode` converts a file; the image itself is not changed."""
    try:
        return _square(picture.copy(), side)
    except Unusable:
        raise
    except Exception as error:
        raise Unusable("damaged or truncated") from error


def decode_some(root: Path, side: int, paths: Iterable[str]) -> list[Pixels | Unusable]:
    """Decode files below a folder; in place of one that fails, the reason."""
    results: list[Pixels | Unusable] = []
    for path in paths:
        try:
            results.append(decode(root / path, side))
        except Unusable as reason:
            results.append(reason)
    return results


def _square(picture: Image.Image, side: int) -> Pixels:
    megapixels = picture.width * picture.height / 1e6
    coefficients = _coefficients(picture)
    picture.draft(None, (side, side))  # has an effect on JPEG only
    needed = coefficients + decoding_bytes(picture)
    if needed > DECODING.total:
        raise Unusable(f"too large ({megapixels:,.0f} megapixels)")
    with DECODING.taken(needed):
        return _decoded(picture, side)


def _decoded(picture: Image.Image, side: int) -> Pixels:
    picture.load()
    turn = _turn(picture)  # after `load`, which turns a TIFF itself
    plain = _plain(picture)
    across, down = plain.size
    short = min(across, down)
    left, top = (across - short) / 2, (down - short) / 2
    square = plain.resize((side, side), Resampling.BICUBIC, (left, top, left + short, top + short))
    if turn is not None:
        square = square.transpose(turn)  # last, where it costs least: a centred square allows that
    return np.ascontiguousarray(np.asarray(square.convert("RGB")).transpose(2, 0, 1))


def _turn(picture: Image.Image) -> Transpose | None:
    try:
        return _UPRIGHT.get(picture.getexif().get(_ORIENTATION, 1))
    except Exception:  # damaged metadata of an intact image
        return None


# Bytes per pixel of an image in Pillow, and what a decoder takes besides. (Measured with Pillow 13; a test repeats it.)
_STORED = {"1": 1, "L": 1, "P": 1, "I;16": 2, "I;16B": 2, "I;16L": 2}
_DECODER = {"GIF": 1, "WEBP": 12, "PPM": 8, "BMP": 2}
_BITS, _STRIP_ROWS, _TILE_WIDTH, _TILE_ROWS = 258, 278, 322, 323  # TIFF's tags


def decoding_bytes(picture: Image.Image) -> int:
    """Return the memory that decoding an open image takes, from its header: the image, its conversion, the decoder."""
    pixels, stored, plain = picture.width * picture.height, _STORED.get(picture.mode, 4), _plain_mode(picture)
    needed = pixels * (stored + _DECODER.get(picture.format or "", 0))
    if plain is not None:
        needed += pixels * _STORED.get(plain, 4) + 16 * min(pixels, max(_STRIP, picture.width))
    if isinstance(picture, TiffImageFile):
        tags = picture.tag_v2
        if tags.get(_ORIENTATION, 1) != 1:
            needed += pixels * stored  # Pillow turns it, into a copy
        wide, rows = picture.width, min(tags.get(_STRIP_ROWS, picture.height), picture.height)
        if _TILE_WIDTH in tags:
            wide, rows = tags[_TILE_WIDTH], tags[_TILE_ROWS]
        needed += wide * rows * sum(tags.get(_BITS, (8,))) // 8  # a tile is decoded whole, however small the image is
    return needed


def _coefficients(picture: Image.Image) -> int:
    """Return the memory that a JPEG of several scans takes besides, at any scale: for the coefficients of all pixels.

    Progressive files have several, and sequential ones may: then the first has fewer channels than the image.
    """
    if not isinstance(picture, JpegImageFile) or picture.fp is None:
        return 0
    channels, after_header = picture.layers, picture.fp.tell()
    header = bytes((0xFF, 0xDA, 0, 6 + 2 * channels, channels))  # of a scan with all channels
    picture.fp.seek(max(0, after_header - 8 - 2 * channels))
    whole = picture.fp.read(len(header)) == header
    if whole and not picture.info.get("progressive"):
        return 0
    picture.fp.seek(0)
    if picture.fp.read().count(header[:2]) > _SCANS:
        raise Unusable("a JPEG with too many scans")
    return 2 * channels * picture.width * picture.height


def _plain_mode(picture: Image.Image) -> str | None:
    """Return the mode that `_plain` converts to; None if the image has it already."""
    transparent = "transparency" in picture.info
    if picture.mode in ("L", "RGB") and not transparent:
        return None
    return "L" if _is_wide(picture) or (picture.mode == "1" and not transparent) else "RGB"


def _is_wide(picture: Image.Image) -> bool:
    """Whether the values are floats, or integers of more than 8 bits."""
    return picture.mode == "F" or picture.mode.startswith("I")


def _plain(picture: Image.Image) -> Image.Image:
    """Convert to mode L or RGB, strip by strip: the memory of a conversion is that of a strip."""
    mode = _plain_mode(picture)
    if mode is None:
        return picture
    rows = max(1, _STRIP // picture.width)
    boxes = [(0, top, picture.width, min(top + rows, picture.height)) for top in range(0, picture.height, rows)]
    convert = _bytes_of(picture, boxes) if _is_wide(picture) else _plain_strip
    plain = Image.new(mode, picture.size)
    for box in boxes:
        plain.paste(convert(picture.crop(box)), box)
    return plain


def _plain_strip(strip: Image.Image) -> Image.Image:
    if strip.mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in strip.info:
        strip = strip.convert("RGBA")
        white = Image.new("RGBA", strip.size, "white")
        return Image.alpha_composite(white, strip).convert("RGB")
    return strip.convert("L" if strip.mode == "1" else "RGB")


def _bytes_of(picture: Image.Image, boxes: Iterable[Box]) -> Callable[[Image.Image], Image.Image]:
    """Return the conversion of an image's strips from 16-bit grey values, or floats in [0, 1], to bytes.

    A wider range is scaled down to fit.
    """
    low, high = 0.0, 1.0 if picture.mode == "F" else 65535.0
    for box in boxes:
        numbers = np.asarray(picture.crop(box)).astype(np.float32)
        if not np.isfinite(numbers).all():
            raise Unusable("non-finite values")
        low, high = min(low, float(numbers.min())), max(high, float(numbers.max()))

    def convert(strip: Image.Image) -> Image.Image:
        numbers = np.asarray(strip).astype(np.float32)
        return Image.fromarray(np.round((numbers - low) * (255 / (high - low))).astype(np.uint8))

    return convert


def _unusable(path: str | os.PathLike[str], error: Exception) -> Unusable:
    if isinstance(error, OSError) and error.errno is not None:
        return Unusable((error.strerror or str(error)).lower(), lasting=False)
    if isinstance(error, (MemoryError, Image.DecompressionBombError)):
        return Unusable("too large")
    if isinstance(error, UnidentifiedImageError):
        return Unusable("not an image" if Path(path).stat().st_size else "empty file")
    return Unusable("damaged or truncated")
