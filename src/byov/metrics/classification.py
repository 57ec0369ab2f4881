"""Accuracy, proper scoring rules and calibration of class probabilities.

Each function takes probabilities (images, classes) and labels (images,) and sums in float64. Lower is better, except
for accuracy and `resolution`.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from byov.metrics.checks import checked, checked_labels, checked_logits
from byov.metrics.ranking import levels

LEAST = torch.finfo(torch.float32).tiny  # counted for a probability of 0 in NLL: the same in float64, for draws
COLDEST, HOTTEST = 0.01, 100.0  # reached if all held-out images are right, or the logits carry no information


def top_k_accuracy(probabilities: Tensor, labels: Tensor, k: int) -> float:
    """Compute the fraction of images whose label is among the k most probable classes.

    Equal probabilities rank by class number, as in argmax, so k = 1 is the accuracy of the argmax.

    Args:
        probabilities: Class probabilities, shape (images, classes); rows sum to one.
        labels: True classes, int64, shape (images,).
        k: Number of classes that count; with k classes or fewer in all, the result is 1.

    Returns:
        The accuracy, from 0 to 1.

    Raises:
        ValueError: If the shapes disagree, or the rows are not probabilities.

    Examples:
        >>> import torch
        >>> from byov import metrics
        >>> p = torch.tensor([[0.8, 0.2], [0.6, 0.4], [0.1, 0.9], [0.7, 0.3]])
        >>> labels = torch.tensor([0, 1, 1, 0])
        >>> metrics.top_k_accuracy(p, labels, k=1)
        0.75
    """
    return float(in_top(*checked(probabilities, labels), k).double().mean())


def in_top(p: Tensor, y: Tensor, k: int) -> Tensor:
    """Return (images,) bool: whether the label is among the k most probable classes."""
    if k < 1:
        raise ValueError(f"k is {k}, but at least the most probable class must count.")
    own = p.gather(1, y[:, None])
    ahead = (p > own) | ((p == own) & (torch.arange(p.shape[1])[None, :] < y[:, None]))
    return ahead.sum(1) < k


def nll(probabilities: Tensor, labels: Tensor) -> float:
    """Compute the mean negative log-likelihood of the labels, in nats.

    A probability of 0 counts as float32's smallest normal number: the result is large, but finite.

    Args:
        probabilities: Class probabilities, shape (images, classes); rows sum to one.
        labels: True classes, int64, shape (images,).

    Returns:
        The mean of -log p(label); lower is better.

    Raises:
        ValueError: If the shapes disagree, or the rows are not probabilities.

    Examples:
        >>> import torch
        >>> from byov import metrics
        >>> p = torch.tensor([[0.8, 0.2], [0.6, 0.4], [0.1, 0.9], [0.7, 0.3]])
        >>> labels = torch.tensor([0, 1, 1, 0])
        >>> round(metrics.nll(p, labels), 4)
        0.4004
    """
    p, y = checked(probabilities, labels)
    own = p.gather(1, y[:, None]).clamp(min=LEAST)
    return float(-own.log().mean())


def brier(probabilities: Tensor, labels: Tensor) -> float:
    """Compute the Brier score: the mean squared distance of probabilities to one-hot labels.

    Args:
        probabilities: Class probabilities, shape (images, classes); rows sum to one.
        labels: True classes, int64, shape (images,).

    Returns:
        The mean over images of sum_c (p_c - y_c)^2, from 0 to 2; lower is better.

    Raises:
        ValueError: If the shapes disagree, or the rows are not probabilities.

    Examples:
        >>> import torch
        >>> from byov import metrics
        >>> p = torch.tensor([[0.8, 0.2], [0.6, 0.4], [0.1, 0.9], [0.7, 0.3]])
        >>> labels = torch.tensor([0, 1, 1, 0])
        >>> round(metrics.brier(p, labels), 4)
        0.25
    """
    p, y = checked(probabilities, labels)
    return float((p - one_hot(y, p.shape[1])).square().sum(1).mean())


class BrierDecomposition(NamedTuple):
    """Parts of the Brier score: brier = uncertainty - resolution + reliability - within_group, exactly."""

    uncertainty: float
    """1 - |overall mean outcome|^2: the difficulty due to the labels alone."""
    resolution: float
    """Spread of the groups' mean outcomes around the overall one; higher is better."""
    reliability: float
    """Mean squared distance of an image's probabilities to the mean outcome of its group."""
    within_group: float
    """2 mean <p_i - ybar_k, y_i - ybar_k>: how well probabilities follow outcomes inside a group; higher is better."""
    reliability_jensen: float
    """Reliability of the groups' mean probabilities; never above `reliability` (Jensen)."""


