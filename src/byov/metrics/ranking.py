"""How well a score ranks images: AUROC and its relatives, selective prediction, and OOD detection.

Only the order of the scores counts. Equal scores form one threshold (average precision, FPR), count as half right
(AUROC), or are averaged over their random order (selective prediction).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from byov.metrics.checks import checked_scores


def auroc(scores: Tensor, positive: Tensor) -> float:
    """Compute the area under the ROC curve: the chance that a positive image scores above a negative one.

    Args:
        scores: One value per image; ties count half.
        positive: Whether each image is positive, bool.

    Returns:
        A value from 0 to 1; NaN if all images are of one kind.

    Raises:
        ValueError: If the shapes disagree, a score is NaN, or `positive` is not bool.

    Examples:
        >>> import torch
        >>> from byov import metrics
        >>> metrics.auroc(torch.tensor([0.1, 0.4, 0.35, 0.8]), torch.tensor([False, False, True, True]))
        0.75
    """
    s, positive = checked_scores(scores, positive)
    positives = int(positive.sum())
    negatives = len(s) - positives
    if positives == 0 or negatives == 0:
        return math.nan
    # Mann and Whitney's U
    above = float(midranks(s)[positive].sum()) - positives * (positives + 1) / 2
    return above / (positives * negatives)


def average_precision(scores: Tensor, positive: Tensor) -> float:
    """Compute the area under the precision-recall curve as a sum of steps.

    Linear interpolation between the points would be too optimistic (Davis and Goadrich, 2006).

    Args:
        scores: One value per image; equal scores form one threshold.
        positive: Whether each image is positive, bool.

    Returns:
        The sum of precision times recall gained over all thresholds; NaN without a positive image.

    Raises:
        ValueError: If the shapes disagree, a score is NaN, or `positive` is not bool.

    Examples:
        >>> import torch
        >>> from byov import metrics
        >>> scores, positive = torch.tensor([0.1, 0.4, 0.35, 0.8]), torch.tensor([False, False, True, True])
        >>> round(metrics.average_precision(scores, positive), 4)
        0.8333
    """
    s, positive = checked_scores(scores, positive)
    if not positive.any():
        return math.nan
    hits, taken = _taken(s, positive)
    gained = hits.diff(prepend=hits.new_zeros(1))
    return float((gained * hits / taken).sum() / hits[-1])


def fpr_at_tpr(scores: Tensor, positive: Tensor, tpr: float = 0.95) -> float:
    """Compute the false positive rate at the highest threshold that accepts `tpr` of the positive images.

    Args:
        scores: One value per image.
        positive: Whether each image is positive, bool.
        tpr: True positive rate to reach, above 0 and at most 1.

    Returns:
        The rate, from 0 to 1; NaN if all images are of one kind.

    Raises:
        ValueError: If the shapes disagree, a score is NaN, `positive` is not bool, or `tpr` is out of range.

    Examples:
        >>> import torch
        >>> from byov import metrics
        >>> metrics.fpr_at_tpr(torch.tensor([0.1, 0.4, 0.35, 0.8]), torch.tensor([False, False, True, True]))
        0.5
    """
    if not 0 < tpr <= 1:
        raise ValueError(f"tpr is {tpr}, but it must be above 0 and at most 1.")
    s, positive = checked_scores(scores, positive)
    if positive.all() or not positive.any():
        return math.nan
    hits, taken = _taken(s, positive)
    first = int((hits / hits[-1] < tpr).sum())  # thresholds that accept too few
    return float((taken - hits)[first] / (~positive).sum())


def _taken(scores: Tensor, positive: Tensor) -> tuple[Tensor, Tensor]:
    """Count, at each threshold from the highest, the positive images and all images at or above it."""
    _, level, taken = levels(scores)
    hits = torch.bincount(level, positive.double())
    return hits.flip(0).cumsum(0), taken.flip(0).cumsum(0)


def levels(values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the distinct values in rising order, the index of each image's value, and the images per value."""
    distinct, level, images = torch.unique(values, return_inverse=True, return_counts=True)
    return distinct, level, images


