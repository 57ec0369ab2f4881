"""How many weight draws a posterior predictive needs (the paper's Figure 5): bootstraps over draws.

What is followed is the predictive: an image's mean probability over K draws of the class that these K draws predict.
Few draws overstate it (each is sure of its own class), so that it need not stand still; and it is shaky, by about
1 / sqrt(K).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from byov._core.randomness import generator


class OfDraws(NamedTuple):
    """The predictive with so many draws, over bootstraps."""

    draws: int
    mean: float
    """Over images and bootstraps."""
    std: float
    """Over bootstraps, of the average over images."""
    image_std: float
    """Over bootstraps, image by image; then averaged over images."""


def predictive_over_draws(
    probabilities: Tensor, counts: Sequence[int], bootstraps: int = 50, seed: int = 0
) -> list[OfDraws]:
    """For each number of draws: so many are taken, with replacement, from probabilities (draws, images, classes)."""
    if probabilities.ndim != 3 or bootstraps < 2 or not counts or min(counts) < 1:
        raise ValueError("probabilities (draws, images, classes), two bootstraps and counts from 1 on are needed.")
    return [_with(probabilities.double(), count, bootstraps, seed) for count in counts]


def _with(probabilities: Tensor, count: int, bootstraps: int, seed: int) -> OfDraws:
    draws = len(probabilities)
    chosen = torch.randint(draws, (bootstraps, count), generator=generator(seed, count))
    weights = torch.zeros(bootstraps, draws, dtype=torch.float64)
    weights.scatter_add_(1, chosen, torch.full(chosen.shape, 1 / count, dtype=torch.float64))
    means = (weights @ probabilities.flatten(1)).view(bootstraps, *probabilities.shape[1:])
    predictive = means.amax(2)
    return OfDraws(
        count, float(predictive.mean()), float(predictive.mean(1).std()), float(predictive.std(dim=0).mean())
    )
