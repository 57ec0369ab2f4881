"""Images to be gone through once, a chunk at a time: those of a folder are decoded as they are reached, and not kept.

    stream = open_stream("photos", image_size=64)
    for start in range(0, len(stream), 2048):
        chunk = stream.chunk(start, start + 2048)      # .positions, .images, .skipped

The pixels are those that training and evaluation see: decoded at the side at which a folder is kept, then resized.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from byov._core.callbacks import Progress, Say, say_on_stderr
from byov._core.errors import BadInput
from byov._core.threads import in_order
from byov.data.image_files import AT_ONCE, Pixels, Unusable, decode, decode_some, pillow_left_to_us
from byov.data.image_folder import list_folder, no_images, shown, split_roots, storage_side
from byov.data.images import ImageSet
from byov.data.sources import Source, open_source
from byov.data.transforms import resized


class Chunk(NamedTuple):
    """Some images in a row, without those that cannot be used."""

    positions: list[int]
    """Of the images, in the stream."""
    images: Tensor
    """uint8 (N, C, side, side)."""
    skipped: list[tuple[int, str]]
    """Position and reason."""


@dataclass(frozen=True)
class Stream:
    """Images with a name each; `digest` changes with them."""

    name: str
    names: Sequence[str]
    digest: str
    channels: int
    side: int
    unread: Sequence[tuple[str, str]] = ()
    """Files that look like images but are in a format that is not read, or could not be looked at: name and reason."""
    root: Path | None = None
    """The folder below which the names are paths; None for images in memory."""
    paths: Sequence[str] = ()
    memory: ImageSet | None = None

    def __len__(self) -> int:
        return len(self.names)

    def chunk(self, start: int, stop: int) -> Chunk:
        """The images from `start` up to `stop`, over torch's number of threads."""
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
        parts = [self.paths[at : min(at + AT_ONCE, stop)] for at in range(start, stop, AT_ONCE)]
        with pillow_left_to_us():
            yield from in_order(partial(_resized_some, self.root, self.side), parts)

    def picture(self, position: int, side: int) -> Pixels | None:
        """One image to look at, uint8 (C, H, W): of a file with this side; None if it has gone since."""
        if self.memory is not None:
            return self.memory.images[position].numpy()
        assert self.root is not None
        try:
            with pillow_left_to_us():
                return decode(self.root / self.paths[position], side)
        except Unusable:
            return None


def open_stream(
    spec: str,
    image_size: int,
    progress: Progress = lambda what, done, total: None,
    say: Say = say_on_stderr,
) -> Stream:
    """The images of a folder, given by its path (all below it), or of a source (its test images, where it has some)."""
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
    """Where the files of a source lie that is a folder."""
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
    unread = [(shown(path), reason) for path, reason in listing.unread]
    return Stream(spec, list(map(shown, paths)), listing.digest(), 3, image_size, unread, root, paths)


def _resized_some(root: Path, side: int, paths: Sequence[str]) -> list[Tensor | Unusable]:
    pictures = decode_some(root, storage_side(side), paths)
    whole = [torch.from_numpy(picture) for picture in pictures if not isinstance(picture, Unusable)]
    small = iter(resized(torch.stack(whole), side) if whole else ())
    return [picture if isinstance(picture, Unusable) else next(small) for picture in pictures]
