"""Image sources by name: `NAME` or `KIND:PATH`, with an optional `@train` or `@test`.

    open_source("cifar10").load("train")
    open_source("npz:photos.npz@test").load("test")
    open_source("folder:photos", image_size=64).load("train")

A new kind is one function from a spec, a path and the image size to a Source, and one line in `KINDS`.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from byov._core.callbacks import Progress, Say, say_on_stderr
from byov._core.errors import BadInput
from byov.data import fetch, formats, image_folder
from byov.data.images import SPLITS, ImageSet, Outline, Split


@dataclass(frozen=True)
class Source:
    """Images with a train/test split; nothing is read before `load`."""

    name: str
    """As given, such as `cifar10` or `npz:photos.npz@test`."""
    splits: tuple[Split, ...]
    read: Callable[[Split, Progress, Say], ImageSet] = field(repr=False)
    flips: bool = True
    """Whether views may be mirrored: a mirrored digit is not a digit."""
    image_size: int | None = None
    """The side of the network's input, for images without a fixed size; they may be stored with another side."""
    outlined: Callable[[Split, Progress], Outline] | None = field(default=None, repr=False)
    """If reading means decoding: describes the images without decoding them."""

    @property
    def default(self) -> Split:
        """The split for commands that take one set of images."""
        return "test" if "test" in self.splits else "train"

    def load(
        self, split: Split, progress: Progress = lambda what, done, total: None, say: Say = say_on_stderr
    ) -> ImageSet:
        """Read the images of a split.

        Args:
            split: ``"train"`` or ``"test"``.
            progress: Called with the current stage, what is done, and the total.
            say: Called with messages for the user, such as a warning about skipped files.

        Returns:
            The images, in memory or mapped into it.

        Raises:
            BadInput: If the source lacks this split or cannot be read.

        Example:
            >>> byov.open_source("digits").load("test").images.shape
            torch.Size([355, 1, 8, 8])
        """
        self._check(split)
        return self.read(split, progress, say)

    def outline(self, split: Split, progress: Progress = lambda what, done, total: None) -> Outline | None:
        """Describe a split before decoding, which may drop bad images; None if reading it needs no decoding."""
        self._check(split)
        return None if self.outlined is None else self.outlined(split, progress)

    def _check(self, split: Split) -> None:
        if split not in self.splits:
            have = " and ".join(self.splits)
            hint = "leave out its @ suffix" if self.name.endswith(f"@{have}") else "give a source that has them"
            raise BadInput(f"the source {self.name} has only {have} images, no {split} images; {hint}.")


def open_source(spec: str, image_size: int | None = None) -> Source:
    """Open a source of images by its name or path, without reading them.

    Args:
        spec: A name such as ``"digits"``, or ``"folder:PATH"`` or ``"npz:PATH"``; ``@train`` or ``@test`` at the end
            selects one split.
        image_size: Side of the network's input in pixels, for folders. Other sources keep the size of their images.

    Returns:
        The source: ``source.load("train")`` reads a split.

    Raises:
        BadInput: If there is no such source or split.

    Example:
        >>> byov.open_source("digits").splits
        ('train', 'test')
    """
    if image_size is not None and image_size < 4:
        raise BadInput(f"image_size is {image_size}, but a network needs at least 4 pixels: give more.")
    base, at, suffix = spec.rpartition("@")
    path = spec.partition(":")[2]
    whole = bool(path) and Path(path).expanduser().exists()  # a folder may be named photos@test
    forced = next((split for split in SPLITS if at and suffix == split and not whole), None)
    source = _open(base if forced else spec, image_size)
    if forced is None:
        return source
    if forced not in source.splits:
        raise BadInput(f"{base} has no {forced} images, only {' and '.join(source.splits)}; leave out @{forced}.")
    return replace(source, name=spec, splits=(forced,))


def _open(spec: str, image_size: int | None) -> Source:
    kind, colon, path = spec.partition(":")
    if colon and kind in KINDS and path:
        return KINDS[kind](spec, Path(path).expanduser(), image_size)
    if spec in fetch.PUBLISHED:
        return Source(spec, SPLITS, _at_once(partial(fetch.read, spec)), fetch.PUBLISHED[spec].flips)
    if spec == "digits":
        return Source(spec, SPLITS, _at_once(digits), flips=False)
    raise BadInput(_unknown(spec))


def _at_once(read: Callable[[Split], ImageSet]) -> Callable[[Split, Progress, Say], ImageSet]:
    """Wrap a reader that has nothing to report."""
    return lambda split, progress, say: read(split)


def _open_npz(spec: str, path: Path, image_size: int | None) -> Source:
    return Source(spec, formats.npz_splits(path), _at_once(partial(formats.read_npz, path)))


def _open_folder(spec: str, path: Path, image_size: int | None) -> Source:
    size = image_size or image_folder.DEFAULT_SIZE
    images = image_folder.Folder(path, size)
    return Source(spec, tuple(images.roots), images.read, image_size=size, outlined=images.outline)


KINDS: Mapping[str, Callable[[str, Path, int | None], Source]] = {"npz": _open_npz, "folder": _open_folder}


def names() -> list[str]:
    """Return the names of the built-in sources."""
    return ["digits", *fetch.PUBLISHED]


def _unknown(spec: str) -> str:
    known = ", ".join([*names(), *(f"{kind}:PATH" for kind in KINDS)])
    bare = [f"{kind}:{spec}" for kind in KINDS if Path(spec).suffix == f".{kind}"]  # a path without its kind
    bare += [f"folder:{spec}"] if spec and Path(spec).is_dir() else []
    near = bare or difflib.get_close_matches(spec.split("@")[0], names(), n=2, cutoff=0.5)
    if near and not bare and "@" in spec:
        return f"there is no source {spec!r}; the suffix is @train or @test, as in {near[0]}@test."
    if near:
        return f"there is no source {spec!r}; did you mean {' or '.join(near)}? The sources are {known}."
    return f"there is no source {spec!r}, nor a folder of that name; the sources are {known}."


def digits(split: Split) -> ImageSet:
    """Load scikit-learn's 1,797 digits of 8 x 8 pixels, their values 0..16 scaled to 0..255.

    The split is fixed: in scikit-learn's order, every fifth image of a class (its 5th, 10th, ...) is for test, the
    others for train; both keep that order. It uses no random numbers, so no library's version can change it.
    """
    from sklearn.datasets import load_digits  # here: importing scikit-learn takes a second

    bunch = load_digits()
    labels = bunch.target.astype(np.int64)
    rank = np.empty_like(labels)  # of an image among those of its class
    for label in range(10):
        of_class = labels == label
        rank[of_class] = np.arange(of_class.sum())
    chosen = (rank % 5 == 4) == (split == "test")
    images = np.round(bunch.images[chosen] * (255 / 16)).astype(np.uint8)[:, None]
    return ImageSet(torch.from_numpy(images), torch.from_numpy(labels[chosen]), fetch.DIGITS)


class Row(NamedTuple):
    """A row of `byov data list`."""

    name: str
    description: str
    size: str
    train: int
    test: int
    terms: str
    there: bool


def table() -> list[Row]:
    """List the built-in sources, and whether their images are on this machine."""
    rows = [
        Row("digits", "handwritten digits, very small; part of scikit-learn", "8x8x1", 1442, 355, "CC BY 4.0", True)
    ]
    for p in fetch.PUBLISHED.values():
        channels, height, width = p.shape
        size = f"{height}x{width}x{channels}"
        there = fetch.is_there(p.name)
        rows.append(Row(p.name, p.description, size, p.counts["train"], p.counts["test"], p.terms, there))
    return rows