def midranks(values: Tensor, weights: Tensor | None = None) -> Tensor:
    """Rank values from 1; equal values share the mean of their ranks.

    With weights (..., images), how often each image counts, the ranks are (..., images), without a second sort.
    """
    weights = torch.ones(len(values), dtype=torch.float64) if weights is None else weights
    distinct, level, _ = levels(values)
    there = weights.new_zeros(*weights.shape[:-1], len(distinct)).index_add_(-1, level, weights)
    return (there.cumsum(-1) - (there - 1) / 2)[..., level]


class RiskCoverage(NamedTuple):
    """The risk-coverage curve: one point per number of images answered, from 1 to all."""

    coverage: Tensor
    """(images,): fraction of the images answered, the most certain first."""
    risk: Tensor
    """(images,): fraction of these that is wrong."""


def risk_coverage(uncertainty: Tensor, errors: Tensor) -> RiskCoverage:
    """Compute the risk-coverage curve of a classifier that declines its least certain images.

    Images of equal uncertainty are declined in random order; the result is the expectation over it.

    Args:
        uncertainty: One value per image; higher means less certain.
        errors: Whether the prediction for each image is wrong, bool.

    Returns:
        Coverage and risk for each number of images answered.

    Raises:
        ValueError: If the shapes disagree, a score is NaN, or `errors` is not bool.

    Examples:
        >>> import torch
        >>> from byov import metrics
        >>> uncertainty = torch.tensor([0.1, 0.2, 0.3, 0.9])
        >>> errors = torch.tensor([False, False, True, True])
        >>> [round(risk, 4) for risk in metrics.risk_coverage(uncertainty, errors).risk.tolist()]
        [0.0, 0.0, 0.3333, 0.5]
    """
    u, wrong = checked_scores(uncertainty, errors)
    # in expectation over the order of equals, each of them brings the mean of their errors
    _, level, images = levels(u)
    each = torch.bincount(level, wrong.double()) / images
    answered = torch.arange(1, len(u) + 1, dtype=torch.float64)
    return RiskCoverage(answered / len(u), each.repeat_interleave(images).cumsum(0) / answered)


def aurc(uncertainty: Tensor, errors: Tensor) -> float:
    """Compute the area under the risk-coverage curve (Geifman, Uziel and El-Yaniv, 2019).

    Args:
        uncertainty: One value per image; higher means less certain.
        errors: Whether the prediction for each image is wrong, bool.

    Returns:
        The mean risk over the coverages 1/n, 2/n, ..., 1; lower is better.

    Raises:
        ValueError: If the shapes disagree, a score is NaN, or `errors` is not bool.

    Examples:
        >>> import torch
        >>> from byov import metrics
        >>> uncertainty = torch.tensor([0.1, 0.2, 0.3, 0.9])
        >>> errors = torch.tensor([False, False, True, True])
        >>> round(metrics.aurc(uncertainty, errors), 4)
        0.2083
    """
    return float(risk_coverage(uncertainty, errors).risk.mean())


def excess_aurc(uncertainty: Tensor, errors: Tensor) -> float:
    """Compute the AURC above that of the best possible order, which puts all errors last.

    The best AURC is exact here; the paper uses its limit for many images.

    Args:
        uncertainty: One value per image; higher means less certain.
        errors: Whether the prediction for each image is wrong, bool.

    Returns:
        The excess: 0 if every error is less certain than every correct prediction.

    Raises:
        ValueError: If the shapes disagree, a score is NaN, or `errors` is not bool.

    Examples:
        >>> import torch
        >>> from byov import metrics
        >>> uncertainty = torch.tensor([0.1, 0.2, 0.3, 0.9])
        >>> errors = torch.tensor([False, False, True, True])
        >>> metrics.excess_aurc(uncertainty, errors)
        0.0
    """
    return aurc(uncertainty, errors) - aurc(errors.double(), errors)


