"""Shifted test images: fifteen corruptions, each with five severities.

    shifted(images, ids, "shear", severity=3, seed=0)

The random numbers are keyed by (seed, shift, image): neither the batch, nor the number of threads, nor the device
changes a byte. The severity is not part of the key: an image is rotated in the same direction, and gets noise at the
same pixels, only more of it, so that severities are comparable.

The strengths are those of Hendrycks & Dietterich, "Benchmarking neural network robustness to common corruptions and
perturbations" (ICLR 2019), as in the code of their data sets, wherever these have the corruption: CIFAR-10-C for
32 pixels, Tiny-ImageNet-C for 64, ImageNet-C for 224. Other images take the strengths of whichever of these is nearest,
in ratio, to their shorter side.

Every corruption takes uint8 images (B, C, H, W) on the CPU, a strength and a `Draw`, and returns uint8 images. Its
result for an image is the same to the last bit in any batch: what is rounded to bytes is computed in float64, where the
order of summation cannot change the rounding.
"""

from __future__ import annotations

import io
import math
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from scipy import ndimage
from torch import Tensor

from byov._core.errors import BadInput
from byov._core.randomness import uniforms
from byov._core.threads import for_each
from byov.data.transforms import SATURATION, blend_, shift_hue

SEVERITIES = (1, 2, 3, 4, 5)
CHUNK = 1 << 18  # pixel values at a time: 85 images of 32 px, or 1 of 224; in float64 they take 2 MiB
Draw = Callable[[int], Tensor]  # draw(count): uniform numbers in [0, 1), float32 (B, count), keyed by the image
MID_GREY = 128


def _bytes(values: Tensor) -> Tensor:
    return values.round_().clamp_(0, 255).to(torch.uint8)


def _sign(uniform: Tensor) -> Tensor:
    return torch.where(uniform < 0.5, -1.0, 1.0).double()


def _for_each_value(images: Tensor, draw: Draw) -> Tensor:
    """Draw a number for every value of every channel."""
    return draw(math.prod(images.shape[1:])).view(images.shape)


# --------------------------------------------------------------------------------------------------------------- noise


def salt_pepper(images: Tensor, amount: float, draw: Draw) -> Tensor:
    """Turn a fraction `amount` of all values black or white, with equal probability, in each channel separately."""
    chance = _for_each_value(images, draw)
    return images.masked_fill(chance < amount / 2, 0).masked_fill_(chance >= 1 - amount / 2, 255)


def gaussian_noise(images: Tensor, sigma: float, draw: Draw) -> Tensor:
    """Add N(0, sigma^2), in units of the range from black to white."""
    middle = _for_each_value(images, draw).double().add_(2.0**-25)  # the middle of the number's interval: never 0 or 1
    return _bytes(torch.special.ndtri(middle).mul_(255 * sigma).add_(images))


def shot_noise(images: Tensor, photons: float, draw: Draw) -> Tensor:
    """Simulate photon noise: a value x in [0, 1] becomes Poisson(photons * x) / photons."""
    levels = images.to(torch.int64)
    # The rows of the table, each raised by its level, are one sorted array: one search finds the place in its row.
    place = torch.searchsorted(_shot_table(photons), _for_each_value(images, draw).double().add_(levels), right=True)
    return place.sub_(levels.mul_(256)).to(torch.uint8)


@cache
def _shot_table(photons: float) -> Tensor:
    """Tabulate (256 * 256,): at 256 v + w, the level v plus the probability that v becomes w or less."""
    level = torch.arange(256, dtype=torch.float64)
    most = torch.floor((level + 0.5) * photons / 255)  # photons that still round to the level or less
    chance: Tensor = torch.special.gammaincc(
        most[None, :] + 1, photons * level[:, None] / 255
    )  # Poisson's distribution
    chance[:, 255] = 1  # whatever is brighter is white
    return (level[:, None] + chance).flatten()


# -------------------------------------------------------------------------------------------------------- blur and JPEG


