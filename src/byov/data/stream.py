"""Images read once, a chunk at a time: files of a folder are decoded when they are reached, without a cache.

    stream = open_stream("photos", image_size=64)
    for start in range(0, len(stream), 2048):
        chunk = stream.chunk(start, start + 2048)      # .positions, .images, .skipped

The pixels are those that training and evaluation see: decoded at the size of a folder's cache, then resized.
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
from byov.data.image_files import DECODED_AT_ONCE, Pixels, Unusable, decode, decode_some, pillow_unlimited, printable
from byov.data.image_folder import list_folder, no_images, split_roots, storage_side
from byov.data.images import ImageSet
from byov.data.sources import Source, open_source
from byov.data.transforms import resized


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
