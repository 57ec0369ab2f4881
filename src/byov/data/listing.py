"""The image files below a folder, listed quickly and always in the same order, with a digest that tells of changes."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

SUFFIXES = frozenset(("jpg", "jpeg", "jpe", "jfif", "png", "bmp", "gif", "webp", "tif", "tiff", "ppm", "pgm"))
# Photographs too, but in formats that are not read: a user whose folder is full of them should hear of it.
OTHER_SUFFIXES = frozenset(("heic", "heif", "avif", "jxl", "jp2", "psd", "dng", "cr2", "cr3", "nef", "arw", "orf"))
TELL_EVERY = 10_000  # files


class File(NamedTuple):
    """An image file; size and time of a broken link are -1."""

    path: str
    """Below the listed folder, with / between its parts."""
    size: int
    mtime_ns: int


@dataclass(frozen=True)
class Listing:
    """What lies below a folder, sorted by path."""

    files: list[File] = field(default_factory=list)
    unread: list[tuple[str, str]] = field(default_factory=list)
    """What could not be looked at, or is in a format that is not read: path and reason."""

    def digest(self) -> str:
        """Changes when a file is added, removed, renamed or written to."""
        lines = ["\0".join(map(str, row)) for rows in (self.files, self.unread) for row in rows]
        return hashlib.sha256(os.fsencode("\n".join(lines))).hexdigest()


def list_images(root: Path, tell: Callable[[int], None] = lambda found: None) -> Listing:
    """All image files below `root`, by their suffix; `tell` hears now and then how many.

    Hidden files and folders are left out. Links are followed; a folder that is reached twice is listed once, so that
    a link to a parent ends. Only an error at `root` itself is raised. A million files, with their digest, took 15
    seconds on two busy cores, 35 where the disk had to be read.
    """
    listing, told = Listing(), 0
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
        # Taken from the end: in the order of names, links last, so that what is reached twice has its own name.
        waiting += [(f"{folder}/{name}", f"{prefix}{name}/") for _, name in sorted(folders, reverse=True)]
        if len(listing.files) - told >= TELL_EVERY:
            told = len(listing.files)
            tell(told)
    listing.files.sort()
    listing.unread.sort()
    return listing


def _take(entries: Iterable[os.DirEntry[str]], prefix: str, listing: Listing) -> list[tuple[bool, str]]:
    """Puts a folder's images into the listing; returns its folders: whether a link, and the name."""
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
            except OSError:  # a link to nowhere: decoding will say so
                listing.files.append(File(prefix + name, -1, -1))
                continue
            if stat.S_ISREG(status.st_mode):  # reading from a pipe would wait for ever
                listing.files.append(File(prefix + name, status.st_size, status.st_mtime_ns))
        elif suffix in OTHER_SUFFIXES:
            listing.unread.append((prefix + name, f"the format {suffix} is not read"))
    return folders


def is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link to itself, or to where we may not look
        return False


def suffix_of(name: str) -> str:
    return name.rpartition(".")[2].lower()