def blur(images: Tensor, sigma: float, draw: Draw) -> Tensor:
    """Blur by a Gaussian of `sigma` pixels, cut at 4 sigma, with repeated borders: scikit-image's, as in ImageNet-C.

    (`transforms.gaussian_blur` is BYOL's: its kernel spans a tenth of the side, too little for a strong blur.)
    """
    blurred = ndimage.gaussian_filter(images.numpy(), (0, 0, sigma, sigma), output=np.float64, mode="nearest")
    return _bytes(torch.from_numpy(blurred))


def jpeg(images: Tensor, quality: float, draw: Draw) -> Tensor:
    """Compress each image to a JPEG of this quality in memory, and decode it; grey images as grey files."""
    out = torch.empty_like(images, memory_format=torch.contiguous_format)
    for image, result in zip(images, out, strict=True):
        pixels = image.permute(1, 2, 0).contiguous().numpy()
        file = io.BytesIO()
        Image.fromarray(pixels[:, :, 0] if len(image) == 1 else pixels).save(file, "JPEG", quality=int(quality))
        with Image.open(file, formats=["JPEG"]) as picture:
            read = torch.from_numpy(np.array(picture)).view(pixels.shape)
        result.copy_(read.permute(2, 0, 1))
    return out


# -------------------------------------------------------------------------------------------------------------- moving


def shear(images: Tensor, slope: float, draw: Draw) -> Tensor:
    """Shear about the centre by `slope` pixels per pixel, along a random axis in a random direction."""
    way, axis = draw(2).unbind(1)
    slopes = slope * _sign(way)
    matrices = _identities(len(images))
    matrices[:, 0, 1] = slopes * (axis < 0.5)
    matrices[:, 1, 0] = slopes * (axis >= 0.5)
    return warp(images, matrices)


def rotation(images: Tensor, degrees: float, draw: Draw) -> Tensor:
    """Rotate about the centre, randomly to the left or to the right."""
    angles = math.radians(degrees) * _sign(draw(1)[:, 0])
    matrices = _identities(len(images))
    matrices[:, 0, 0] = matrices[:, 1, 1] = angles.cos()
    matrices[:, 0, 1], matrices[:, 1, 0] = angles.sin(), -angles.sin()
    return warp(images, matrices)


def translation(images: Tensor, share: float, draw: Draw) -> Tensor:
    """Translate by this fraction of the sides, in a uniformly random direction."""
    height, width = images.shape[2:]
    direction = 2 * math.pi * draw(1)[:, 0].double()
    matrices = _identities(len(images))
    matrices[:, 0, 2], matrices[:, 1, 2] = share * width * direction.cos(), share * height * direction.sin()
    return warp(images, matrices)


def _identities(count: int) -> Tensor:
    return torch.eye(2, 3, dtype=torch.float64).repeat(count, 1, 1)


def warp(images: Tensor, matrices: Tensor) -> Tensor:
    """Sample the pixel at (x, y) from matrices (B, 2, 3) @ (x, y, 1), in pixels from the image's centre.

    Bilinear, and mirrored at the centres of the border pixels as in ImageNet-C's affine maps: no new edge appears.
    """
    height, width = images.shape[2:]
    reach = torch.tensor([(width - 1) / 2, (height - 1) / 2], dtype=torch.float64)
    x = torch.arange(width, dtype=torch.float64) - reach[0]
    y = torch.arange(height, dtype=torch.float64)[:, None] - reach[1]
    along_x, along_y, offset = matrices[..., None, None].unbind(2)
    source = (along_x * x + along_y * y + offset).movedim(1, -1)
    grid = source / reach.clamp(min=0.5)  # a line of one pixel has reach 0
    return _bytes(F.grid_sample(images.double(), grid, "bilinear", "reflection", align_corners=True))


# --------------------------------------------------------------------------------------------------- light and colour


def brightness(images: Tensor, amount: float, draw: Draw) -> Tensor:
    """Add `amount` to the value of HSV: hue and saturation stay, up to white; black becomes grey."""
    value = images.amax(1, keepdim=True).double()
    brighter = (value + 255 * amount).clamp_(max=255)
    return _bytes(torch.where(value > 0, images * (brighter / value.clamp(min=1)), brighter))


def contrast(images: Tensor, factor: float, draw: Draw) -> Tensor:
    """Scale each channel's distance to its mean: factor 1 changes nothing, 0 leaves a constant."""
    mean = images.mean((2, 3), keepdim=True, dtype=torch.float64)
    return _bytes((images - mean).mul_(factor).add_(mean))


