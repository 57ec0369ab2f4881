"""The source `folder:PATH`: all images below a folder, decoded once and cached; with labels if its layout has them.

Splits: PATH/train and PATH/test (or val, valid, validation; in any case of letters) are the splits, and everything next
to them is ignored. Of several test folders, the first that contains folders is taken, else the first. Without such a
pair, everything below PATH is `train`; a PATH that contains only a folder `train` stands for that folder.

Labels: the class of an image is the name of its first folder, if every image of a split is in a folder, and there are
at least two folders with two images each on average. Deeper folders are ignored. Folders by date or camera count as
classes too. That does no harm: labels are for probes, monitors and supervised methods; byov and byol never see them.

Cache: decoded images are one file in the data folder, which is mapped into memory. So training never decodes, and a
data set larger than the memory is read page by page. Each cache is a folder; its name depends on the path, the side,
and a digest of all files' names, sizes and times, so that a changed folder is decoded again:

    images.u8     the pixels, uint8 (N, 3, side, side), in the order of the files' names
    kept.json     the folder, the number of images, and the skipped files
    skipped.txt   the skipped files for the user, one per line
"""

from __future__ import annotations

import hashlib
import math
import os
import re
import shutil
import time
import warnings
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch._C import DisableTorchFunctionSubclass

from byov._core.callbacks import Progress, Say
from byov._core.errors import BadInput
from byov._core.files import folder_written_whole, read_json, write_json, write_text
from byov._core.threads import in_order
from byov.data.fetch import data_folder
from byov.data.image_files import (
    DECODED_AT_ONCE,
    SUFFIXES,
    File,
    Listing,
    Unusable,
    decode_some,
    is_folder,
    list_images,
    pillow_unlimited,
    printable,
    suffix_of,
)
from byov.data.images import ImageSet, Outline, Split

DEFAULT_SIZE = 64  # pixels that the network sees
TEST_NAMES = ("test", "val", "valid", "validation")
NAMED = 3  # files that a warning names


def storage_side(image_size: int) -> int:
    """Return the side of cached images: larger than `image_size`, so that a resized crop still has detail."""
    wanted = image_size * (1.5 if image_size < 128 else 8 / 7)  # 96 for 64; ImageNet's usual 256 for 224
    return math.ceil(wanted / 8) * 8


class Folder:
    """A folder of images, for a network whose input has `image_size` pixels."""

    def __init__(self, path: Path, image_size: int = DEFAULT_SIZE) -> None:
        self.side = storage_side(image_size)
        self.roots = split_roots(path.absolute())
        self._listings: dict[Split, Listing] = {}

    def outline(self, split: Split, progress: Progress) -> Outline:
        """Describe a split without decoding it, as if every file could be decoded."""
        files = self._listing(split, progress).files
        return Outline((3, self.side, self.side), len(files), self._classes(files) is not None)

    def read(self, split: Split, progress: Progress, say: Say) -> ImageSet:
        """Read a split from the cache, or decode it first; `say` reports skipped files."""
        root, listing = self.roots[split], self._listing(split, progress)
        found = read_cached(root, listing, self.side, progress, say)
        _report_skipped(found, root, listing, say)
        classes = self._classes(listing.files)
        if classes is None:
            return ImageSet(found.images)
        skipped = {skip.path for skip in found.skipped}
        number = {name: i for i, name in enumerate(classes)}
        labels = [number[_first(file)] for file in listing.files if file.path not in skipped]
        return ImageSet(found.images, torch.tensor(labels), classes)

    def _listing(self, split: Split, progress: Progress) -> Listing:
        for each, root in self.roots.items():  # all splits: they share one list of classes
            if each not in self._listings:
                self._listings[each] = list_folder(root, progress)
        if not self._listings[split].files:
            raise no_images(self.roots[split], self._listings[split])
        return self._listings[split]

    def _classes(self, files: Sequence[File]) -> tuple[str, ...] | None:
        """The classes, if each of these files has one."""
        classes = class_names([listing.files for listing in self._listings.values()])
        return classes if _in_folders(files) else None


def split_roots(path: Path) -> Mapping[Split, Path]:
    """Return the folder of each split."""
    folders, loose = _scan(path)
    name = {folder.lower(): folder for folder in reversed(folders)}
    if "train" not in name:
        return {"train": path}
    train, tests = path / name["train"], [path / name[test] for test in TEST_NAMES if test in name]
    if tests:
        return {"train": train, "test": next((test for test in tests if _scan(test)[0]), tests[0])}
    return {"train": train if len(folders) == 1 and not loose else path}


def class_names(splits: Sequence[Sequence[File]]) -> tuple[str, ...] | None:
    """Return the sorted classes of the splits that have all images in folders; None if there are too few."""
    labelled = [files for files in splits if _in_folders(files)]
    classes = sorted({_first(file) for files in labelled for file in files})
    return tuple(classes) if 2 <= len(classes) <= sum(map(len, labelled)) // 2 else None