def brier_decomposition(probabilities: Tensor, labels: Tensor) -> BrierDecomposition:
    """Decompose the Brier score, with images grouped by predicted class.

    The identity of `BrierDecomposition` holds for any grouping.

    Args:
        probabilities: Class probabilities, shape (images, classes); rows sum to one.
        labels: True classes, int64, shape (images,).

    Returns:
        The parts of the Brier score.

    Raises:
        ValueError: If the shapes disagree, or the rows are not probabilities.

    Examples:
        >>> import torch
        >>> from byov import metrics
        >>> p = torch.tensor([[0.8, 0.2], [0.6, 0.4], [0.1, 0.9], [0.7, 0.3]])
        >>> labels = torch.tensor([0, 1, 1, 0])
        >>> parts = metrics.brier_decomposition(p, labels)
        >>> total = parts.uncertainty - parts.resolution + parts.reliability - parts.within_group
        >>> round(total, 4) == round(metrics.brier(p, labels), 4)
        True
    """
    p, labels = checked(probabilities, labels)
    y = one_hot(labels, p.shape[1]).double()
    group = p.argmax(1)
    images = torch.bincount(group, minlength=p.shape[1])
    weight = images.double() / len(p)
    share = images.clamp(min=1)[:, None]  # an empty group has weight 0
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


class Bin(NamedTuple):
    """One bar of a reliability diagram; an empty bin has confidence and accuracy 0."""

    images: int
    confidence: float
    accuracy: float


def reliability_bins(probabilities: Tensor, labels: Tensor, bins: int = 15) -> list[Bin]:
    """Compute a reliability diagram: images in equal-width bins (low, high] of the top probability.

    Args:
        probabilities: Class probabilities, shape (images, classes); rows sum to one.
        labels: True classes, int64, shape (images,).
        bins: Number of bins.

    Returns:
        One `Bin` per bin: number of images, mean confidence, accuracy.

    Raises:
        ValueError: If the shapes disagree, or the rows are not probabilities.

    Examples:
        >>> import torch
        >>> from byov import metrics
        >>> p = torch.tensor([[0.8, 0.2], [0.6, 0.4], [0.1, 0.9], [0.7, 0.3]])
        >>> labels = torch.tensor([0, 1, 1, 0])
        >>> bins = metrics.reliability_bins(p, labels, bins=4)
        >>> [(bin.images, round(bin.confidence, 2), round(bin.accuracy, 2)) for bin in bins]
        [(0, 0.0, 0.0), (0, 0.0, 0.0), (2, 0.65, 0.5), (2, 0.85, 1.0)]
    """
    p, y = checked(probabilities, labels)
    confidence, predicted = p.max(1)
    where = equal_width(confidence, bins)
    count = torch.bincount(where, minlength=bins)
    share = count.clamp(min=1)
    confidences = torch.bincount(where, confidence, bins) / share
    accuracies = torch.bincount(where, (predicted == y).double(), bins) / share
    return [Bin(*row) for row in zip(count.tolist(), confidences.tolist(), accuracies.tolist(), strict=True)]


def ece(probabilities: Tensor, labels: Tensor, bins: int = 15) -> float:
    """Compute the expected calibration error of the top label (Guo et al., 2017).

    Args:
        probabilities: Class probabilities, shape (images, classes); rows sum to one.
        labels: True classes, int64, shape (images,).
        bins: Number of equal-width confidence bins.

    Returns:
        The mean gap between confidence and accuracy, weighted by images: from 0 (calibrated) to 1.

    Raises:
        ValueError: If the shapes disagree, or the rows are not probabilities.

    Examples:
        >>> import torch
        >>> from byov import metrics
        >>> p = torch.tensor([[0.8, 0.2], [0.6, 0.4], [0.1, 0.9], [0.7, 0.3]])
        >>> labels = torch.tensor([0, 1, 1, 0])
        >>> round(metrics.ece(p, labels), 4)
        0.3
    """
    table = reliability_bins(probabilities, labels, bins)
    return sum(row.images * abs(row.confidence - row.accuracy) for row in table) / sum(row.images for row in table)