def saturation(images: Tensor, change: float, draw: Draw) -> Tensor:
    """Move each pixel by `change` times its distance to its grey value, randomly towards it or away from it.

    At 1, no colour is left, or twice as much. Grey images do not change.
    """
    if images.shape[1] == 1:
        return images.clone()
    factors = 1 + change * _sign(draw(1)[:, 0])
    kinds = torch.full((len(images),), SATURATION)
    return _bytes(blend_(images.double().div_(255), kinds, factors).mul_(255))


def hue(images: Tensor, turn: float, draw: Draw) -> Tensor:
    """Rotate the hue by this fraction of the circle, in a random direction. Grey images do not change."""
    if images.shape[1] == 1:
        return images.clone()
    return _bytes(shift_hue(images.double().div_(255), turn * _sign(draw(1)[:, 0])).mul_(255))


def solarise(images: Tensor, threshold: float, draw: Draw) -> Tensor:
    """Invert the values from `threshold` (0 to 255) on."""
    return torch.where(images >= threshold, 255 - images, images)


def posterise(images: Tensor, bits: float, draw: Draw) -> Tensor:
    """Keep the leading bits of each value and set the others to 0."""
    return images & (0xFF << (8 - int(bits)) & 0xFF)


# --------------------------------------------------------------------------------------------------------------- cover


def occlusion(images: Tensor, area: float, draw: Draw) -> Tensor:
    """Cover this fraction of the area by a mid-grey box of the image's proportions, at a random place."""
    place = draw(2).double()
    inside = []
    for axis, total in enumerate(images.shape[2:]):
        length = round(math.sqrt(area) * total)
        # floor(u * n) is uniform over the n places, and a longer box at the same u contains the shorter one.
        start = torch.floor(place[:, axis, None] * (total - length + 1))
        position = torch.arange(total)
        inside.append((position >= start) & (position < start + length))
    return images.masked_fill((inside[0][:, :, None] & inside[1][:, None, :])[:, None], MID_GREY)


# ----------------------------------------------------------------------------------------------------------- severities


@dataclass(frozen=True)
class Shift:
    """A corruption and its strength at each severity."""

    corrupt: Callable[[Tensor, float, Draw], Tensor]
    strengths: Mapping[int, tuple[float, ...]]
    """Five per image side, in pixels, for which they were chosen; a single entry is for all sides."""
    colour: bool = False
    """Whether it changes only colour, so that grey images stay the same."""

    def applies_to(self, channels: int) -> bool:
        """Whether it can change images with this number of channels; if not, a caller may skip it."""
        return channels > 1 or not self.colour

    def strength(self, severity: int, side: int) -> float:
        """Return the strength for images whose shorter side has `side` pixels."""
        nearest = min(self.strengths, key=lambda chosen: abs(math.log(chosen / side)))
        return self.strengths[nearest][severity - 1]


def _for_all(*five: float) -> Mapping[int, tuple[float, ...]]:
    return {32: five}