def _in_folders(files: Iterable[File]) -> bool:
    return all("/" in file.path for file in files)


def _first(file: File) -> str:
    return file.path.partition("/")[0]


def _scan(path: Path) -> tuple[list[str], bool]:
    """The names of the folders in a folder, and whether it also contains images."""
    try:
        with os.scandir(path) as entries:
            visible = [(entry.name, is_folder(entry)) for entry in entries if not entry.name.startswith(".")]
    except OSError as error:
        raise _cannot_open(path, error) from error
    loose = any(suffix_of(name) in SUFFIXES for name, folder in visible if not folder)
    return sorted(name for name, folder in visible if folder), loose


def list_folder(root: Path, progress: Progress) -> Listing:
    """List the image files below a folder; BadInput if it cannot be opened."""
    try:
        return list_images(root, lambda found: progress(f"listing {root}", found, 0))
    except OSError as error:
        raise _cannot_open(root, error) from error


# ------------------------------------------------------------------------------------------------------------- messages


def _cannot_open(path: Path, error: OSError) -> BadInput:
    if isinstance(error, FileNotFoundError):
        return BadInput(f"there is no folder {path}; check the path.")
    if isinstance(error, NotADirectoryError):
        return BadInput(f"{path} is a file; give the folder that contains the images.")
    reason = (error.strerror or str(error)).lower()
    return BadInput(f"cannot open the folder {path}: {reason}; fix that, or give another folder.")


def no_images(root: Path, listing: Listing) -> BadInput:
    """The error for a listing without files."""
    others = f", but {_named(listing.unread)}" if listing.unread else ""
    kinds = ", ".join(sorted(SUFFIXES))
    return BadInput(f"there are no images in {root}{others}; give a folder with files that end in one of {kinds}.")


def _report_skipped(found: Cached, root: Path, listing: Listing, say: Say) -> None:
    skipped = [skip[:2] for skip in found.skipped] + listing.unread
    if skipped:
        total = len(listing.files) + len(listing.unread)
        say(
            f"warning: {len(skipped):,} of {total:,} files in {root} are skipped: {_named(skipped)}; "
            f"{found.folder / 'skipped.txt'} lists all."
        )


def _named(skipped: Sequence[tuple[str, str]]) -> str:
    """The first few, and how many more."""
    named = ", ".join(f"{printable(path)} ({reason})" for path, reason in skipped[:NAMED])
    return named + (f" and {len(skipped) - NAMED:,} more" if len(skipped) > NAMED else "")


# ---------------------------------------------------------------------------------------------------------------- cache

VERSION = 1  # of the result of `decode`: raise it with a change there, and every cache is made again
ABANDONED_SECONDS = 3600  # without a write: the process was killed


class Skipped(NamedTuple):
    """A file that could not be decoded."""

    path: str
    reason: str
    lasting: bool


class Cached(NamedTuple):
    """The images of a folder, and the files that could not be decoded."""

    images: Tensor
    skipped: list[Skipped]
    folder: Path
    """Of the cache."""


def read_cached(root: Path, listing: Listing, side: int, progress: Progress, say: Say) -> Cached:
    """Read the images of a listing, which is not empty, from their cache; make the cache first if it is missing."""
    folder = _cache_folder(root, listing, side)
    skipped = _read_skipped(root, folder, side)
    if skipped is None:
        try:
            skipped = _decode_into(folder, root, listing, side, progress, say)
        except OSError as error:
            what = str(error.strerror or error).lower()
            advice = "fix that, or set BYOV_DATA to another folder"
            raise BadInput(f"cannot cache the images of {root} in {folder.parent}: {what}; {advice}.") from error
    return Cached(_mapped(folder / "images.u8", len(listing.files) - len(skipped), side), skipped, folder)


def _cache_folder(root: Path, listing: Listing, side: int) -> Path:
    key = hashlib.sha256(os.fsencode(f"{side}\n{root}")).hexdigest()[:12]
    name = re.sub(r"[^\w.]+", "-", "-".join(root.parts[-2:])).strip("-.")[:60]
    return data_folder() / "folders" / f"{name}-{side}px-{key}-v{VERSION}.{listing.digest()[:16]}"


def _read_skipped(root: Path, folder: Path, side: int) -> list[Skipped] | None:
    """The skipped files of a cache; None if the cache is missing, damaged or out of date."""
    try:
        kept = read_json(folder / "kept.json")
        skipped = [Skipped(*skip) for skip in kept["skipped"]]
        if (folder / "images.u8").stat().st_size != kept["images"] * 3 * side**2:
            return None
    except (OSError, ValueError, KeyError, TypeError):
        return None
    # The digest does not change when a file becomes readable.
    results = decode_some(root, side, [skip.path for skip in skipped if not skip.lasting])
    return skipped if all(isinstance(result, Unusable) and not result.lasting for result in results) else None