def adaptive_ece(probabilities: Tensor, labels: Tensor, bins: int = 15) -> float:
    """Compute the ECE of the top label in bins with equal numbers of images, by rank of the confidence.

    Images of equal confidence may fall on both sides of an edge. Each then counts with the mean accuracy of all of
    them, so the order of the images does not matter.

    Args:
        probabilities: Class probabilities, shape (images, classes); rows sum to one.
        labels: True classes, int64, shape (images,).
        bins: Number of bins.

    Returns:
        The error, from 0 (calibrated) to 1.

    Raises:
        ValueError: If the shapes disagree, or the rows are not probabilities.

    Examples:
        >>> import torch
        >>> from byov import metrics
        >>> p = torch.tensor([[0.8, 0.2], [0.6, 0.4], [0.1, 0.9], [0.7, 0.3]])
        >>> labels = torch.tensor([0, 1, 1, 0])
        >>> round(metrics.adaptive_ece(p, labels, bins=2), 4)
        0.15
    """
    _check_bins(bins)
    p, y = checked(probabilities, labels)
    confidence, predicted = p.max(1)
    values, level, images = levels(confidence)
    accuracies = torch.bincount(level, (predicted == y).double()) / images
    where = torch.arange(len(p)) * bins // len(p)
    return _gap(values.repeat_interleave(images), accuracies.repeat_interleave(images), where)


def classwise_ece(probabilities: Tensor, labels: Tensor, bins: int = 15) -> float:
    """Compute the mean over classes of the ECE of "is it this class?" (Kull et al., 2019).

    Args:
        probabilities: Class probabilities, shape (images, classes); rows sum to one.
        labels: True classes, int64, shape (images,).
        bins: Number of equal-width bins.

    Returns:
        The error, from 0 (calibrated) to 1.

    Raises:
        ValueError: If the shapes disagree, or the rows are not probabilities.

    Examples:
        >>> import torch
        >>> from byov import metrics
        >>> p = torch.tensor([[0.8, 0.2], [0.6, 0.4], [0.1, 0.9], [0.7, 0.3]])
        >>> labels = torch.tensor([0, 1, 1, 0])
        >>> round(metrics.classwise_ece(p, labels, bins=2), 4)
        0.05
    """
    p, y = checked(probabilities, labels)
    gaps = [_gap(q, (y == c).double(), equal_width(q, bins)) for c, q in enumerate(p.T.contiguous())]
    return sum(gaps) / len(gaps)


def equal_width(confidence: Tensor, bins: int) -> Tensor:
    """Return the bin (low, high] of each confidence."""
    _check_bins(bins)
    # (low, high]: a certain image (confidence 1) belongs to the last bin, not to a separate one
    edges = torch.linspace(0, 1, bins + 1, dtype=torch.float64)
    return torch.bucketize(confidence, edges[1:-1])


def _check_bins(bins: int) -> None:
    if bins < 1:
        raise ValueError(f"bins is {bins}, but at least one is needed.")


def _gap(confidence: Tensor, outcome: Tensor, where: Tensor) -> float:
    """Average |mean confidence - mean outcome| over bins, weighted by their images."""
    return float(torch.bincount(where, confidence - outcome).abs().sum() / len(where))


def fit_temperature(logits: Tensor, labels: Tensor) -> float:
    """Fit the temperature of (logits / temperature).softmax(1) on held-out images (Guo et al., 2017).

    This is the baseline for calibration. It keeps the ranking of the classes, and so the accuracy. The NLL is convex in
    1 / temperature, so its slope has at most one root. Images whose label has logit -inf are left out: no temperature
    helps them.

    Args:
        logits: Held-out logits, shape (images, classes).
        labels: True classes, int64, shape (images,).

    Returns:
        The temperature with the lowest NLL, from 0.01 to 100.

    Raises:
        ValueError: If the shapes disagree, or every label has logit -inf.

    Examples:
        >>> import torch
        >>> from byov import metrics
        >>> logits = torch.tensor([[4.0, 0.0], [4.0, 0.0], [0.0, 4.0], [0.0, 4.0]])
        >>> round(metrics.fit_temperature(logits, torch.tensor([0, 0, 1, 0])), 2)  # 98% certain, 75% right
        3.64
    """
    from scipy.optimize import brentq  # here: importing scipy takes most of a second

    z = checked_logits(logits)
    own = z.gather(1, checked_labels(labels, z)[:, None])
    possible = own[:, 0] > -math.inf
    if not possible.any():
        raise ValueError("every label has logit -inf, so no temperature can be fitted; give images of known classes.")
    z = (z - own)[possible]
    finite = z.clamp(min=torch.finfo(z.dtype).min)  # 0 times -inf would be NaN

    def slope(log_temperature: float) -> float:
        """Of the NLL, in 1 / temperature: mean over images of E_p[logit] - own logit."""
        p = (z * math.exp(-log_temperature)).softmax(1)
        return float((p * finite).sum(1).mean())

    low, high = math.log(COLDEST), math.log(HOTTEST)
    if slope(low) <= 0:
        return COLDEST
    if slope(high) >= 0:
        return HOTTEST
    return math.exp(brentq(slope, low, high, xtol=1e-10))
