"""Convert images to what a run's encoder takes (channels, side), and choose some of many."""

from __future__ import annotations

import torch
from torch import Tensor

from byov.data.transforms import luma, resized
from byov.inference.load import Run

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
