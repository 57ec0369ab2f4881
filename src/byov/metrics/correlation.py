"""How two scores of the same images go together: Pearson, Spearman, both given a third, and bootstrap intervals.

Each takes variables (images,) and, on request, weights (..., images): how often each image counts. A bootstrap
resample is such a row of counts, so that thousands of them are one vectorised call and nothing is sorted again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from byov.metrics.ranking import midranks
from byov.metrics.resampling import resampled_counts

ROUNDING = 1e-12  # a spread that is this small a part of a variable is rounding, and its correlation means nothing


class Estimate(NamedTuple):
    """A value with the ends of its confidence interval."""

    value: float
    low: float
    high: float


def pearson(x: Tensor, y: Tensor, weights: Tensor | None = None) -> Tensor:
    """Linear correlation; NaN where a variable is constant."""
    (x, y), w = _checked((x, y), weights)
    return _cosine(_centred(x, w), _centred(y, w), w)


def spearman(x: Tensor, y: Tensor, weights: Tensor | None = None) -> Tensor:
    """Pearson's correlation of the ranks; equal values share a rank."""
    (x, y), w = _checked((x, y), weights)
    return _cosine(_centred(midranks(x, w), w), _centred(midranks(y, w), w), w)


def partial_pearson(x: Tensor, y: Tensor, given: Tensor, weights: Tensor | None = None) -> Tensor:
    """Correlation of what is left of x and y when the best linear function of `given` is taken from each."""
    (x, y, given), w = _checked((x, y, given), weights)
    return _partial(x, y, given, w)


def partial_spearman(x: Tensor, y: Tensor, given: Tensor, weights: Tensor | None = None) -> Tensor:
    """Partial correlation of the ranks of all three."""
    (x, y, given), w = _checked((x, y, given), weights)
    return _partial(midranks(x, w), midranks(y, w), midranks(given, w), w)


def bootstrap(
    statistic: Callable[..., Tensor], *variables: Tensor, resamples: int = 2000, level: float = 0.95, seed: int = 0
) -> Estimate:
    """A statistic of this file with its percentile interval: images are drawn anew, with replacement.

    A resample in which the statistic is undefined (few images, all equal) is left out.
    """
    if resamples < 1 or not 0 < level < 1:
        raise ValueError(f"resamples = {resamples} and level = {level}: at least 1, and between 0 and 1, are needed.")
    value = float(statistic(*variables))
    found = [statistic(*variables, weights=counts) for counts in resampled_counts(len(variables[0]), resamples, seed)]
    ends = torch.tensor([(1 - level) / 2, (1 + level) / 2], dtype=torch.float64)
    low, high = torch.cat(found).nanquantile(ends).tolist()
    return Estimate(value, low, high)


def _checked(variables: tuple[Tensor, ...], weights: Tensor | None) -> tuple[tuple[Tensor, ...], Tensor]:
    """All of it as float64 on the CPU."""
    shapes = [tuple(v.shape) for v in variables]
    if variables[0].ndim != 1 or len(set(shapes)) > 1 or len(variables[0]) < 2:
        raise ValueError(f"variables must be of one shape (images,), at least two images, not {shapes}.")
    if not all(bool(v.isfinite().all()) for v in variables):
        raise ValueError("some values are not finite, so no correlation can be had; leave those images out.")
    weights = torch.ones(len(variables[0])) if weights is None else weights
    return tuple(v.detach().to("cpu", torch.float64) for v in variables), weights.to("cpu", torch.float64)


def _partial(x: Tensor, y: Tensor, given: Tensor, w: Tensor) -> Tensor:
    x, y, given = (_centred(v, w) for v in (x, y, given))
    return _cosine(_without(x, given, w), _without(y, given, w), w)


def _centred(x: Tensor, w: Tensor) -> Tensor:
    """x less its mean; exactly 0 where only rounding is left."""
    return _unless_rounding(x - ((w * x).sum(-1) / w.sum(-1))[..., None], x, w)


def _without(x: Tensor, given: Tensor, w: Tensor) -> Tensor:
    """What is left of x beside its best multiple of `given`, both centred; a constant `given` explains nothing."""
    slope = (w * x * given).sum(-1) / (w * given.square()).sum(-1)
    return _unless_rounding(x - slope.nan_to_num(0)[..., None] * given, x, w)


def _unless_rounding(rest: Tensor, whole: Tensor, w: Tensor) -> Tensor:
    left, before = ((w * v.square()).sum(-1, keepdim=True) for v in (rest, whole))
    return torch.where(left > ROUNDING**2 * before, rest, 0)


def _cosine(x: Tensor, y: Tensor, w: Tensor) -> Tensor:
    """NaN (0 / 0) where one is 0."""
    norms = ((w * x.square()).sum(-1) * (w * y.square()).sum(-1)).sqrt()
    return ((w * x * y).sum(-1) / norms).clamp(-1, 1)
