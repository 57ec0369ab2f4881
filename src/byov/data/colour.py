"""Colour jitter, grey and solarise for batches of images in [0, 1], each image with its own parameters.

The operations and their clamps are torchvision's. In-place functions end in an underscore, as in torch.
"""

from __future__ import annotations

import torch
from torch import Tensor

BRIGHTNESS, CONTRAST, SATURATION, HUE = range(4)  # columns of `factors`, values of `order`
NEUTRAL = (1.0, 1.0, 1.0, 0.0)  # factors that change nothing
LUMA = (0.2989, 0.587, 0.114)  # ITU-R 601-2, torchvision's digits


def luma(images: Tensor) -> Tensor:
    """The grey value of RGB images: (B, 3, H, W) -> (B, 1, H, W)."""
    red, green, blue = images.unbind(1)
    return (red * LUMA[0]).add_(green, alpha=LUMA[1]).add_(blue, alpha=LUMA[2]).unsqueeze_(1)


def jitter_(images: Tensor, order: Tensor, factors: Tensor) -> Tensor:
    """Applies the four operations to each image in its own order.

    order: (B, 4), a permutation of BRIGHTNESS, CONTRAST, SATURATION, HUE in each row.
    factors: (B, 4), by operation; factor 1 and hue shift 0 leave an image as it is.

    The hue, the dearest, is shifted once for all images: before it come the blends (all others blend an image with
    something) that precede it, after it those that follow. The images are sorted by how many precede, so that each
    blend works on neighbours. Images that no operation changes are left out. On grey images saturation and hue are.
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
    kinds, changed, factors = blends[rows], images.index_select(0, rows), factors[rows]
    strengths = factors.gather(1, kinds)
    if not grey:
        for slot in range(3):
            blend_(changed[ends[slot] :], kinds[ends[slot] :, slot], strengths[ends[slot] :, slot])
        if bool(factors[:, HUE].any()):
            changed = shift_hue(changed, factors[:, HUE])
    for slot in range(blends.shape[1]):
        blend_(changed[: ends[slot]], kinds[: ends[slot], slot], strengths[: ends[slot], slot])
    return images.index_copy_(0, rows, changed)


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
