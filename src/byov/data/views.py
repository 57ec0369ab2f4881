"""BYOL's augmentation as batched tensor code, on the images' device, each image with its own random parameters.

The numbers are keyed by (seed, epoch, image, view): an image's views do not depend on the batch around it, on the
process, or on the number of threads. `draw_parameters` says what will be done, `apply` does it, `view` is both.
"""

from __future__ import annotations

import itertools
import math
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from byov.config import View, Views
from byov.data.colour import grey_, jitter_, solarise_
from byov.data.resample import Boxes, blur_, resized_crop
from byov.errors import BadInput
from byov.parallel import for_each
from byov.randomness import uniforms

TRIES = 10  # of a crop, before the fallback: torchvision's RandomResizedCrop
NUMBERS = 2 * TRIES + 13  # uniform numbers an image
ORDERS = torch.tensor(list(itertools.permutations(range(4))))
CHUNK = 1 << 20  # pixel values at a time: about 6 images of 224 px, or 340 of 32 px


class Parameters(NamedTuple):
    """What happens to each image of a batch; all tensors have the images in dimension 0."""

    boxes: Boxes
    flip: Tensor
    """bool (B,)"""
    order: Tensor
    """int64 (B, 4): the order of brightness 0, contrast 1, saturation 2, hue 3"""
    factors: Tensor
    """float32 (B, 4): three factors and the hue's shift in turns; 1, 1, 1, 0 without jitter"""
    grey: Tensor
    """bool (B,)"""
    blur: Tensor
    """bool (B,)"""
    sigma: Tensor
    """float32 (B,): standard deviation of the blur in pixels"""
    solarise: Tensor
    """bool (B,)"""

    def part(self, start: int, stop: int) -> Parameters:
        """The parameters of images [start, stop)."""
        boxes = Boxes(*(field[start:stop] for field in self.boxes))
        return Parameters(boxes, *(field[start:stop] for field in self[1:]))

    def followed_by(self, other: Parameters) -> Parameters:
        """These parameters, then the others."""
        boxes = Boxes(*map(torch.cat, zip(self.boxes, other.boxes, strict=True)))
        return Parameters(boxes, *map(torch.cat, zip(self[1:], other[1:], strict=True)))


def two_views(images: Tensor, ids: Tensor, config: Views, size: int, seed: int, epoch: int) -> tuple[Tensor, Tensor]:
    """Two random views of each image: uint8 (B, C, H, W) -> two float32 (B, C, size, size) in [0, 1].

    Equal to `view` with the keys (seed, epoch, 0) and (seed, epoch, 1), but both in one batch: fewer, larger calls.
    """
    _check(images, ids)
    ids = ids.to(images.device)
    first = draw_parameters(ids, config.first, *images.shape[2:], seed, epoch, 0)
    second = draw_parameters(ids, config.second, *images.shape[2:], seed, epoch, 1)
    both = apply(images, first.followed_by(second), size)
    return both[: len(images)], both[len(images) :]


def view(images: Tensor, ids: Tensor, config: View, size: int, *key: int) -> Tensor:
    """One random view of each image; `ids` (B,) and the key, usually (seed, epoch, view), decide which."""
    _check(images, ids)
    return apply(images, draw_parameters(ids.to(images.device), config, *images.shape[2:], *key), size)


def _check(images: Tensor, ids: Tensor) -> None:
    if images.dtype != torch.uint8 or images.ndim != 4 or images.shape[1] not in (1, 3):
        raise BadInput(
            f"views are made from uint8 images (B, 1 or 3, H, W), not {images.dtype} {tuple(images.shape)}; "
            "give grey or RGB images with values from 0 to 255."
        )
    if ids.shape != images.shape[:1]:
        raise BadInput(f"{len(images)} images came with ids of shape {tuple(ids.shape)}; give one id an image.")


def draw_parameters(ids: Tensor, config: View, height: int, width: int, *key: int) -> Parameters:
    """The random parameters of one view of the images `ids`, which have (height, width) pixels."""
    if config.flip is None or config.blur is None:
        raise BadInput(
            "the views' flip and blur are not set; resolve the config first or give them a chance from 0 to 1."
        )
    numbers = uniforms(ids, NUMBERS, *key)
    boxes = _draw_boxes(numbers[:, : 2 * TRIES + 2], config, height, width)
    flip, jitter, order, grey, blur, sigma, solarise = numbers[:, 2 * TRIES + 2 : NUMBERS - 4].unbind(1)
    strength = torch.tensor([config.brightness, config.contrast, config.saturation, config.hue], device=ids.device)
    change = strength * (2 * numbers[:, NUMBERS - 4 :] - 1) * (jitter < config.jitter)[:, None]
    neutral = torch.tensor([1.0, 1.0, 1.0, 0.0], device=ids.device)
    return Parameters(
        boxes=boxes,
        flip=flip < config.flip,
        order=ORDERS.to(ids.device)[(order * len(ORDERS)).to(torch.int64)],
        factors=neutral + change,
        grey=grey < config.grey,
        blur=blur < config.blur,
        sigma=_between(config.blur_sigma, sigma),
        solarise=solarise < config.solarise,
    )


