"""Crop, resize, blur and colour changes as tensor operations on batches, each image with its own parameters.

Resizing is antialiased bicubic (a = -1/2), as in `torch.nn.functional.interpolate(..., antialias=True)`. The colour
operations and their clamps are torchvision's. In-place functions end in an underscore, as in torch.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

BRIGHTNESS, CONTRAST, SATURATION, HUE = range(4)  # columns of `factors`, values of `order`
NEUTRAL = (1.0, 1.0, 1.0, 0.0)  # factors that change nothing
LUMA = (0.2989, 0.587, 0.114)  # ITU-R 601-2, torchvision's digits


# ------------------------------------------------------------------------------------------------------ crop and resize


class Boxes(NamedTuple):
    """One crop per image, in pixels; every field is an int64 tensor (B,)."""

    top: Tensor
    left: Tensor
    height: Tensor
    width: Tensor


def resized_crop(images: Tensor, boxes: Boxes, flip: Tensor, out: Tensor) -> Tensor:
    """Crop each image to its box, resize it to the size of `out`, and mirror it where `flip` is set.

    `images` is uint8 (B, C, H, W); `out` is float32 (B, C, size, size) and is filled with values in [0, 1].

    Computed as two batched matrix products; the flip costs nothing. The channels are between rows and columns,
    so that each product handles all at once.
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
    """Resize whole images (B, C, H, W) to the side `size`: uint8 stays uint8, floats stay in [0, 1]."""
    if images.shape[2:] == (size, size):
        return images
    small = F.interpolate(images.to(torch.float32), (size, size), mode="bicubic", antialias=True)
    return small.round_().clamp_(0, 255).to(torch.uint8) if images.dtype == torch.uint8 else small.clamp_(0, 1)


def resize_matrices(start: Tensor, length: Tensor, flip: Tensor, size: int, total: int) -> Tensor:
    """Build matrices (B, size, total) that resize pixels [start, start + length) of lines of `total` pixels to `size`.

    A flip reverses the rows. Only the few taps per output pixel are computed, then scattered to their columns.
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
    # Taps beyond the box have weight 0 but still need a column: `taps` more columns, cut off at the end.
    matrices = weights.new_zeros((len(start), size, total + taps))
    matrices.scatter_(2, pixel.to(torch.int64) + start[:, None, None], weights)
    return matrices[:, :, :total]


def _cubic(distance: Tensor) -> Tensor:
    """Keys' cubic kernel with a = -1/2."""
    near = (1.5 * distance - 2.5) * distance * distance + 1
    far = ((-0.5 * distance + 2.5) * distance - 4) * distance + 2
    return torch.where(distance < 1, near, torch.where(distance < 2, far, torch.zeros_like(far)))


# ----------------------------------------------------------------------------------------------------------------- blur