def accuracy_at_coverage(uncertainty: Tensor, errors: Tensor, coverage: float) -> float:
    """Compute the accuracy on the most certain images that make up `coverage` of all.

    Args:
        uncertainty: One value per image; higher means less certain.
        errors: Whether the prediction for each image is wrong, bool.
        coverage: Fraction of images to answer, rounded up to a whole number of images.

    Returns:
        The accuracy on these images.

    Raises:
        ValueError: If the shapes disagree, a score is NaN, `errors` is not bool, or `coverage` is out of range.

    Examples:
        >>> import torch
        >>> from byov import metrics
        >>> uncertainty = torch.tensor([0.1, 0.2, 0.3, 0.9])
        >>> errors = torch.tensor([False, False, True, True])
        >>> metrics.accuracy_at_coverage(uncertainty, errors, 0.5)
        1.0
    """
    if not 0 < coverage <= 1:
        raise ValueError(f"coverage is {coverage}, but it must be above 0 and at most 1.")
    curve = risk_coverage(uncertainty, errors)
    return 1 - float(curve.risk[int((curve.coverage < coverage).sum())])


class Selective(NamedTuple):
    """How well an uncertainty finds the errors of a classifier."""

    aurc: float
    """Area under the risk-coverage curve; lower is better."""
    excess_aurc: float
    """AURC above that of the best order: 0 if every error is less certain than every correct prediction."""
    accuracy_at_80: float
    """Accuracy on the most certain 80% of the images."""
    accuracy_at_90: float
    accuracy_at_95: float
    error_auroc: float
    """The chance that an error is less certain than a correct prediction; NaN if only one kind exists."""


def selective_prediction(uncertainty: Tensor, errors: Tensor) -> Selective:
    """Compute all measures of selective prediction for one uncertainty.

    Args:
        uncertainty: One value per image; higher means less certain.
        errors: Whether the prediction for each image is wrong, bool.

    Returns:
        AURC, excess AURC, accuracy at three coverages and AUROC of the errors.

    Raises:
        ValueError: If the shapes disagree, a score is NaN, or `errors` is not bool.

    Examples:
        >>> import torch
        >>> from byov import metrics
        >>> uncertainty = torch.tensor([0.1, 0.2, 0.3, 0.9])
        >>> errors = torch.tensor([False, False, True, True])
        >>> metrics.selective_prediction(uncertainty, errors).error_auroc
        1.0
    """
    return Selective(
        aurc=aurc(uncertainty, errors),
        excess_aurc=excess_aurc(uncertainty, errors),
        accuracy_at_80=accuracy_at_coverage(uncertainty, errors, 0.80),
        accuracy_at_90=accuracy_at_coverage(uncertainty, errors, 0.90),
        accuracy_at_95=accuracy_at_coverage(uncertainty, errors, 0.95),
        error_auroc=auroc(uncertainty, errors),
    )


class Ood(NamedTuple):
    """How well an uncertainty detects out-of-distribution (OOD) images."""

    auroc: float
    """The chance that an OOD image is less certain than an in-distribution one."""
    aupr_out: float
    """Average precision with the OOD images as positives, the least certain first."""
    aupr_in: float
    """Average precision with the in-distribution images as positives, the most certain first."""
    fpr95: float
    """Fraction of OOD images accepted at the threshold that accepts 95% of the in-distribution images; lower is better.

    As in ODIN (Liang, Li and Srikant, 2018): a threshold can be set on known images, not on unknown ones. Some papers
    swap the roles, which gives other numbers.
    """


def ood_detection(inside: Tensor, outside: Tensor) -> Ood:
    """Compute all measures of OOD detection from the uncertainties of two sets of images.

    Args:
        inside: Uncertainty of the in-distribution images, shape (images,).
        outside: Uncertainty of the OOD images, shape (other images,).

    Returns:
        AUROC, both average precisions, which depend on the number of images on each side, and FPR at 95% TPR.

    Raises:
        ValueError: If a score is NaN or a set is not one-dimensional.

    Examples:
        >>> import torch
        >>> from byov import metrics
        >>> metrics.ood_detection(torch.tensor([0.1, 0.2, 0.4]), torch.tensor([0.3, 0.8, 0.9])).auroc
        0.8888888888888888
    """
    scores = torch.cat([inside.detach().cpu(), outside.detach().cpu()])
    out = torch.arange(len(scores)) >= len(inside)
    return Ood(
        auroc=auroc(scores, out),
        aupr_out=average_precision(scores, out),
        aupr_in=average_precision(-scores, ~out),
        fpr95=fpr_at_tpr(-scores, ~out, 0.95),
    )