def _between(bounds: tuple[float, float], uniform: Tensor) -> Tensor:
    return bounds[0] + (bounds[1] - bounds[0]) * uniform


def _draw_boxes(numbers: Tensor, config: View, height: int, width: int) -> Boxes:
    """torchvision's RandomResizedCrop.get_params, all tries at once: the first that fits, else the centre."""
    area = height * width * _between(config.crop_area, numbers[:, :TRIES])
    log_ratio = (math.log(config.crop_ratio[0]), math.log(config.crop_ratio[1]))
    ratio = _between(log_ratio, numbers[:, TRIES : 2 * TRIES]).exp_()
    widths, heights = (area * ratio).sqrt_().round_(), (area / ratio).sqrt_().round_()
    fits = (widths > 0) & (widths <= width) & (heights > 0) & (heights <= height)
    first = fits.to(torch.uint8).argmax(1, keepdim=True)
    found = fits.any(1)
    fallback_height, fallback_width = _fallback(config.crop_ratio, height, width)
    box_height = heights.gather(1, first)[:, 0].where(found, torch.full_like(area[:, 0], fallback_height))
    box_width = widths.gather(1, first)[:, 0].where(found, torch.full_like(area[:, 0], fallback_width))
    # floor(u * n) < n also in float32: u is at most 1 - 2^-24, and u * n never rounds up to n.
    down, right = numbers[:, 2 * TRIES :].unbind(1)
    top = (down * (height - box_height + 1)).where(found, (height - box_height) / 2)
    left = (right * (width - box_width + 1)).where(found, (width - box_width) / 2)
    return Boxes(*(field.to(torch.int64) for field in (top, left, box_height, box_width)))


def _fallback(ratio: tuple[float, float], height: int, width: int) -> tuple[int, int]:
    """Height and width of the largest box whose width over height is in range."""
    if width / height < ratio[0]:
        return round(width / ratio[0]), width
    if width / height > ratio[1]:
        return height, round(height * ratio[1])
    return height, width


def apply(images: Tensor, parameters: Parameters, size: int) -> Tensor:
    """Crop, flip, jitter, grey, blur, solarise: uint8 (B, C, H, W) -> float32 (N, C, size, size) in [0, 1].

    N is the number of parameters, a multiple of B: view i is one of image i modulo B.
    """
    count, cpu = len(parameters.flip), images.device.type == "cpu"
    source = torch.arange(count, device=images.device) % max(1, len(images))
    out = images.new_empty((count, images.shape[1], size, size), dtype=torch.float32)

    def fill(start: int) -> None:
        stop = start + step
        _fill(out[start:stop], images.index_select(0, source[start:stop]), parameters.part(start, stop))

    share = -(-count // torch.get_num_threads())  # at least a chunk a thread
    step = max(1, min(CHUNK // (images.shape[1] * size * size), share)) if cpu else max(1, count)
    if cpu:
        _keep_freed_memory()
        # On two busy cores (load 5) a batch of 128 took three quarters of the time of torch's own threads at 32 px.
        for_each(fill, range(0, count, step))
    else:
        fill(0)
    return out


def _fill(out: Tensor, images: Tensor, parameters: Parameters) -> None:
    resized_crop(images, parameters.boxes, parameters.flip, out)
    jitter_(out, parameters.order, parameters.factors)
    grey_(out, parameters.grey)
    blur_(out, parameters.sigma, parameters.blur)
    solarise_(out, parameters.solarise)


@cache
def _keep_freed_memory() -> None:
    """Makes glibc keep freed temporaries instead of handing them back to the system and faulting them in again.

    Its threshold for doing so follows the largest block freed, up to 32 MiB; so free one such block, once a process.
    At 32 px and batch 128 views then take two thirds of the time. Other allocators do not care.
    """
    torch.empty(31 << 20, dtype=torch.uint8)
