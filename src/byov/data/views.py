"""BYOL's augmentation, on the images' device, each image with its own random parameters.

The random numbers are keyed by (seed, epoch, image, view): the views of an image do not depend on its batch, on the
process, or on the number of threads. `draw_parameters` draws what to do, `apply` does it, `view` does both.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from byov._core.errors import BadInput
from byov._core.randomness import folds, hashed_uniforms
from byov._core.threads import for_each
from byov.config import View, Views
from byov.data.transforms import NEUTRAL, Boxes, blur_, grey_, jitter_, resized_crop, sent, solarise_

TRIES = 10  # of a crop, before the fallback: torchvision's RandomResizedCrop
BYOL_SIDE = 224  # pixels, of the views that BYOL's range of blurs is for
NUMBERS = 2 * TRIES + 13  # uniform numbers per view
ORDERS = torch.tensor(list(itertools.permutations(range(4))))
PARTS = 4  # of a batch per thread: some images take longer than others
ALONE = 1 << 22  # pixel values, about 10 ms of work, below which one thread is faster than two (`make bench`)


class Parameters(NamedTuple):
    """The parameters of a batch of views; dimension 0 of every tensor is the view."""

    boxes: Boxes
    flip: Tensor
    """bool (B,)"""
    order: Tensor
    """int64 (B, 4): the order of brightness 0, contrast 1, saturation 2, hue 3"""
    factors: Tensor
    """float32 (B, 4): three factors and the hue shift in turns; 1, 1, 1, 0 without jitter"""
    grey: Tensor
    """bool (B,)"""
    blur: Tensor
    """bool (B,)"""
    sigma: Tensor
    """float32 (B,): standard deviation of the blur in pixels"""
    solarise: Tensor
    """bool (B,)"""

    def arrays(self, count: int) -> Parameters:
        """Convert the tensors of `count` views to contiguous numpy arrays, for `compiled_views.make_views`."""
        floats = self._replace(factors=self.factors.float(), sigma=self.sigma.float())  # the loops round in float32
        if {len(field) for field in (*self.boxes, *self[1:])} != {count} or self.factors.shape != (count, 4):
            raise ValueError(f"the parameters do not fit {count} views: each view needs one of each, and four factors.")
        return Parameters(Boxes(*map(_array, self.boxes)), *map(_array, floats[1:]))


def _array(field: Tensor) -> Any:
    return np.ascontiguousarray(field.numpy())


def two_views(images: Tensor, ids: Tensor, config: Views, size: int, seed: int, epoch: int) -> tuple[Tensor, Tensor]:
    """Make two random views of each image, as BYOL trains on.

    Equal to `view` with the keys (seed, epoch, 0) and (seed, epoch, 1), but computed in one batch.

    Args:
        images: uint8 tensor ``(B, C, H, W)``, grey or RGB.
        ids: One integer per image, shape ``(B,)``, usually its index in the data set; it keys the randomness.
        config: The augmentation of both views; ``flip`` and ``blur`` must be set.
        size: Side of the views in pixels.
        seed: Seed of the run.
        epoch: Epoch: each has other views.

    Returns:
        Two float32 tensors ``(B, C, size, size)`` in [0, 1], on the device of the images.

    Raises:
        BadInput: If the images, the ids or the config cannot be used.

    Example:
        >>> images = torch.randint(0, 256, (4, 3, 32, 32), dtype=torch.uint8)
        >>> view = byov.View(flip=0.5, blur=1.0)
        >>> first, second = byov.two_views(images, torch.arange(4), byov.Views(view, view), 24, seed=0, epoch=0)
        >>> first.shape
        torch.Size([4, 3, 24, 24])
    """
    _check(images, ids)
    keys = (seed, epoch, 0), (seed, epoch, 1)
    height, width = images.shape[2:]
    configs = with_blur_sigma(config.first, size), with_blur_sigma(config.second, size)
    parameters = draw_parameters(ids.cpu(), configs, height, width, keys)
    both = apply(images, parameters, size)
    return both[: len(images)], both[len(images) :]


def view(images: Tensor, ids: Tensor, config: View, size: int, *key: int) -> Tensor:
    """Make one random view of each image, determined by `ids` (B,) and the key, usually (seed, epoch, view)."""
    _check(images, ids)
    height, width = images.shape[2:]
    configs = (with_blur_sigma(config, size),)
    return apply(images, draw_parameters(ids.cpu(), configs, height, width, (key,)), size)


def with_blur_sigma(config: View, size: int) -> View:
    """Fill in the range of the blur, if it is open: BYOL's, at the same share of the image as in theirs."""
    if config.blur_sigma is not None:
        return config
    return replace(config, blur_sigma=(0.1 * size / BYOL_SIDE, 2.0 * size / BYOL_SIDE))


