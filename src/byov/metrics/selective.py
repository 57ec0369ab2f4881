"""Selective prediction: what a classifier that may decline its least certain images gets wrong on the rest.

A score is an uncertainty: higher means less certain. Images of equal uncertainty are declined in random order, and
what is given is the expectation over it, so that the order of the images does not matter.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from byov.metrics.checks import checked_scores
from byov.metrics.ranking import auroc, levels


class RiskCoverage(NamedTuple):
    """The risk-coverage curve, a point for each number of images answered, from 1 to all."""

    coverage: Tensor
    """(images,): the part of images answered, the surest first."""
    risk: Tensor
    """(images,): the part of these that is wrong."""


class Selective(NamedTuple):
    """How well an uncertainty finds the errors of a classifier."""

    aurc: float
    """Area under the risk-coverage curve; lower is better."""
    excess_aurc: float
    """AURC above that of the best order of the same errors: 0 where every error is less certain than every hit."""
    accuracy_at_80: float
    """Accuracy on the surest 80% of the images."""
    accuracy_at_90: float
    accuracy_at_95: float
    error_auroc: float
    """The chance that an error is less certain than a hit; NaN where there are only hits or only errors."""


def risk_coverage(uncertainty: Tensor, errors: Tensor) -> RiskCoverage:
    """The curve for one uncertainty and one bool, `wrong`, for each image."""
    u, wrong = checked_scores(uncertainty, errors)
    # in expectation over the order of equals, each of them brings the mean of their errors
    _, level, images = levels(u)
    each = torch.bincount(level, wrong.double()) / images
    answered = torch.arange(1, len(u) + 1, dtype=torch.float64)
    return RiskCoverage(answered / len(u), each.repeat_interleave(images).cumsum(0) / answered)


def aurc(uncertainty: Tensor, errors: Tensor) -> float:
    """Mean risk over the coverages 1/n, 2/n, ..., 1 (Geifman, Uziel and El-Yaniv 2019)."""
    return float(risk_coverage(uncertainty, errors).risk.mean())


def excess_aurc(uncertainty: Tensor, errors: Tensor) -> float:
    """AURC less that of the order which puts all errors last: exact, where that paper takes the limit of many."""
    return aurc(uncertainty, errors) - aurc(errors.double(), errors)


def accuracy_at_coverage(uncertainty: Tensor, errors: Tensor, coverage: float) -> float:
    """Accuracy on the smallest number of surest images that is at least `coverage` of all."""
    if not 0 < coverage <= 1:
        raise ValueError(f"coverage is {coverage}, but it must be above 0 and at most 1.")
    curve = risk_coverage(uncertainty, errors)
    return 1 - float(curve.risk[int((curve.coverage < coverage).sum())])


def selective_prediction(uncertainty: Tensor, errors: Tensor) -> Selective:
    """All of them for one uncertainty."""
    return Selective(
        aurc=aurc(uncertainty, errors),
        excess_aurc=excess_aurc(uncertainty, errors),
        accuracy_at_80=accuracy_at_coverage(uncertainty, errors, 0.80),
        accuracy_at_90=accuracy_at_coverage(uncertainty, errors, 0.90),
        accuracy_at_95=accuracy_at_coverage(uncertainty, errors, 0.95),
        error_auroc=auroc(uncertainty, errors),
    )
