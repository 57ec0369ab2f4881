"""How well a score sorts two groups: AUROC, average precision, false positives at a rate of true ones.

Only the order of the scores counts. Equal scores are one threshold (average precision, FPR) or half right (AUROC).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from byov.metrics.checks import checked_scores


def levels(values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The distinct values, rising; for each image, which of them it has; and how many images have each."""
    distinct, level, images = torch.unique(values, return_inverse=True, return_counts=True)
    return distinct, level, images


def midranks(values: Tensor, weights: Tensor | None = None) -> Tensor:
    """Ranks from 1; equal values share the mean of their ranks.

    With weights (..., images), how often each image is there: ranks (..., images), all without a second sort.
    """
    weights = torch.ones(len(values), dtype=torch.float64) if weights is None else weights
    distinct, level, _ = levels(values)
    there = weights.new_zeros(*weights.shape[:-1], len(distinct)).index_add_(-1, level, weights)
    return (there.cumsum(-1) - (there - 1) / 2)[..., level]


def auroc(scores: Tensor, positive: Tensor) -> float:
    """The chance that a positive image scores above another, ties half; NaN where there is only one kind."""
    s, positive = checked_scores(scores, positive)
    positives = int(positive.sum())
    negatives = len(s) - positives
    if positives == 0 or negatives == 0:
        return math.nan
    # Mann and Whitney's U
    above = float(midranks(s)[positive].sum()) - positives * (positives + 1) / 2
    return above / (positives * negatives)


def average_precision(scores: Tensor, positive: Tensor) -> float:
    """AUPR as a sum of steps: precision at each threshold times the recall gained there; NaN with no positive image.

    Straight lines between the points, as a trapezoid draws them, would promise too much (Davis and Goadrich 2006).
    """
    s, positive = checked_scores(scores, positive)
    if not positive.any():
        return math.nan
    hits, taken = _taken(s, positive)
    gained = hits.diff(prepend=hits.new_zeros(1))
    return float((gained * hits / taken).sum() / hits[-1])


def fpr_at_tpr(scores: Tensor, positive: Tensor, tpr: float = 0.95) -> float:
    """The part of the others that score as high as the highest threshold that takes in `tpr` of the positive images.

    NaN where there is only one kind.
    """
    if not 0 < tpr <= 1:
        raise ValueError(f"tpr is {tpr}, but it must be above 0 and at most 1.")
    s, positive = checked_scores(scores, positive)
    if positive.all() or not positive.any():
        return math.nan
    hits, taken = _taken(s, positive)
    first = int((hits / hits[-1] < tpr).sum())  # thresholds that take in too few
    return float((taken - hits)[first] / (~positive).sum())


def _taken(scores: Tensor, positive: Tensor) -> tuple[Tensor, Tensor]:
    """At each threshold, the highest first: how many positive images, and how many in all, are at or above it."""
    _, level, taken = levels(scores)
    hits = torch.bincount(level, positive.double())
    return hits.flip(0).cumsum(0), taken.flip(0).cumsum(0)