def _check(images: Tensor, ids: Tensor) -> None:
    if images.dtype != torch.uint8 or images.ndim != 4 or images.shape[1] not in (1, 3):
        raise BadInput(
            f"views are made from uint8 images (B, 1 or 3, H, W), not {images.dtype} {tuple(images.shape)}; "
            "give grey or RGB images with values from 0 to 255."
        )
    if ids.shape != images.shape[:1]:
        raise BadInput(f"{len(images)} images came with ids of shape {tuple(ids.shape)}; give one id per image.")


def draw_parameters(
    ids: Tensor, configs: Sequence[View], height: int, width: int, keys: Sequence[tuple[int, ...]]
) -> Parameters:
    """Draw the parameters of views of the images `ids`, whose size is (height, width).

    Each view has a config and a key, usually (seed, epoch, view). The result has all images of the first view, then all
    of the next.
    """
    rows = [_settings(config, height, width) for config in configs]
    settings = torch.tensor(rows, dtype=torch.float32, device=ids.device)
    settings, seeds = (t.repeat_interleave(len(ids), 0) for t in (settings, folds(keys, ids.device)))
    chances, strengths, sigmas, crop = torch.split(settings, [5, 4, 2, 6], 1)
    numbers = _uniforms(ids.repeat(len(configs)), seeds)
    box, decide, sign, order, sigma = torch.split(numbers, [2 * TRIES + 2, 5, 4, 1, 1], 1)
    flip, jitter, grey, blur, solarise = (decide < chances).unbind(1)
    return Parameters(
        boxes=_draw_boxes(box, crop, height, width),
        flip=flip,
        order=ORDERS.to(ids.device)[(order[:, 0] * len(ORDERS)).to(torch.int64)],
        factors=torch.tensor(NEUTRAL, device=ids.device) + strengths * (2 * sign - 1) * jitter[:, None],
        grey=grey,
        blur=blur,
        sigma=torch.lerp(sigmas[:, 0], sigmas[:, 1], sigma[:, 0]),
        solarise=solarise,
    )


def _uniforms(ids: Tensor, seeds: Tensor) -> Tensor:
    if ids.device.type != "cpu":
        return hashed_uniforms(ids, seeds, NUMBERS)
    numbers = torch.empty(len(ids), NUMBERS, dtype=torch.float32, device="cpu")
    _loops().hash_uniforms(ids.to(torch.int64).numpy(), seeds.numpy(), numbers.numpy())
    return numbers


def _settings(config: View, height: int, width: int) -> tuple[float, ...]:
    """The settings of a view, in the order in which `draw_parameters` and `_draw_boxes` unpack them."""
    if config.flip is None or config.blur is None:
        raise BadInput(
            "the views' flip and blur are not set; resolve the config first, or give each a probability from 0 to 1."
        )
    assert config.blur_sigma is not None, "see with_blur_sigma"
    chances = config.flip, config.jitter, config.grey, config.blur, config.solarise
    strengths = config.brightness, config.contrast, config.saturation, config.hue
    areas = (bound * height * width for bound in config.crop_area)
    log_ratios = map(math.log, config.crop_ratio)
    return (*chances, *strengths, *config.blur_sigma, *areas, *log_ratios, *_fallback(config.crop_ratio, height, width))


