"""Shifted test images: fifteen corruptions, each with five severities.

    shifted(images, ids, "shear", severity=3, seed=0)

The random numbers are keyed by (seed, shift, image): neither the batch around an image, nor the number of threads, nor
the device changes a byte. The severity is no part of the key: an image is turned the same way, and speckled at the same
places, only further and more, so that severities are compared like with like.

The strengths are those of Hendrycks & Dietterich, "Benchmarking neural network robustness to common corruptions and
perturbations" (ICLR 2019), as in the code that made their sets, wherever these have the corruption: CIFAR-10-C for
32 pixels, Tiny-ImageNet-C for 64, ImageNet-C for 224. Other images take the strengths of the side that is nearest in
ratio, their own being the shorter one.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from byov._core.errors import BadInput
from byov._core.randomness import uniforms
from byov._core.threads import for_each
from byov.data import corruptions
from byov.data.corruptions import Draw

SEVERITIES = (1, 2, 3, 4, 5)
CHUNK = 1 << 18  # pixel values at a time: 85 images of 32 px, or 1 of 224; the float64 numbers for them take 2 MiB


@dataclass(frozen=True)
class Shift:
    """A corruption and how strong it is at each severity."""

    corrupt: Callable[[Tensor, float, Draw], Tensor]
    strengths: Mapping[int, tuple[float, ...]]
    """Five, by the side of the images in pixels for which they were chosen; one entry alone is for all."""
    colour: bool = False
    """Whether it changes colour alone, so that grey images stay as they are."""

    def applies_to(self, channels: int) -> bool:
        """Whether it can change images with so many channels; if not, a caller may leave it out."""
        return channels > 1 or not self.colour

    def strength(self, severity: int, side: int) -> float:
        """The constant for images whose shorter side has `side` pixels."""
        nearest = min(self.strengths, key=lambda chosen: abs(math.log(chosen / side)))
        return self.strengths[nearest][severity - 1]


def _for_all(*five: float) -> Mapping[int, tuple[float, ...]]:
    return {32: five}


SHIFTS: Mapping[str, Shift] = {
    # The paper's three. Salt and pepper is "impulse noise" in the published sets: the share of values that is hit.
    "salt_pepper": Shift(
        corruptions.salt_pepper,
        {32: (0.01, 0.02, 0.03, 0.05, 0.07), 64: (0.01, 0.02, 0.05, 0.08, 0.14), 224: (0.03, 0.06, 0.09, 0.17, 0.27)},
    ),
    # Pixels a pixel. Ours: severity 3 is the strongest in AutoAugment's table (Cubuk et al., 2019), 5 is twice that.
    "shear": Shift(corruptions.shear, _for_all(0.1, 0.2, 0.3, 0.45, 0.6)),
    # Standard deviation; black to white is 1.
    "gaussian_noise": Shift(
        corruptions.gaussian_noise,
        {32: (0.04, 0.06, 0.08, 0.09, 0.10), 64: (0.04, 0.08, 0.12, 0.15, 0.18), 224: (0.08, 0.12, 0.18, 0.26, 0.38)},
    ),
    # Photons that make white.
    "shot_noise": Shift(
        corruptions.shot_noise, {32: (500, 250, 100, 75, 50), 64: (250, 100, 50, 30, 15), 224: (60, 25, 12, 5, 3)}
    ),
    # Standard deviation in pixels: "Gaussian blur", one of the published sets' extra corruptions. Those for 8
    # pixels are ours: CIFAR-10-C's would leave no digit to read.
    "blur": Shift(
        corruptions.blur,
        {
            8: (0.3, 0.4, 0.5, 0.6, 0.7),
            32: (0.4, 0.6, 0.7, 0.8, 1.0),
            64: (0.5, 0.75, 1.0, 1.25, 1.5),
            224: (1, 2, 3, 4, 6),
        },
    ),
    # Degrees. Ours: severity 3 is the strongest in AutoAugment's table, 5 is twice that.
    "rotation": Shift(corruptions.rotation, _for_all(10, 20, 30, 45, 60)),
    # Share of the side. Ours: 2, 4, 6, 8, 10 of 32 pixels; 10 is the most in AutoAugment's code for CIFAR-10.
    "translation": Shift(corruptions.translation, _for_all(0.0625, 0.125, 0.1875, 0.25, 0.3125)),
    # Added to HSV's value; black to white is 1.
    "brightness": Shift(
        corruptions.brightness,
        {32: (0.05, 0.1, 0.15, 0.2, 0.3), 64: (0.1, 0.2, 0.3, 0.4, 0.5), 224: (0.1, 0.2, 0.3, 0.4, 0.5)},
    ),
    # What is left of the distance to the channel's mean.
    "contrast": Shift(
        corruptions.contrast,
        {32: (0.75, 0.5, 0.4, 0.3, 0.15), 64: (0.4, 0.3, 0.2, 0.1, 0.05), 224: (0.4, 0.3, 0.2, 0.1, 0.05)},
    ),
    # Ours: the published "saturate" first takes colour away, then adds some, so that its severities have no order. Here
    # a coin decides which, and at severity 5 no colour is left, or twice as much.
    "saturation": Shift(corruptions.saturation, _for_all(0.2, 0.4, 0.6, 0.8, 1.0), colour=True),
    # Turns. Ours: severity 2 is the most that BYOL's views have, 5 is the opposite colour.
    "hue": Shift(corruptions.hue, _for_all(0.05, 0.1, 0.2, 0.35, 0.5), colour=True),
    # The least value that is inverted. Ours: severity 4 is that of BYOL's views.
    "solarise": Shift(corruptions.solarise, _for_all(224, 192, 160, 128, 64)),
    # Bits kept. Ours: severity 3 is the strongest in AutoAugment's table, 5 leaves four levels a channel.
    "posterise": Shift(corruptions.posterise, _for_all(6, 5, 4, 3, 2)),
    # The quality, as libjpeg counts it.
    "jpeg": Shift(corruptions.jpeg, {32: (80, 65, 58, 50, 40), 64: (65, 58, 50, 40, 25), 224: (25, 18, 15, 10, 7)}),
    # Share of the area. Ours: severity 5 is what Cutout (DeVries & Taylor, 2017) hides of CIFAR-10's images, 16 x 16.
    "occlusion": Shift(corruptions.occlusion, _for_all(0.05, 0.1, 0.15, 0.2, 0.25)),
}


def shifted(images: Tensor, ids: Tensor, name: str, severity: int, seed: int) -> Tensor:
    """The images under one shift: uint8 (B, C, H, W), grey or RGB, of any size, to the same, on the same device.

    `ids` (B,) are the images' own numbers, which key what is random. Saturation and hue leave grey images as they are:
    `SHIFTS[name].applies_to(channels)` says so before. The work is done on the CPU, over torch's threads.
    """
    _check(images, ids, name, severity)
    shift = SHIFTS[name]
    strength = shift.strength(severity, min(images.shape[2:]))
    key = (seed, zlib.crc32(name.encode()))  # the name, not its place: a new shift changes no other
    before, numbers = images.cpu(), ids.cpu()
    after = torch.empty_like(before, memory_format=torch.contiguous_format)

    def fill(start: int) -> None:
        part = slice(start, start + step)
        after[part] = shift.corrupt(before[part], strength, lambda count: uniforms(numbers[part], count, *key))

    share = -(-len(images) // torch.get_num_threads())  # at least a chunk a thread
    step = max(1, min(CHUNK // math.prod(images.shape[1:]), share))
    for_each(fill, range(0, len(images), step))
    return after.to(images.device)


def _check(images: Tensor, ids: Tensor, name: str, severity: int) -> None:
    if name not in SHIFTS:
        raise BadInput(f"there is no shift {name!r}; use one of {', '.join(SHIFTS)}.")
    if severity not in SEVERITIES:
        raise BadInput(f"there is no severity {severity}; give one from {SEVERITIES[0]} to {SEVERITIES[-1]}.")
    if images.dtype != torch.uint8 or images.ndim != 4 or images.shape[1] not in (1, 3) or 0 in images.shape[2:]:
        raise BadInput(
            f"shifts are made from uint8 images (B, 1 or 3, H, W), not {images.dtype} {tuple(images.shape)}; "
            "give grey or RGB images with values from 0 to 255."
        )
    if ids.shape != images.shape[:1]:
        raise BadInput(f"{len(images)} images came with ids of shape {tuple(ids.shape)}; give one id an image.")
