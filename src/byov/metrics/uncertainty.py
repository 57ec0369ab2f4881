"""Per-image uncertainty without weight draws: the baselines for the posterior's. Higher means less certain.

Three are functions of a classifier's output; two compare features with a reference set of training images.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.special import entr

from byov.metrics.checks import check_features, checked_logits, checked_probabilities
from byov.metrics.ranking import levels
from byov.metrics.representation import nearest


def max_softmax(probabilities: Tensor) -> Tensor:
    """Compute 1 - the top probability (Hendrycks and Gimpel, 2017).

    Args:
        probabilities: Class probabilities, shape (images, classes).

    Returns:
        The uncertainty, shape (images,).

    Raises:
        ValueError: If the rows are not probabilities.

    Examples:
        >>> import torch
        >>> from byov import metrics
        >>> metrics.max_softmax(torch.tensor([[0.75, 0.25], [0.5, 0.5]])).tolist()
        [0.25, 0.5]
    """
    return 1 - checked_probabilities(probabilities).amax(1)


def entropy(probabilities: Tensor) -> Tensor:
    """Compute the entropy of class probabilities, in nats.

    Args:
        probabilities: Class probabilities, shape (images, classes).

    Returns:
        The uncertainty, shape (images,).

    Raises:
        ValueError: If the rows are not probabilities.

    Examples:
        >>> import torch
        >>> from byov import metrics
        >>> [round(value, 4) for value in metrics.entropy(torch.tensor([[1.0, 0.0], [0.5, 0.5]])).tolist()]
        [0.0, 0.6931]
    """
    nats: Tensor = entr(checked_probabilities(probabilities))
    return nats.sum(1)


def energy(logits: Tensor) -> Tensor:
    """Compute -logsumexp of the logits (Liu et al., 2020, at temperature 1).

    Args:
        logits: Logits, shape (images, classes).

    Returns:
        The uncertainty, shape (images,).

    Raises:
        ValueError: If a logit is neither finite nor -inf.

    Examples:
        >>> import torch
        >>> from byov import metrics
        >>> [round(value, 4) for value in metrics.energy(torch.tensor([[9.0, 0.0], [0.0, 0.0]])).tolist()]
        [-9.0001, -0.6931]
    """
    return -checked_logits(logits).logsumexp(1)


def knn_distance(features: Tensor, reference: Tensor, k: int = 10) -> Tensor:
    """Compute the mean cosine distance to the k nearest images of a reference set.

    By cosine, because Sun et al. (2022) found that unit vectors are what makes the distance work.

    Args:
        features: Features, shape (images, width).
        reference: Features of known images, shape (reference images, width).
        k: Number of neighbours; all, if the reference set has fewer images.

    Returns:
        The uncertainty, shape (images,), from 0 to 2.

    Raises:
        ValueError: If the shapes disagree, or a feature is not finite.

    Examples:
        >>> import torch
        >>> from byov import metrics
        >>> metrics.knn_distance(torch.tensor([[2.0, 0.0], [0.0, 1.0]]), torch.tensor([[1.0, 0.0]])).tolist()
        [0.0, 1.0]
    """
    _check_widths(features, reference)
    if k < 1:
        raise ValueError(f"k is {k}, but at least the nearest image must count.")
    cosine, _ = nearest(features, reference, min(k, len(reference)))
    return 1 - cosine.double().mean(1).cpu()


def mahalanobis(features: Tensor, reference: Tensor, labels: Tensor | None = None) -> Tensor:
    """Compute the distance to the nearest class mean of a reference set, in units of the spread within classes.

    The classes share one covariance (Lee et al., 2018), shrunk as in Ledoit and Wolf (2004), so the reference set may
    have fewer images than features.

    Args:
        features: Features, shape (images, width).
        reference: Features of known images, shape (reference images, width).
        labels: Classes of the reference images, int64; unset: one class.

    Returns:
        The uncertainty, shape (images,).

    Raises:
        ValueError: If the shapes disagree, or a feature is not finite.

    Examples:
        >>> import torch
        >>> from byov import metrics
        >>> reference = torch.randn(100, 4, generator=torch.Generator().manual_seed(0))
        >>> near, far = metrics.mahalanobis(torch.tensor([[0.0] * 4, [9.0] * 4]), reference).tolist()
        >>> near < far
        True
    """
    from sklearn.covariance import ledoit_wolf  # here: importing scikit-learn takes a second

    _check_widths(features, reference)
    if labels is not None and (labels.dtype != torch.int64 or labels.shape != reference.shape[:1]):
        raise ValueError(
            f"{len(reference)} reference images need as many int64 labels, not {labels.dtype} of {tuple(labels.shape)}."
        )
    x, known = (f.detach().to("cpu", torch.float64) for f in (features, reference))
    group = torch.zeros(len(known), dtype=torch.int64) if labels is None else labels.detach().cpu()
    _, group, images = levels(group)
    means = torch.zeros(len(images), known.shape[1], dtype=known.dtype).index_add_(0, group, known) / images[:, None]
    covariance = torch.from_numpy(ledoit_wolf((known - means[group]).numpy())[0])
    if not covariance.any():  # a collapsed reference set: no unit to measure in
        covariance = torch.eye(len(covariance), dtype=covariance.dtype)
    whiten = torch.linalg.cholesky(covariance.inverse())
    return torch.cdist(x @ whiten, means @ whiten).amin(1)


def _check_widths(features: Tensor, reference: Tensor) -> None:
    check_features(features, "features")
    check_features(reference, "reference")
    if features.shape[1] != reference.shape[1]:
        raise ValueError(
            f"features have {features.shape[1]} columns and the reference set {reference.shape[1]}; they must agree."
        )