def _draw_boxes(numbers: Tensor, settings: Tensor, height: int, width: int) -> Boxes:
    """Draw boxes as torchvision's RandomResizedCrop, all tries at once: the first that fits, else the centre.

    `settings` has a row per view: bounds of the area, bounds of the log ratio, height and width of the fallback.
    """
    least, most, narrowest, widest, fallback_height, fallback_width = settings.unbind(1)
    area = torch.lerp(least[:, None], most[:, None], numbers[:, :TRIES])
    ratio = torch.lerp(narrowest[:, None], widest[:, None], numbers[:, TRIES : 2 * TRIES]).exp_()
    widths, heights = (area * ratio).sqrt_().round_(), (area / ratio).sqrt_().round_()
    fits = (widths > 0) & (widths <= width) & (heights > 0) & (heights <= height)
    first = fits.to(torch.uint8).argmax(1, keepdim=True)
    found = fits.any(1)
    box_height = heights.gather(1, first)[:, 0].where(found, fallback_height)
    box_width = widths.gather(1, first)[:, 0].where(found, fallback_width)
    # floor(u * n) < n also in float32: u is at most 1 - 2^-24, and u * n never rounds up to n.
    down, right = numbers[:, 2 * TRIES :].unbind(1)
    top = (down * (height - box_height + 1)).where(found, (height - box_height) / 2)
    left = (right * (width - box_width + 1)).where(found, (width - box_width) / 2)
    return Boxes(*(field.to(torch.int64) for field in (top, left, box_height, box_width)))


def _fallback(ratio: tuple[float, float], height: int, width: int) -> tuple[int, int]:
    """Height and width of the largest box whose ratio of width to height is in range."""
    if width / height < ratio[0]:
        return round(width / ratio[0]), width
    if width / height > ratio[1]:
        return height, round(height * ratio[1])
    return height, width


@torch.no_grad()
def apply(images: Tensor, parameters: Parameters, size: int) -> Tensor:
    """Crop, flip, jitter, grey, blur, solarise: uint8 (B, C, H, W) -> float32 (N, C, size, size) in [0, 1].

    N is the number of parameters, a multiple of B: view i shows image i modulo B. A CPU uses compiled loops, every
    other device tensor operations; up to rounding, the results are the same.
    """
    out = images.new_empty((len(parameters.flip), images.shape[1], size, size), dtype=torch.float32)
    fill = fill_by_loops if images.device.type == "cpu" else fill_by_tensors
    fill(out, images, parameters)
    return out


def fill_by_loops(out: Tensor, images: Tensor, parameters: Parameters) -> None:
    """Fill the views one by one with compiled loops, on our own threads if there is enough to do.

    On one core they take 1.7 ms for 256 views of 32 px, where tensor operations take 9.6. The first call on a machine
    compiles for about 7 s.
    """
    make_views = _loops().make_views
    views, pixels, arrays = out.numpy(), images.contiguous().numpy(), parameters.arrays(len(out))
    threads = 1 if out.numel() < ALONE else torch.get_num_threads()
    step = max(1, -(-len(out) // (PARTS * threads)))

    def part(start: int) -> None:
        make_views(views, pixels, arrays, start, min(start + step, len(views)))

    for_each(part, range(0, len(views), step), threads)


def fill_by_tensors(out: Tensor, images: Tensor, parameters: Parameters) -> None:
    """Fill all views at once with tensor operations.

    The parameters stay on the CPU, where a question such as "how many?" does not make a GPU wait.
    """
    source = torch.arange(len(out), device=images.device) % max(1, len(images))
    boxes = Boxes(*(sent(part, images) for part in parameters.boxes))
    resized_crop(images.index_select(0, source), boxes, sent(parameters.flip, images), out)
    jitter_(out, parameters.order, parameters.factors)
    grey_(out, parameters.grey)
    blur_(out, parameters.sigma, parameters.blur)
    solarise_(out, parameters.solarise)


@cache
def _loops() -> ModuleType:
    """Import the compiled loops at their first use: numba takes a third of a second."""
    from byov.data import compiled_views

    return compiled_views
