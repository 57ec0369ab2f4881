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
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError
from PIL.Image import Resampling, Transpose

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

PIXEL_LIMIT = 100_000_000  # in memory: 300 MB of RGB per thread; phones make 50 to 200 megapixels, in JPEG
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
    """Turn off Pillow's warnings and its pixel limit, which does not know a JPEG's scale: ours does."""
    with _pillow:  # both are global
        limit = Image.MAX_IMAGE_PIXELS
        Image.MAX_IMAGE_PIXELS = None
        try:
            with warnings.catch_warnings(action="ignore"):
                yield
        finally:
            Image.MAX_IMAGE_PIXELS = limit


def decode(path: str | os.PathLike[str], side: int) -> Pixels:
    """Decode a file, turn it upright, resize its shorter side to `side`, crop the centre: uint8 (3, side, side).

    A JPEG is decoded at the smallest scale of 1/1, 1/2, 1/4, 1/8 that is still large enough. Transparent pixels become
    white, 16 bits become 8, small images are enlarged, and of an animation the first frame is taken.
    """
    try:
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
    pixels = picture.width * picture.height
    picture.draft(None, (side, side))  # has an effect on JPEG only
    if not picture.info.get("progressive"):  # a progressive JPEG is held whole, whatever its scale
        pixels = picture.width * picture.height
    if pixels > PIXEL_LIMIT:
        raise Unusable(f"too large ({pixels / 1e6:,.0f} megapixels)")
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


def _plain(picture: Image.Image) -> Image.Image:
    """Convert to mode L or RGB."""
    if picture.mode.startswith("I") or picture.mode == "F":
        return Image.fromarray(_to_bytes(np.asarray(picture)))
    if picture.mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in picture.info:
        picture = picture.convert("RGBA")
        white = Image.new("RGBA", picture.size, "white")
        return Image.alpha_composite(white, picture).convert("RGB")
    return picture.convert("L" if picture.mode in ("1", "L") else "RGB")


def _to_bytes(values: NDArray[np.generic]) -> Pixels:
    """Convert 16-bit grey values, or floats in [0, 1], to bytes; a wider range is scaled down to fit."""
    numbers = values.astype(np.float32)
    if not np.isfinite(numbers).all():
        raise Unusable("non-finite values")
    low = min(0.0, float(numbers.min()))
    high = max(65535.0 if values.dtype.kind in "iu" else 1.0, float(numbers.max()))
    return np.round((numbers - low) * (255 / (high - low))).astype(np.uint8)


def _unusable(path: str | os.PathLike[str], error: Exception) -> Unusable:
    if isinstance(error, OSError) and error.errno is not None:
        return Unusable((error.strerror or str(error)).lower(), lasting=False)
    if isinstance(error, (MemoryError, Image.DecompressionBombError)):
        return Unusable("too large")
    if isinstance(error, UnidentifiedImageError):
        return Unusable("not an image" if Path(path).stat().st_size else "empty file")
    return Unusable("damaged or truncated")
