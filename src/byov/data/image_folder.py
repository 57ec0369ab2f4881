"""The source `folder:PATH`: all images below a folder, whatever their layout; with labels where the layout has them.

Splits: PATH/train and PATH/test (or val, valid, validation; in small or capital letters) are the splits, and what lies
beside them is left out. Of several test folders the first that has folders itself is taken, else the first. Without
such a pair, all that lies below PATH is `train`; but a PATH that holds only a folder `train` stands for that folder.

Labels: if every image of a split lies in a folder, these are at least two, and hold two images each on average, then
an image's class is its first folder's name; deeper folders mean nothing. Folders by date or by camera are taken for
classes too. That does no harm: labels are for probes, monitors and supervised methods, byov and byol never see them.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch

from byov._core.callbacks import Progress, Say
from byov._core.errors import BadInput
from byov.data.image_cache import Decoded, decoded, shown
from byov.data.images import ImageSet, Outline, Split
from byov.data.listing import SUFFIXES, File, Listing, is_folder, list_images, suffix_of

DEFAULT_SIZE = 64  # pixels that the network sees
TEST_NAMES = ("test", "val", "valid", "validation")
NAMED = 3  # files that a warning names


def storage_side(image_size: int) -> int:
    """The side at which images are kept: larger, so that a crop brought to `image_size` still has its detail."""
    wanted = image_size * (1.5 if image_size < 128 else 8 / 7)  # 96 for 64; ImageNet's usual 256 for 224
    return math.ceil(wanted / 8) * 8


class Folder:
    """A folder of images for a network that sees `image_size` pixels."""

    def __init__(self, path: Path, image_size: int = DEFAULT_SIZE) -> None:
        self.side = storage_side(image_size)
        self.roots = split_roots(path.absolute())
        self._listings: dict[Split, Listing] = {}

    def outline(self, split: Split, progress: Progress) -> Outline:
        """What a split will be, should no file be bad; nothing is decoded for it."""
        files = self._listing(split, progress).files
        return Outline((3, self.side, self.side), len(files), self._classes(files) is not None)

    def read(self, split: Split, progress: Progress, say: Say) -> ImageSet:
        """The images of a split, decoded now unless they were before. `say` hears which files were skipped."""
        root, listing = self.roots[split], self._listing(split, progress)
        found = decoded(root, listing, self.side, progress, say)
        _tell_skipped(found, root, listing, say)
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
        """The classes, where these files have one each."""
        classes = class_names([listing.files for listing in self._listings.values()])
        return classes if _in_folders(files) else None


def split_roots(path: Path) -> Mapping[Split, Path]:
    """Where the splits of a folder lie."""
    there, loose = _look_into(path)
    name = {folder.lower(): folder for folder in reversed(there)}
    if "train" not in name:
        return {"train": path}
    train, tests = path / name["train"], [path / name[test] for test in TEST_NAMES if test in name]
    if tests:
        return {"train": train, "test": next((test for test in tests if _look_into(test)[0]), tests[0])}
    return {"train": train if len(there) == 1 and not loose else path}


def class_names(splits: Sequence[Sequence[File]]) -> tuple[str, ...] | None:
    """The classes of the splits that have their images in folders, sorted; None if that makes no sense."""
    labelled = [files for files in splits if _in_folders(files)]
    classes = sorted({_first(file) for files in labelled for file in files})
    return tuple(classes) if 2 <= len(classes) <= sum(map(len, labelled)) // 2 else None


def _in_folders(files: Iterable[File]) -> bool:
    return all("/" in file.path for file in files)


def _first(file: File) -> str:
    return file.path.partition("/")[0]


def _look_into(path: Path) -> tuple[list[str], bool]:
    """The names of a folder's folders, and whether images lie beside them."""
    try:
        with os.scandir(path) as entries:
            visible = [(entry.name, is_folder(entry)) for entry in entries if not entry.name.startswith(".")]
    except OSError as error:
        raise _cannot_look(path, error) from error
    loose = any(suffix_of(name) in SUFFIXES for name, folder in visible if not folder)
    return sorted(name for name, folder in visible if folder), loose


def list_folder(root: Path, progress: Progress) -> Listing:
    """The image files below a folder; bad input if one cannot look into it."""
    try:
        return list_images(root, lambda found: progress(f"listing {root}", found, 0))
    except OSError as error:
        raise _cannot_look(root, error) from error


# ------------------------------------------------------------------------------------------------------------ sentences


def _cannot_look(path: Path, error: OSError) -> BadInput:
    if isinstance(error, FileNotFoundError):
        return BadInput(f"there is no folder {path}; check the path.")
    if isinstance(error, NotADirectoryError):
        return BadInput(f"{path} is a file; give the folder in which the images lie.")
    reason = (error.strerror or str(error)).lower()
    return BadInput(f"cannot look into the folder {path}: {reason}; mend that, or give another folder.")


def no_images(root: Path, listing: Listing) -> BadInput:
    """What is to be said of a listing without files."""
    others = f", but {_named(listing.unread)}" if listing.unread else ""
    kinds = ", ".join(sorted(SUFFIXES))
    return BadInput(f"there are no images in {root}{others}; give a folder with files that end in one of {kinds}.")


def _tell_skipped(found: Decoded, root: Path, listing: Listing, say: Say) -> None:
    skipped = [skip[:2] for skip in found.skipped] + listing.unread
    if skipped:
        total = len(listing.files) + len(listing.unread)
        say(
            f"warning: {len(skipped):,} of {total:,} files in {root} are skipped: {_named(skipped)}; "
            f"{found.folder / 'skipped.txt'} names all."
        )


def _named(skipped: Sequence[tuple[str, str]]) -> str:
    """The first few, and how many more."""
    named = ", ".join(f"{shown(path)} ({reason})" for path, reason in skipped[:NAMED])
    return named + (f" and {len(skipped) - NAMED:,} more" if len(skipped) > NAMED else "")
