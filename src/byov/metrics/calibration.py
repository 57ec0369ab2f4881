"""Whether probabilities mean what they say: NLL, ECE and its kin, the reliability diagram, Brier and its parts.

Each is a pure function of probabilities (images, classes) and labels (images,); sums run in float64. Lower is better,
but for `resolution`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from byov.metrics.checks import checked
from byov.metrics.ranking import levels

LEAST = torch.finfo(torch.float32).tiny  # what a probability of 0 counts as in NLL: the same for draws, in float64


class Bin(NamedTuple):
    """One bar of a reliability diagram; an empty bin has confidence and accuracy 0."""

    images: int
    confidence: float
    accuracy: float


class BrierDecomposition(NamedTuple):
    """Brier = uncertainty - resolution + reliability - within_group, exactly."""

    uncertainty: float
    """1 - |overall mean outcome|^2: what the labels alone make hard."""
    resolution: float
    """How far the outcomes of the groups lie apart; higher is better."""
    reliability: float
    """Mean squared distance of an image's probabilities to the mean outcome of its group."""
    within_group: float
    """2 mean <p_i - ybar_k, y_i - ybar_k>: how well probabilities follow outcomes inside a group; higher is better."""
    reliability_jensen: float
    """Reliability of the groups' mean probabilities: never above `reliability` (Jensen)."""


def nll(probabilities: Tensor, labels: Tensor) -> float:
    """Mean of -log p(label). A probability of 0 counts as float32's smallest normal number: large, but finite."""
    p, y = checked(probabilities, labels)
    own = p.gather(1, y[:, None]).clamp(min=LEAST)
    return float(-own.log().mean())


def reliability_bins(probabilities: Tensor, labels: Tensor, bins: int = 15) -> list[Bin]:
    """Images in equal-width bins (low, high] of the top probability: how many, mean confidence, accuracy."""
    p, y = checked(probabilities, labels)
    confidence, predicted = p.max(1)
    where = equal_width(confidence, bins)
    count = torch.bincount(where, minlength=bins)
    share = count.clamp(min=1)
    confidences = torch.bincount(where, confidence, bins) / share
    accuracies = torch.bincount(where, (predicted == y).double(), bins) / share
    return [Bin(*row) for row in zip(count.tolist(), confidences.tolist(), accuracies.tolist(), strict=True)]


def ece(probabilities: Tensor, labels: Tensor, bins: int = 15) -> float:
    """Expected calibration error of the top label: |confidence - accuracy| of the bins, weighted by their images."""
    table = reliability_bins(probabilities, labels, bins)
    return sum(row.images * abs(row.confidence - row.accuracy) for row in table) / sum(row.images for row in table)


def adaptive_ece(probabilities: Tensor, labels: Tensor, bins: int = 15) -> float:
    """ECE of the top label in bins of as many images each (give or take one), by rank of the confidence.

    Images of equal confidence may fall to both sides of an edge: each counts with the mean accuracy of all of them,
    so that the order of the images does not matter.
    """
    _check_bins(bins)
    p, y = checked(probabilities, labels)
    confidence, predicted = p.max(1)
    values, level, images = levels(confidence)
    accuracies = torch.bincount(level, (predicted == y).double()) / images
    where = torch.arange(len(p)) * bins // len(p)
    return _gap(values.repeat_interleave(images), accuracies.repeat_interleave(images), where)


def classwise_ece(probabilities: Tensor, labels: Tensor, bins: int = 15) -> float:
    """Mean over classes of the ECE of "is it this class?" (Kull et al. 2019), in equal-width bins."""
    p, y = checked(probabilities, labels)
    gaps = [_gap(q, (y == c).double(), equal_width(q, bins)) for c, q in enumerate(p.T.contiguous())]
    return sum(gaps) / len(gaps)


def brier(probabilities: Tensor, labels: Tensor) -> float:
    """Mean over images of sum_c (p_c - y_c)^2: from 0 to 2."""
    p, y = checked(probabilities, labels)
    return float((p - one_hot(y, p.shape[1])).square().sum(1).mean())


def brier_decomposition(probabilities: Tensor, labels: Tensor) -> BrierDecomposition:
    """Brier's parts, images grouped by predicted class. The identity holds for any grouping."""
    p, labels = checked(probabilities, labels)
    y = one_hot(labels, p.shape[1]).double()
    group = p.argmax(1)
    images = torch.bincount(group, minlength=p.shape[1])
    weight = images.double() / len(p)
    share = images.clamp(min=1)[:, None]  # an empty group has weight 0: its mean does not matter
    mean_y = torch.zeros(p.shape[1], p.shape[1], dtype=p.dtype).index_add_(0, group, y) / share
    mean_p = torch.zeros_like(mean_y).index_add_(0, group, p) / share
    overall = y.mean(0)
    off_p, off_y = p - mean_y[group], y - mean_y[group]
    return BrierDecomposition(
        uncertainty=float(1 - overall.square().sum()),
        resolution=float(weight @ (mean_y - overall).square().sum(1)),
        reliability=float(off_p.square().sum(1).mean()),
        within_group=float(2 * (off_p * off_y).sum(1).mean()),
        reliability_jensen=float(weight @ (mean_p - mean_y).square().sum(1)),
    )


def equal_width(confidence: Tensor, bins: int) -> Tensor:
    """Which bin (low, high] each confidence belongs to."""
    _check_bins(bins)
    # (low, high]: a certain image (confidence 1) belongs to the last bin, not to one of its own
    edges = torch.linspace(0, 1, bins + 1, dtype=torch.float64)
    return torch.bucketize(confidence, edges[1:-1])


def _check_bins(bins: int) -> None:
    if bins < 1:
        raise ValueError(f"bins is {bins}, but at least one is needed.")


def _gap(confidence: Tensor, outcome: Tensor, where: Tensor) -> float:
    """|mean confidence - mean outcome| of the bins, weighted by their images."""
    return float(torch.bincount(where, confidence - outcome).abs().sum() / len(where))
