"""How often the label is among the most probable classes."""

from __future__ import annotations

import torch
from torch import Tensor

from byov.metrics.checks import checked


def top_k_accuracy(probabilities: Tensor, labels: Tensor, k: int) -> float:
    """The part of images whose label is among the k most probable classes; 1 where there are no more than k classes.

    Equal probabilities rank by class number, as argmax does, so that k = 1 is the accuracy of the argmax.
    """
    return float(in_top(*checked(probabilities, labels), k).double().mean())


def in_top(p: Tensor, y: Tensor, k: int) -> Tensor:
    """(images,) bool: whether the label is among the k most probable classes."""
    if k < 1:
        raise ValueError(f"k is {k}, but at least the most probable class must count.")
    own = p.gather(1, y[:, None])
    ahead = (p > own) | ((p == own) & (torch.arange(p.shape[1])[None, :] < y[:, None]))
    return ahead.sum(1) < k