SHIFTS: Mapping[str, Shift] = {
    # The paper's three. Salt and pepper is "impulse noise" in the published data sets: the fraction of values changed.
    "salt_pepper": Shift(
        salt_pepper,
        {32: (0.01, 0.02, 0.03, 0.05, 0.07), 64: (0.01, 0.02, 0.05, 0.08, 0.14), 224: (0.03, 0.06, 0.09, 0.17, 0.27)},
    ),
    # Pixels per pixel. Ours: severity 3 is the strongest in AutoAugment's table (Cubuk et al., 2019), 5 is twice that.
    "shear": Shift(shear, _for_all(0.1, 0.2, 0.3, 0.45, 0.6)),
    # Standard deviation; black to white is 1.
    "gaussian_noise": Shift(
        gaussian_noise,
        {32: (0.04, 0.06, 0.08, 0.09, 0.10), 64: (0.04, 0.08, 0.12, 0.15, 0.18), 224: (0.08, 0.12, 0.18, 0.26, 0.38)},
    ),
    # Photons of a white value.
    "shot_noise": Shift(shot_noise, {32: (500, 250, 100, 75, 50), 64: (250, 100, 50, 30, 15), 224: (60, 25, 12, 5, 3)}),
    # Standard deviation in pixels: "Gaussian blur", an extra corruption of the published data sets. Those for 8
    # pixels are ours: CIFAR-10-C's would make digits unreadable.
    "blur": Shift(
        blur,
        {
            8: (0.3, 0.4, 0.5, 0.6, 0.7),
            32: (0.4, 0.6, 0.7, 0.8, 1.0),
            64: (0.5, 0.75, 1.0, 1.25, 1.5),
            224: (1, 2, 3, 4, 6),
        },
    ),
    # Degrees. Ours: severity 3 is the strongest in AutoAugment's table, 5 is twice that.
    "rotation": Shift(rotation, _for_all(10, 20, 30, 45, 60)),
    # Fraction of the side. Ours: 2, 4, 6, 8, 10 of 32 pixels; 10 is the most in AutoAugment's code for CIFAR-10.
    "translation": Shift(translation, _for_all(0.0625, 0.125, 0.1875, 0.25, 0.3125)),
    # Added to HSV's value; black to white is 1.
    "brightness": Shift(
        brightness,
        {32: (0.05, 0.1, 0.15, 0.2, 0.3), 64: (0.1, 0.2, 0.3, 0.4, 0.5), 224: (0.1, 0.2, 0.3, 0.4, 0.5)},
    ),
    # Factor of the distance to the channel's mean.
    "contrast": Shift(
        contrast,
        {32: (0.75, 0.5, 0.4, 0.3, 0.15), 64: (0.4, 0.3, 0.2, 0.1, 0.05), 224: (0.4, 0.3, 0.2, 0.1, 0.05)},
    ),
    # Ours: the published "saturate" removes colour at low severities and adds it at high ones, so they have no order.
    # Here a coin decides which, and at severity 5 no colour is left, or twice as much.
    "saturation": Shift(saturation, _for_all(0.2, 0.4, 0.6, 0.8, 1.0), colour=True),
    # Turns. Ours: severity 2 is the most that BYOL's views have, 5 is the opposite colour.
    "hue": Shift(hue, _for_all(0.05, 0.1, 0.2, 0.35, 0.5), colour=True),
    # The smallest value that is inverted. Ours: severity 4 is that of BYOL's views.
    "solarise": Shift(solarise, _for_all(224, 192, 160, 128, 64)),
    # Bits kept. Ours: severity 3 is the strongest in AutoAugment's table, 5 leaves four levels per channel.
    "posterise": Shift(posterise, _for_all(6, 5, 4, 3, 2)),
    # The quality, as libjpeg counts it.
    "jpeg": Shift(jpeg, {32: (80, 65, 58, 50, 40), 64: (65, 58, 50, 40, 25), 224: (25, 18, 15, 10, 7)}),
    # Fraction of the area. Ours: severity 5 is what Cutout (DeVries & Taylor, 2017) hides of CIFAR-10, 16 x 16.
    "occlusion": Shift(occlusion, _for_all(0.05, 0.1, 0.15, 0.2, 0.25)),
}


def shifted(images: Tensor, ids: Tensor, name: str, severity: int, seed: int) -> Tensor:
    """Apply one shift to uint8 images (B, C, H, W), grey or RGB, of any size; the result has their shape and device.

    `ids` (B,) are the images' numbers, which key the randomness. Saturation and hue do not change grey images:
    `SHIFTS[name].applies_to(channels)` reports that. Computed on the CPU, on as many threads as torch uses.
    """
    _check(images, ids, name, severity)
    shift = SHIFTS[name]
    strength = shift.strength(severity, min(images.shape[2:]))
    key = (seed, zlib.crc32(name.encode()))  # the name, not its position: adding a shift changes no other
    before, numbers = images.cpu(), ids.cpu()
    after = torch.empty_like(before, memory_format=torch.contiguous_format)

    def fill(start: int) -> None:
        part = slice(start, start + step)
        after[part] = shift.corrupt(before[part], strength, lambda count: uniforms(numbers[part], count, *key))

    share = -(-len(images) // torch.get_num_threads())  # at least one chunk per thread
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
        raise BadInput(f"{len(images)} images came with ids of shape {tuple(ids.shape)}; give one id per image.")
