"""Crop, flip, resize and blur: every step here is linear, separable, and has its own parameters for each image.

Resizing is antialiased bicubic (a = -1/2), the one of `torch.nn.functional.interpolate(..., antialias=True)`.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class Boxes(NamedTuple):
    """One crop an image, in pixels; every field is an int64 tensor (B,)."""

    top: Tensor
    left: Tensor
    height: Tensor
    width: Tensor


def resized_crop(images: Tensor, boxes: Boxes, flip: Tensor, out: Tensor) -> Tensor:
    """Crops each image to its box, resizes it to the size of `out` and mirrors it where `flip`.

    images: uint8 (B, C, H, W); out: float32 (B, C, size, size), filled with values in [0, 1].

    Two batched matrix products; the flip costs nothing. The channels stand between rows and columns on the way, so that
    each product takes all of them at once.
    """
    batch, channels, height, width = images.shape
    size = out.shape[3]
    unflipped = torch.zeros_like(flip)
    if height == width:  # half the calls
        start, length = torch.cat((boxes.top, boxes.left)), torch.cat((boxes.height, boxes.width))
        rows, columns = resize_matrices(start, length, torch.cat((unflipped, flip)), size, width).chunk(2)
    else:
        rows = resize_matrices(boxes.top, boxes.height, unflipped, size, height)
        columns = resize_matrices(boxes.left, boxes.width, flip, size, width)
    pixels = images.new_empty((batch, height, channels, width), dtype=torch.float32).copy_(images.transpose(1, 2))
    wide = torch.bmm(pixels.view(batch, height * channels, width), columns.transpose(1, 2))
    small = torch.bmm(rows, wide.view(batch, height, channels * size)).view(batch, size, channels, size)
    return torch.mul(small.transpose(1, 2), 1 / 255, out=out).clamp_(0, 1)


def resized(images: Tensor, size: int) -> Tensor:
    """Whole images (B, C, H, W) at the side `size`, nothing random: uint8 stays uint8, floats stay in [0, 1]."""
    if images.shape[2:] == (size, size):
        return images
    small = F.interpolate(images.to(torch.float32), (size, size), mode="bicubic", antialias=True)
    return small.round_().clamp_(0, 255).to(torch.uint8) if images.dtype == torch.uint8 else small.clamp_(0, 1)


def resize_matrices(start: Tensor, length: Tensor, flip: Tensor, size: int, total: int) -> Tensor:
    """(B, size, total) matrices: each resizes pixels [start, start + length) of a line of `total` pixels to `size`.

    A flip reverses the rows. Only the few taps of an output pixel are computed, then put in their places.
    """
    scale = length.to(torch.float32) / size
    stretch = scale.clamp(min=1)  # antialias: when shrinking, the filter widens with the step between output pixels
    taps = 2 * math.ceil(2 * max(total / size, 1)) + 1
    position = torch.arange(size, device=start.device)
    position = torch.where(flip[:, None], size - 1 - position, position)
    centre = scale[:, None] * (position + 0.5)
    first = (centre - 2 * stretch[:, None] + 0.5).clamp_(min=0).floor_()
    pixel = first[:, :, None] + torch.arange(taps, device=start.device)
    weights = _cubic((pixel + 0.5 - centre[:, :, None]).div_(stretch[:, None, None]).abs_())
    weights.mul_(pixel < length[:, None, None])
    weights.div_(weights.sum(2, keepdim=True))
    # Taps beyond the box weigh 0 but still need a place of their own: `taps` more columns, cut off in the end.
    matrices = weights.new_zeros((len(start), size, total + taps))
    matrices.scatter_(2, pixel.to(torch.int64) + start[:, None, None], weights)
    return matrices[:, :, :total]


def _cubic(distance: Tensor) -> Tensor:
    """Keys' cubic kernel with a = -1/2."""
    near = (1.5 * distance - 2.5) * distance * distance + 1
    far = ((-0.5 * distance + 2.5) * distance - 4) * distance + 2
    return torch.where(distance < 1, near, torch.where(distance < 2, far, torch.zeros_like(far)))


def blur_kernel_size(size: int) -> int:
    """A tenth of the side, odd: BYOL's 23 at 224 pixels."""
    return max(3, size // 10 | 1)


def gaussian_blur(images: Tensor, sigma: Tensor) -> Tensor:
    """Blurs each image by its own sigma (B,) in pixels, with mirrored borders.

    Two depthwise convolutions with the images' channels side by side.
    """
    batch, channels, height, width = images.shape
    taps = blur_kernel_size(min(height, width))
    reach = taps // 2
    offsets = torch.arange(-reach, reach + 1, device=images.device, dtype=torch.float32)
    kernels = torch.softmax(-0.5 * (offsets / sigma[:, None]) ** 2, dim=1)
    kernels = kernels.repeat_interleave(channels, 0)
    planes = F.pad(images, (reach,) * 4, mode="reflect").view(1, batch * channels, height + 2 * reach, -1)
    planes = F.conv2d(planes, kernels[:, None, :, None], groups=batch * channels)
    return F.conv2d(planes, kernels[:, None, None, :], groups=batch * channels).view_as(images)


def blur_(images: Tensor, sigma: Tensor, chosen: Tensor) -> Tensor:
    """Blurs the chosen images (bool (B,)), each by its own sigma (B,). The clamp is for rounding: 1 stays 1."""
    rows = chosen.nonzero()[:, 0]
    if len(rows) == len(images):
        torch.clamp(gaussian_blur(images, sigma), 0, 1, out=images)
    elif len(rows):
        images.index_copy_(0, rows, gaussian_blur(images.index_select(0, rows), sigma[rows]).clamp_(0, 1))
    return images
