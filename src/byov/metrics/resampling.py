"""Images drawn anew, with replacement: what every bootstrap of this room starts from."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from byov._core.randomness import generator

BLOCK = 1 << 20  # counts at a time: 8 MiB


def resampled_counts(images: int, resamples: int, seed: int = 0) -> Iterator[Tensor]:
    """How often each image counts in each resample: blocks (some resamples, images), float64."""
    if resamples < 1:
        raise ValueError(f"resamples is {resamples}, but at least one is needed.")
    g = generator(seed)
    rows = max(1, BLOCK // images)
    for start in range(0, resamples, rows):
        drawn = torch.randint(images, (min(rows, resamples - start), images), generator=g)
        counts = torch.zeros(drawn.shape, dtype=torch.float64)
        yield counts.scatter_add_(1, drawn, torch.ones_like(counts))


def standard_errors(
    statistics: Callable[[Tensor], dict[str, Tensor]], images: int, resamples: int = 500, seed: int = 0
) -> dict[str, float]:
    """Bootstrap standard error over images of each statistic; they are functions of counts (resamples, images)."""
    if resamples < 2:
        raise ValueError(f"resamples is {resamples}, but a standard error needs at least two.")
    blocks = [statistics(counts) for counts in resampled_counts(images, resamples, seed)]
    return {name: float(torch.cat([block[name] for block in blocks]).std()) for name in blocks[0]}
