"""Image sources by name, `NAME` or `KIND:PATH` with an optional `@train` or `@test`: read whole, or as a stream.

    open_source("cifar10").load("train")
    open_source("npz:photos.npz@test").load("test")
    open_source("folder:photos", image_size=64).load("train")

A stream reads images once, a chunk at a time: files of a folder are decoded when they are reached, without a cache.

    stream = open_stream("photos", image_size=64)
    for start in range(0, len(stream), 2048):
        chunk = stream.chunk(start, start + 2048)      # .positions, .images, .skipped

The pixels are those that training and evaluation see: decoded at the size of a folder's cache, then resized.

A new kind is one function from a spec, a path and the image size to a Source, and one line in `KINDS`.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from byov._core.callbacks import Progress, Say, say_on_stderr
from byov._core.errors import BadInput
from byov._core.threads import in_order
from byov.data import fetch, formats, image_folder
from byov.data.image_files import DECODED_AT_ONCE, Pixels, Unusable, decode, decode_some, pillow_unlimited, printable
from byov.data.image_folder import list_folder, no_images, split_roots, storage_side
from byov.data.images import SPLITS, ImageSet, Outline, Split
from byov.data.transforms import resized


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


class Chunk(NamedTuple):
    """Consecutive images of a stream, without those that cannot be decoded."""

    positions: list[int]
    """Of the images in the stream."""
    images: Tensor
    """uint8 (N, C, side, side)."""
    skipped: list[tuple[int, str]]
    """Position and reason."""


@dataclass(frozen=True)
class Stream:
    """Named images; `digest` changes when they do."""

    name: str
    names: Sequence[str]
    """Of a folder: the real paths below `root` as valid UTF-8. Only undecodable bytes are escaped, as `\\udcff`."""
    digest: str
    channels: int
    side: int
    unread: Sequence[tuple[str, str]] = ()
    """Image files in unsupported formats, and folders that cannot be listed: printable name and reason."""
    root: Path | None = None
    """The folder of the files; None for images in memory."""
    paths: Sequence[str] = ()
    """Of the files, below `root`, as the system gives them."""
    memory: ImageSet | None = None

    def __len__(self) -> int:
        return len(self.names)

    def chunk(self, start: int, stop: int) -> Chunk:
        """Decode the images from `start` up to `stop`, on as many threads as torch uses."""
        stop = min(stop, len(self))
        if self.memory is not None:
            return Chunk(list(range(start, stop)), resized(self.memory.images[start:stop], self.side), [])
        results = [result for part in self._decoded(start, stop) for result in part]
        numbered = list(enumerate(results, start))
        skipped = [(position, str(result)) for position, result in numbered if isinstance(result, Unusable)]
        tensors = [result for result in results if isinstance(result, Tensor)]
        images = torch.stack(tensors) if tensors else torch.empty((0, 3, self.side, self.side), dtype=torch.uint8)
        return Chunk([position for position, result in numbered if isinstance(result, Tensor)], images, skipped)

    def _decoded(self, start: int, stop: int) -> Iterator[list[Tensor | Unusable]]:
        assert self.root is not None
        parts = [self.paths[at : min(at + DECODED_AT_ONCE, stop)] for at in range(start, stop, DECODED_AT_ONCE)]
        with pillow_unlimited():
            yield from in_order(partial(_resized_some, self.root, self.side), parts)

    def picture(self, position: int, side: int) -> Pixels | None:
        """Return one image for display, uint8 (C, H, W), a file's with this side; None if the file is gone."""
        if self.memory is not None:
            return self.memory.images[position].numpy()
        assert self.root is not None
        try:
            with pillow_unlimited():
                return decode(self.root / self.paths[position], side)
        except Unusable:
            return None


def open_stream(
    spec: str,
    image_size: int,
    progress: Progress = lambda what, done, total: None,
    say: Say = say_on_stderr,
) -> Stream:
    """Open all images below a folder, given by its path, or those of a source (its test split if it has one)."""
    if ":" not in spec and Path(spec).expanduser().is_dir():
        return _folder(spec, Path(spec).expanduser().absolute(), image_size, progress)
    source = open_source(spec, image_size)
    root = _root(source)
    if root is not None:
        return _folder(spec, root, image_size, progress)
    images = source.load(source.default, progress, say)
    if not len(images):
        raise BadInput(f"there are no images in {spec}; give a source that has some.")
    name = f"{source.name.removesuffix(f'@{source.default}')}@{source.default}"
    names = [f"{name}#{index}" for index in range(len(images))]
    return Stream(spec, names, images.fingerprint(), images.images.shape[1], image_size, memory=images)


def _root(source: Source) -> Path | None:
    """The folder of the files, if the source is a folder."""
    kind, _, path = source.name.partition(":")
    if kind != "folder":
        return None
    whole = Path(path).expanduser()
    folder = whole if whole.exists() else Path(path.rpartition("@")[0]).expanduser()
    return split_roots(folder.absolute())[source.default]


def _folder(spec: str, root: Path, image_size: int, progress: Progress) -> Stream:
    listing = list_folder(root, progress)
    if not listing.files:
        raise no_images(root, listing)
    paths = [file.path for file in listing.files]
    unread = [(printable(path), reason) for path, reason in listing.unread]
    return Stream(spec, list(map(_as_utf8, paths)), listing.digest(), 3, image_size, unread, root, paths)


def _as_utf8(path: str) -> str:
    return path if path.isascii() else path.encode("utf-8", "backslashreplace").decode()


def _resized_some(root: Path, side: int, paths: Sequence[str]) -> list[Tensor | Unusable]:
    pictures = decode_some(root, storage_side(side), paths)
    whole = [torch.from_numpy(picture) for picture in pictures if not isinstance(picture, Unusable)]
    small = iter(resized(torch.stack(whole), side) if whole else ())
    return [picture if isinstance(picture, Unusable) else next(small) for picture in pictures]