def blur_kernel_size(size: int) -> int:
    """Return a tenth of the side, rounded to odd: BYOL's 23 at 224 pixels."""
    return max(3, size // 10 | 1)


def gaussian_blur(images: Tensor, sigma: Tensor) -> Tensor:
    """Blur each image by its own sigma (B,) in pixels, with mirrored borders.

    Computed as two depthwise convolutions over the channels of all images.
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
    """Blur the chosen images (bool (B,)), each by its own sigma (B,); clamped, since rounding may exceed 1."""
    rows = chosen.nonzero()[:, 0]
    if len(rows) == len(images):
        torch.clamp(gaussian_blur(images, sent(sigma, images)), 0, 1, out=images)
    elif len(rows):
        there, sigma = sent(rows, images), sent(sigma[rows], images)
        images.index_copy_(0, there, gaussian_blur(images.index_select(0, there), sigma).clamp_(0, 1))
    return images


# --------------------------------------------------------------------------------------------------------------- colour


def sent(parameters: Tensor, images: Tensor) -> Tensor:
    """Copy parameters to the device of the images, without waiting for it."""
    return parameters.to(images.device, non_blocking=True)


def luma(images: Tensor) -> Tensor:
    """Compute the grey values of RGB images: (B, 3, H, W) -> (B, 1, H, W)."""
    red, green, blue = images.unbind(1)
    return (red * LUMA[0]).add_(green, alpha=LUMA[1]).add_(blue, alpha=LUMA[2]).unsqueeze_(1)


def jitter_(images: Tensor, order: Tensor, factors: Tensor) -> Tensor:
    """Apply the four operations to each image, in its own order.

    `order` is (B, 4), a permutation of BRIGHTNESS, CONTRAST, SATURATION, HUE in each row. `factors` is (B, 4), one per
    operation; factor 1 and hue shift 0 change nothing.

    The hue is the most expensive, so it is shifted once for all images: after the blends (the other three operations)
    that precede it in an image's order, and before those that follow. The images are sorted by how many precede, so
    that each blend works on a contiguous slice. Images that no operation changes are skipped, as are saturation and hue
    of grey images.
    """
    grey = images.shape[1] == 1
    left_out = (order == HUE) | (order == SATURATION) if grey else order == HUE
    blends = order[~left_out].view(len(images), -1)
    before = torch.zeros_like(order[:, 0]) if grey else order.argmax(1)  # HUE is the greatest of the four
    unchanged = (factors == torch.tensor(NEUTRAL, device=factors.device)).all(1)
    before, rows = before.masked_fill_(unchanged, 4).sort()
    ends = torch.searchsorted(before, torch.arange(4, device=before.device), right=True).tolist()  # of 0, 1, 2, 3
    rows = rows[: ends[3]]
    if not len(rows):
        return images
    kinds, factors = blends[rows], factors[rows]
    hues = bool(factors[:, HUE].any())
    strengths, kinds, factors, rows = (sent(t, images) for t in (factors.gather(1, kinds), kinds, factors, rows))
    changed = images.index_select(0, rows)
    if not grey:
        for slot in range(3):
            blend_(changed[ends[slot] :], kinds[ends[slot] :, slot], strengths[ends[slot] :, slot])
        if hues:
            changed = shift_hue(changed, factors[:, HUE])
    for slot in range(blends.shape[1]):
        blend_(changed[: ends[slot]], kinds[: ends[slot], slot], strengths[: ends[slot], slot])
    return images.index_copy_(0, rows, changed)


def blend_(images: Tensor, kind: Tensor, factor: Tensor) -> Tensor:
    """Change brightness, contrast or saturation, by each image's `kind`: clamp(factor * x + (1 - factor) * target).

    The target is black for brightness, the mean grey of the image for contrast, its grey pixels for saturation.
    """
    kind, factor = kind.view(-1, 1, 1, 1), factor.view(-1, 1, 1, 1)
    if images.shape[1] == 1:
        target = images.mean((1, 2, 3), keepdim=True).mul_(kind == CONTRAST)
    else:
        target = luma(images)
        mean = target.mean((1, 2, 3), keepdim=True).mul_(kind == CONTRAST)
        target.mul_(kind == SATURATION).add_(mean)
    return images.lerp_(target, 1 - factor).clamp_(0, 1)


def shift_hue(images: Tensor, shift: Tensor) -> Tensor:
    """Rotate the hue of each image by `shift` (B,), in turns.

    Hexcone HSV without its six cases: a channel is value - chroma * clamp(2 - 6 d, 0, 1), where d is the distance in
    turns from the hue to the channel's complement.
    """
    red, green, blue = images.unbind(1)
    value = torch.maximum(torch.maximum(red, green), blue)
    chroma = value - torch.minimum(torch.minimum(red, green), blue)
    # 0/1 in float32 with `lerp`, not `==` and `where`, which are not vectorised: a quarter of the time.
    is_red, is_green = (torch.eq(value, plane, out=torch.empty_like(value)) for plane in (red, green))
    sixths = (red - green).add_(chroma, alpha=4)
    sixths.lerp_((blue - red).add_(chroma, alpha=2), is_green).lerp_(green - blue, is_red)
    hue = sixths.div_(chroma.clamp(min=1e-12).mul_(6)).add_(shift[:, None, None])
    complements = (torch.arange(3, 8, 2, device=images.device) % 6) / 6  # 3/6 cyan, 5/6 magenta, 1/6 yellow
    distance = hue[:, None] - complements[:, None, None]
    distance.sub_(distance.round()).abs_()
    share = torch.rsub(distance, 2, alpha=6).clamp_(0, 1)
    return torch.addcmul(value[:, None], chroma[:, None], share, value=-1)


def grey_(images: Tensor, chosen: Tensor) -> Tensor:
    """Convert the chosen images (bool (B,)) to grey."""
    rows = chosen.nonzero()[:, 0]
    if len(rows) and images.shape[1] > 1:
        rows = sent(rows, images)
        images.index_copy_(0, rows, luma(images.index_select(0, rows)).expand(-1, images.shape[1], -1, -1))
    return images


def solarise_(images: Tensor, chosen: Tensor) -> Tensor:
    """Invert the values from 1/2 on in the chosen images (bool (B,))."""
    rows = chosen.nonzero()[:, 0]
    if len(rows):
        rows = sent(rows, images)
        part = images.index_select(0, rows)
        images.index_copy_(0, rows, torch.minimum(part, 1 - part))  # in [0, 1], the same as a condition x >= 1/2
    return images
