"""What can happen to an image: each corruption as batched code, its strength a plain number.

Every function takes uint8 images (B, C, H, W) on the CPU, a strength and a `Draw`, and gives uint8 images. An image's
result depends on itself and on its own numbers alone, to the last bit: what is rounded to bytes in the end is computed
in float64, so that the order in which a batch is worked on cannot tip a value over to the next byte.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable
from functools import cache

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from scipy import ndimage
from torch import Tensor

from byov.data.colour import SATURATION, blend_, shift_hue

Draw = Callable[[int], Tensor]  # draw(count): uniform numbers in [0, 1), float32 (B, count), keyed by the image
MID_GREY = 128


def _bytes(values: Tensor) -> Tensor:
    return values.round_().clamp_(0, 255).to(torch.uint8)


def _sign(uniform: Tensor) -> Tensor:
    return torch.where(uniform < 0.5, -1.0, 1.0).double()


def _for_each_value(images: Tensor, draw: Draw) -> Tensor:
    """A number for every value of every channel."""
    return draw(math.prod(images.shape[1:])).view(images.shape)


# --------------------------------------------------------------------------------------------------------------- noise


def salt_pepper(images: Tensor, amount: float, draw: Draw) -> Tensor:
    """A share `amount` of all values becomes black or white, each with half the chance, each channel by itself."""
    chance = _for_each_value(images, draw)
    return images.masked_fill(chance < amount / 2, 0).masked_fill_(chance >= 1 - amount / 2, 255)


def gaussian_noise(images: Tensor, sigma: float, draw: Draw) -> Tensor:
    """Adds N(0, sigma^2), in units of the whole range from black to white."""
    middle = _for_each_value(images, draw).double().add_(2.0**-25)  # of the number's interval: never 0, never 1
    return _bytes(torch.special.ndtri(middle).mul_(255 * sigma).add_(images))


def shot_noise(images: Tensor, photons: float, draw: Draw) -> Tensor:
    """Counts light: a value x in [0, 1] becomes Poisson(photons * x) / photons."""
    levels = images.to(torch.int64)
    # The rows of the table, each raised by its level, are one sorted line: one search finds the place in the right row.
    place = torch.searchsorted(_shot_table(photons), _for_each_value(images, draw).double().add_(levels), right=True)
    return place.sub_(levels.mul_(256)).to(torch.uint8)


@cache
def _shot_table(photons: float) -> Tensor:
    """(256 * 256,): at 256 v + w, the level v plus the chance that v becomes w or less."""
    level = torch.arange(256, dtype=torch.float64)
    most = torch.floor((level + 0.5) * photons / 255)  # photons that still round to the level or less
    chance: Tensor = torch.special.gammaincc(
        most[None, :] + 1, photons * level[:, None] / 255
    )  # Poisson's distribution
    chance[:, 255] = 1  # whatever is brighter is white
    return (level[:, None] + chance).flatten()


# -------------------------------------------------------------------------------------------------------- blur and JPEG


def blur(images: Tensor, sigma: float, draw: Draw) -> Tensor:
    """A Gaussian blur with `sigma` pixels, the borders repeated, cut at 4 sigma: scikit-image's, which ImageNet-C used.

    (`resample.gaussian_blur` is BYOL's: its kernel ends at a tenth of the side, where strong blurs have not.)
    """
    blurred = ndimage.gaussian_filter(images.numpy(), (0, 0, sigma, sigma), output=np.float64, mode="nearest")
    return _bytes(torch.from_numpy(blurred))


def jpeg(images: Tensor, quality: float, draw: Draw) -> Tensor:
    """Writes each image as a JPEG file of this quality in memory, and reads it back; grey images as grey files."""
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
    """Slants about the centre by `slope` pixels a pixel: one axis, one way, by two coins an image."""
    way, axis = draw(2).unbind(1)
    slopes = slope * _sign(way)
    matrices = _identities(len(images))
    matrices[:, 0, 1] = slopes * (axis < 0.5)
    matrices[:, 1, 0] = slopes * (axis >= 0.5)
    return warp(images, matrices)


def rotation(images: Tensor, degrees: float, draw: Draw) -> Tensor:
    """Turns about the centre, by a coin to the left or to the right."""
    angles = math.radians(degrees) * _sign(draw(1)[:, 0])
    matrices = _identities(len(images))
    matrices[:, 0, 0] = matrices[:, 1, 1] = angles.cos()
    matrices[:, 0, 1], matrices[:, 1, 0] = angles.sin(), -angles.sin()
    return warp(images, matrices)


def translation(images: Tensor, share: float, draw: Draw) -> Tensor:
    """Moves by this share of the sides, in a direction that is uniform on the circle."""
    height, width = images.shape[2:]
    direction = 2 * math.pi * draw(1)[:, 0].double()
    matrices = _identities(len(images))
    matrices[:, 0, 2], matrices[:, 1, 2] = share * width * direction.cos(), share * height * direction.sin()
    return warp(images, matrices)


def _identities(count: int) -> Tensor:
    return torch.eye(2, 3, dtype=torch.float64).repeat(count, 1, 1)


def warp(images: Tensor, matrices: Tensor) -> Tensor:
    """Fetches the pixel at (x, y) from matrices (B, 2, 3) @ (x, y, 1), in pixels from the image's centre.

    Bilinear, and mirrored at the centres of the border pixels as ImageNet-C's affine maps: no edge is invented.
    """
    height, width = images.shape[2:]
    reach = torch.tensor([(width - 1) / 2, (height - 1) / 2], dtype=torch.float64)
    x = torch.arange(width, dtype=torch.float64) - reach[0]
    y = torch.arange(height, dtype=torch.float64)[:, None] - reach[1]
    along_x, along_y, offset = matrices[..., None, None].unbind(2)
    source = (along_x * x + along_y * y + offset).movedim(1, -1)
    grid = source / reach.clamp(min=0.5)  # a line of one pixel has no reach
    return _bytes(F.grid_sample(images.double(), grid, "bilinear", "reflection", align_corners=True))


# --------------------------------------------------------------------------------------------------- light and colour


def brightness(images: Tensor, amount: float, draw: Draw) -> Tensor:
    """Adds `amount` to the value of HSV: hue and saturation stay, up to white; black becomes grey."""
    value = images.amax(1, keepdim=True).double()
    brighter = (value + 255 * amount).clamp_(max=255)
    return _bytes(torch.where(value > 0, images * (brighter / value.clamp(min=1)), brighter))


def contrast(images: Tensor, factor: float, draw: Draw) -> Tensor:
    """Draws each channel towards its mean: factor 1 changes nothing, 0 leaves nothing."""
    mean = images.mean((2, 3), keepdim=True, dtype=torch.float64)
    return _bytes((images - mean).mul_(factor).add_(mean))


def saturation(images: Tensor, change: float, draw: Draw) -> Tensor:
    """Moves each pixel `change` times its distance to its grey: by a coin towards it (1: no colour left) or away.

    Grey images stay as they are.
    """
    if images.shape[1] == 1:
        return images.clone()
    factors = 1 + change * _sign(draw(1)[:, 0])
    kinds = torch.full((len(images),), SATURATION)
    return _bytes(blend_(images.double().div_(255), kinds, factors).mul_(255))


def hue(images: Tensor, turn: float, draw: Draw) -> Tensor:
    """Turns the hue by this part of the circle, by a coin one way or the other. Grey images stay as they are."""
    if images.shape[1] == 1:
        return images.clone()
    return _bytes(shift_hue(images.double().div_(255), turn * _sign(draw(1)[:, 0])).mul_(255))


def solarise(images: Tensor, threshold: float, draw: Draw) -> Tensor:
    """Inverts the values from `threshold` (0 to 255) on."""
    return torch.where(images >= threshold, 255 - images, images)


def posterise(images: Tensor, bits: float, draw: Draw) -> Tensor:
    """Keeps the leading bits of each value, the others become 0."""
    return images & (0xFF << (8 - int(bits)) & 0xFF)


# --------------------------------------------------------------------------------------------------------------- cover


def occlusion(images: Tensor, area: float, draw: Draw) -> Tensor:
    """Covers this share of the area by a mid-grey box with the image's own proportions, anywhere within the image."""
    place = draw(2).double()
    inside = []
    for axis, total in enumerate(images.shape[2:]):
        length = round(math.sqrt(area) * total)
        # floor(u * n) is uniform over the n places, and a longer box at the same u holds the shorter one.
        start = torch.floor(place[:, axis, None] * (total - length + 1))
        position = torch.arange(total)
        inside.append((position >= start) & (position < start + length))
    return images.masked_fill((inside[0][:, :, None] & inside[1][:, None, :])[:, None], MID_GREY)