class MappedTensor(Tensor):
    """A tensor in a mapped file, whose size is checked before every operation on it.

    Touching pages that a truncated file no longer has ends the process (SIGBUS), without a message.
    """

    mapped: np.memmap[Any, Any]

    @classmethod
    def __torch_function__(cls, function: Any, kinds: Any, arguments: Any = (), named: Any = None) -> Any:
        with DisableTorchFunctionSubclass():  # the results, mostly copies, are plain tensors
            for tensor in arguments:
                # The file is still open, so it may have been removed.
                if isinstance(tensor, cls) and tensor.mapped._mmap.size() < tensor.mapped.nbytes:  # type: ignore[attr-defined]
                    raise BadInput(f"{tensor.mapped.filename} was truncated while in use: repeat the command.")
            return function(*arguments, **(named or {}))


def _mapped(path: Path, count: int, side: int) -> Tensor:
    """Map a file as images, read-only: Linux refuses a private mapping that is larger than the memory."""
    pixels = np.memmap(path, np.uint8, "r", shape=(count, 3, side, side))
    with warnings.catch_warnings(action="ignore"):  # torch warns against writing there: nobody does
        mapped = torch.from_numpy(pixels).as_subclass(MappedTensor)
    mapped.mapped = pixels
    return mapped


def _decode_into(folder: Path, root: Path, listing: Listing, side: int, progress: Progress, say: Say) -> list[Skipped]:
    """Make a cache and remove older ones of the same folder; returns the skipped files."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    stem = folder.name.rpartition("-")[0]
    older = list(folder.parent.glob(f"{stem}-*"))
    if older:
        say(f"{root} has changed since its images were decoded: decoding them again.")
    _remove_abandoned(folder.parent.glob(f".{stem}-*.tmp"))
    _check_space(folder.parent, root, len(listing.files) * 3 * side**2)
    with folder_written_whole(folder, keep_existing=True) as temporary:
        skipped = _write_images(temporary / "images.u8", root, listing.files, side, progress)
        count = len(listing.files) - len(skipped)
        if not count:
            first = f"{printable(skipped[0].path)}: {skipped[0].reason}"
            raise BadInput(
                f"none of the {len(listing.files):,} image files in {root} can be decoded (the first is {first}); "
                "give a folder with intact images."
            )
        write_json(temporary / "kept.json", {"folder": str(root), "images": count, "skipped": skipped})
        reasons = [skip[:2] for skip in skipped] + listing.unread
        lines = [f"{printable(path)}: {reason}\n" for path, reason in reasons]
        write_text(temporary / "skipped.txt", "".join(lines))
        for old in older:
            shutil.rmtree(old, ignore_errors=True)
    return skipped


def _write_images(path: Path, root: Path, files: Sequence[File], side: int, progress: Progress) -> list[Skipped]:
    """Decode the files in their order and write the images one after another; returns the skipped files.

    With threads, not processes: Pillow releases the GIL while it decodes and resizes. From 224 to 96 pixels, on two
    busy cores, two threads decoded 970 JPEGs per second, one thread 770, and two processes 590.
    """
    what, skipped = f"decoding {root}", []
    starts = range(0, len(files), DECODED_AT_ONCE)
    parts = [[file.path for file in files[start : start + DECODED_AT_ONCE]] for start in starts]
    with path.open("wb") as out, pillow_unlimited():
        for start, part, results in zip(starts, parts, in_order(partial(decode_some, root, side), parts), strict=True):
            progress(what, start, len(files))
            for name, result in zip(part, results, strict=True):
                if isinstance(result, Unusable):
                    skipped.append(Skipped(name, str(result), result.lasting))
                else:
                    out.write(result.data)
        progress(what, len(files), len(files))
        out.flush()
        os.fsync(out.fileno())
    return skipped


def _remove_abandoned(folders: Iterable[Path]) -> None:
    """Remove what killed processes left, judged by age: a process id may belong to another machine."""
    for folder in folders:
        try:
            last = max(path.stat().st_mtime for path in (folder, *folder.iterdir()))
        except OSError:  # renamed since
            continue
        if time.time() - last > ABANDONED_SECONDS:
            shutil.rmtree(folder, ignore_errors=True)


def _check_space(folder: Path, root: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise BadInput(
            f"the images of {root} need {needed / 2**30:,.1f} GiB in {folder}, where {free / 2**30:,.1f} are free: "
            "free some space, set BYOV_DATA to a folder on another disk, or use a smaller image_size."
        )
