"""Convert images as people hold them in Python to tensors that a run's encoder takes.

Files, folders and PIL images are decoded as in training: the shorter side is resized and the middle is cut out. Arrays
and tensors of another size are cropped to their middle square and resized; grey and RGB are converted to each other.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from byov._core.callbacks import Say, say_on_stderr
from byov._core.errors import BadInput
from byov.data.image_files import Unusable, decode_picture
from byov.data.image_folder import storage_side
from byov.data.sources import Stream, open_stream
from byov.data.transforms import luma, resized
from byov.inference.run import Run

BLOCK = 4096  # images converted or resized at a time


def in_channels(run: Run, images: Tensor) -> tuple[Tensor, str | None]:
    """Convert images to the channels that the run takes; also return what was done, or None.

    Grey images are repeated to RGB; RGB images become grey.
    """
    wanted, given = run.image_shape[0], images.shape[1]
    if (given, wanted) == (1, 3):
        return images.expand(-1, 3, -1, -1).contiguous(), "grey made RGB by repeating it"
    if (given, wanted) == (3, 1):
        parts = [luma(part.float()) for part in torch.split(images, BLOCK)]
        whole = not images.is_floating_point()
        return torch.cat([part.round_().to(images.dtype) if whole else part for part in parts]), "RGB made grey"
    return images, None


def at_side(images: Tensor, side: int) -> Tensor:
    """Resize uint8 images to the side that the network takes, in bounded memory."""
    if images.shape[2:] == (side, side):
        return images
    return torch.cat([resized(part, side) for part in torch.split(images, BLOCK)])


def spread(total: int, most: int) -> Tensor:
    """Choose the indices of at most `most` images, spaced evenly: covers all classes of a set sorted by class."""
    count = min(total, most)
    return torch.arange(count) * total // count


OneImage = str | os.PathLike[str] | Image.Image | NDArray[Any] | Tensor
Images = OneImage | Sequence[OneImage]
"""A folder, a source, a file, a PIL image, an array, a tensor, or a sequence of images."""

CHUNK = 1024  # images at a time
ROUNDING = 1e-3  # by which floats may leave [0, 1]: bicubic resizing overshoots, float16 rounds


class Converted(NamedTuple):
    """Some images in a row."""

    images: Tensor
    """uint8, or float32 in [0, 1]: (N, C, side, side), as the run takes them."""
    paths: list[str] | None
    """Their files, if they come from files."""


def converted(run: Run, images: Images, say: Say = say_on_stderr) -> Iterator[Converted]:
    """Convert images, chunk by chunk. Empty arrays and tensors give one empty chunk; unusable files of a folder are
    skipped with a warning."""
    if isinstance(images, (str, os.PathLike)):
        path = Path(images).expanduser()
        yield from _files(run, [path], say) if path.is_file() else _folder(run, os.fspath(images), say)
    elif isinstance(images, (Image.Image, np.ndarray, Tensor)):
        yield Converted(_one_or_many(run, images), None)
    elif isinstance(images, Sequence):
        if not images:
            raise BadInput("there are no images in the list: give at least one.")
        if all(isinstance(image, (str, os.PathLike)) for image in images):
            yield from _files(run, [Path(image).expanduser() for image in images], say)  # type: ignore[arg-type]
        else:
            yield Converted(_joined([_one_or_many(run, image) for image in images]), None)
    else:
        raise BadInput(
            f"images are given as a folder, paths, PIL images, arrays or tensors, not as {type(images).__name__}: "
            "convert them first."
        )


def _folder(run: Run, spec: str, say: Say) -> Iterator[Converted]:
    if ":" not in spec and "@" not in spec and os.sep in spec and not Path(spec).expanduser().exists():
        raise BadInput(f"there is no file or folder {spec}: check the path.")
    stream = open_stream(spec, run.image_shape[-1], say=say)
    found, skipped = 0, list(stream.unread)
    for chunk, lost in _chunks(run, stream):
        found += len(chunk.images)
        skipped += lost
        yield chunk
    named = ", ".join(f"{name} ({reason})" for name, reason in skipped[:3]) + ", ..." * (len(skipped) > 3)
    if not found:
        raise BadInput(f"none of the images in {spec} can be used: {named}; give a folder with intact images.")
    if skipped:
        say(f"warning: {len(skipped):,} files in {spec} are skipped: {named}.")


def _files(run: Run, paths: Sequence[Path], say: Say) -> Iterator[Converted]:
    names = [str(path) for path in paths]
    stream = Stream("files", names, "", 3, run.image_shape[-1], root=Path(), paths=names)
    for chunk, skipped in _chunks(run, stream):
        for name, reason in skipped:
            raise BadInput(f"the image {name} cannot be used ({reason}): leave it out.")
        yield chunk


def _chunks(run: Run, stream: Stream) -> Iterator[tuple[Converted, list[tuple[str, str]]]]:
    for start in range(0, len(stream), CHUNK):
        chunk = stream.chunk(start, start + CHUNK)
        paths = [stream.names[position] for position in chunk.positions]
        skipped = [(stream.names[position], reason) for position, reason in chunk.skipped]
        yield Converted(_fitted(run, chunk.images), paths), skipped


def _one_or_many(run: Run, image: Any) -> Tensor:
    """One image or a batch as (N, C, side, side)."""
    if isinstance(image, Image.Image):
        side = run.image_shape[-1]
        try:
            pixels = torch.from_numpy(decode_picture(image, storage_side(side)))
        except Unusable as reason:
            raise BadInput(f"a PIL image cannot be used ({reason}): leave it out.") from reason
        return _fitted(run, pixels[None])
    if isinstance(image, (str, os.PathLike)):
        return next(_files(run, [Path(image).expanduser()], say_on_stderr)).images
    if isinstance(image, (np.ndarray, Tensor)):
        return _fitted(run, _in_range(_channels_first(image)))
    raise BadInput(f"an image is a path, a PIL image, an array or a tensor, not {type(image).__name__}: convert it.")


def _channels_first(image: NDArray[Any] | Tensor) -> Tensor:
    """An array (H, W), (H, W, C) or (N, H, W, C), or a tensor (C, H, W) or (N, C, H, W), as (N, C, H, W)."""
    shape = tuple(image.shape)
    if isinstance(image, Tensor):
        wanted, channels = "tensors have the shape (C, H, W) or (N, C, H, W)", -3
        tensor = image.detach()
    else:
        wanted, channels = "arrays have the shape (H, W), (H, W, C) or (N, H, W, C)", -1
        image = image[:, :, None] if image.ndim == 2 else image
        if image.dtype.kind not in "biuf":
            raise BadInput(f"images of dtype {image.dtype} cannot be used: give uint8, or floats from 0 to 1.")
        tensor = torch.from_numpy(np.ascontiguousarray(image))
    if tensor.ndim not in (3, 4) or tensor.shape[channels] not in (1, 3):
        raise BadInput(f"{wanted}, with 1 or 3 channels, not {shape}: reorder the axes, or drop the alpha channel.")
    batch = tensor if tensor.ndim == 4 else tensor[None]
    batch = batch if isinstance(image, Tensor) else batch.permute(0, 3, 1, 2)
    if not all(batch.shape[2:]):
        raise BadInput(f"images of shape {shape} have no pixels: leave them out.")
    return batch


def _in_range(images: Tensor) -> Tensor:
    """The same images if they are uint8, or floats in [0, 1]; anything else is bad input."""
    if images.dtype == torch.uint8 or not images.numel():
        return images if images.dtype == torch.uint8 else images.float()
    if not images.is_floating_point():
        raise BadInput(f"images of dtype {images.dtype} cannot be used: give uint8, or floats from 0 to 1.")
    low, high = (float(value) for value in torch.aminmax(images))
    if not (np.isfinite(low) and np.isfinite(high)):
        raise BadInput("the images hold values that are not finite (NaN or infinity): leave those images out.")
    if low < -ROUNDING:
        raise BadInput(
            f"float images range from 0 to 1, not from {low:.3g} to {high:.3g}: undo the normalization, byov applies "
            "its own."
        )
    if high > 1 + ROUNDING:
        raise BadInput(f"float images range from 0 to 1, but these reach {high:.3g}: divide by 255, or give uint8.")
    return images.float().clamp(0, 1) if low < 0 or high > 1 else images.float()


def _fitted(run: Run, images: Tensor) -> Tensor:
    """Images (N, C, H, W) with the run's channels and side."""
    channels, side = run.image_shape[0], run.image_shape[-1]
    height, width = images.shape[2:]
    if height != width:
        short = min(height, width)
        top, left = (height - short) // 2, (width - short) // 2
        images = images[:, :, top : top + short, left : left + short]
    if not len(images):
        return images.new_empty((0, channels, side, side))
    small = [resized(part, side) for part in torch.split(images, CHUNK)] if images.shape[2] != side else [images]
    return in_channels(run, torch.cat(small) if len(small) > 1 else small[0])[0]


def _joined(parts: list[Tensor]) -> Tensor:
    """One batch; uint8 images among floats become floats."""
    if len({part.dtype for part in parts}) > 1:
        parts = [part / 255 if part.dtype == torch.uint8 else part for part in parts]
    return torch.cat(parts)
