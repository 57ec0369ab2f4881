"""Colour jitter, grey and solarise for batches of images in [0, 1], each image with its own parameters.

The operations and their clamps are torchvision's. In-place functions end in an underscore, as in torch.
"""

from __future__ import annotations

import torch
from torch import Tensor

BRIGHTNESS, CONTRAST, SATURATION, HUE = range(4)  # columns of `factors`, values of `order`
LUMA = (0.2989, 0.587, 0.114)  # ITU-R 601-2, torchvision's digits


def luma(images: Tensor) -> Tensor:
    """The grey value of RGB images: (B, 3, H, W) -> (B, 1, H, W)."""
    red, green, blue = images.unbind(1)
    return (red * LUMA[0]).add_(green, alpha=LUMA[1]).add_(blue, alpha=LUMA[2]).unsqueeze_(1)


def jitter_(images: Tensor, order: Tensor, factors: Tensor) -> Tensor:
    """Applies the four operations to each image in its own order.

    order: (B, 4), a permutation of BRIGHTNESS, CONTRAST, SATURATION, HUE in each row.
    factors: (B, 4), by operation; factor 1 and hue shift 0 leave an image as it is.

    All but the hue blend an image with something, so they run on the whole batch at once whatever their order; the hue
    shift runs between them on those images that have it there. On grey images saturation and hue are left out.
    """
    grey = images.shape[1] == 1
    blends = order[(order != HUE) & (order != SATURATION)] if grey else order[order != HUE]
    blends = blends.view(len(images), -1)
    hue_slot = order.argmax(1).masked_fill_(factors[:, HUE] == 0, -1)  # HUE is the greatest of the four
    for slot in range(4):
        if not grey:
            shift_hue_(images, factors[:, HUE], hue_slot == slot)
        if slot < blends.shape[1]:
            kind = blends[:, slot]
            blend_(images, kind, factors.gather(1, kind[:, None])[:, 0])
    return images


def blend_(images: Tensor, kind: Tensor, factor: Tensor) -> Tensor:
    """Brightness, contrast or saturation, as `kind` says for each image: clamp(factor * x + (1 - factor) * target).

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


def shift_hue_(images: Tensor, shift: Tensor, chosen: Tensor) -> Tensor:
    """Turns the hue of the chosen RGB images by `shift` (B,), in turns."""
    rows = chosen.nonzero()[:, 0]
    if len(rows):
        images.index_copy_(0, rows, shift_hue(images.index_select(0, rows), shift[rows]))
    return images


def shift_hue(images: Tensor, shift: Tensor) -> Tensor:
    """The images with their hue turned by `shift` (B,), in turns.

    Hexcone HSV without its six cases: a channel is value - chroma * clamp(2 - 6 d, 0, 1), d being the distance on the
    circle, in turns, from the hue to the channel's complement.
    """
    red, green, blue = images.unbind(1)
    value = torch.maximum(torch.maximum(red, green), blue)
    chroma = value - torch.minimum(torch.minimum(red, green), blue)
    # 0/1 in float32 and `lerp` instead of `==` and `where`, which are not vectorised: a quarter of the time.
    is_red, is_green = (torch.eq(value, plane, out=torch.empty_like(value)) for plane in (red, green))
    sixths = (red - green).add_(chroma, alpha=4)
    sixths.lerp_((blue - red).add_(chroma, alpha=2), is_green).lerp_(green - blue, is_red)
    hue = sixths.div_(chroma.clamp(min=1e-12).mul_(6)).add_(shift[:, None, None])
    complements = torch.tensor([1 / 2, 5 / 6, 1 / 6], device=images.device)  # cyan, magenta, yellow
    distance = hue[:, None] - complements[:, None, None]
    distance.sub_(distance.round()).abs_()
    share = torch.rsub(distance, 2, alpha=6).clamp_(0, 1)
    return torch.addcmul(value[:, None], chroma[:, None], share, value=-1)


def grey_(images: Tensor, chosen: Tensor) -> Tensor:
    """Takes the colour from the chosen images (bool (B,))."""
    rows = chosen.nonzero()[:, 0]
    if len(rows) and images.shape[1] > 1:
        images.index_copy_(0, rows, luma(images.index_select(0, rows)).expand(-1, images.shape[1], -1, -1))
    return images


def solarise_(images: Tensor, chosen: Tensor) -> Tensor:
    """Inverts the pixels from one half on in the chosen images (bool (B,))."""
    rows = chosen.nonzero()[:, 0]
    if len(rows):
        part = images.index_select(0, rows)
        images.index_copy_(0, rows, torch.minimum(part, 1 - part))  # in [0, 1] the same as the condition x >= 1/2
    return images
