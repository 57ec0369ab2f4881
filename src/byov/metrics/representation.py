"""How good features are without training: nearest neighbours by cosine, kNN accuracy, retrieval.

`recall_at_1` and `r_auroc` are the two measures of the URL benchmark (Kirchhof et al., 2023).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.functional import normalize

from byov.metrics.checks import check_features
from byov.metrics.ranking import auroc

BLOCK = 1 << 24  # similarities at a time: 64 MiB


def knn_accuracy(
    train_features: Tensor,
    train_labels: Tensor,
    test_features: Tensor,
    test_labels: Tensor,
    k: int = 20,
    temperature: float = 0.07,
) -> float:
    """Compute the accuracy of a weighted vote of the k nearest training images by cosine.

    A neighbour's weight is exp(cosine / temperature) (Wu et al., 2018; DINO, whose best k is 20). With
    temperature = inf all weigh alike.

    Args:
        train_features: Features of the training images, shape (train images, width).
        train_labels: Their classes, int64.
        test_features: Features of the test images, shape (test images, width).
        test_labels: Their classes, int64.
        k: Number of neighbours; all, if there are fewer training images.
        temperature: Temperature of the weights.

    Returns:
        The accuracy on the test images.

    Raises:
        ValueError: If the shapes disagree, or a feature is not finite.

    Examples:
        >>> import torch
        >>> from byov import metrics
        >>> train, labels = torch.tensor([[1.0, 0.0], [0.9, 0.1], [0.0, 1.0]]), torch.tensor([0, 0, 1])
        >>> metrics.knn_accuracy(train, labels, torch.tensor([[1.0, 0.2], [0.1, 2.0]]), torch.tensor([0, 1]), k=1)
        1.0
    """
    _check(train_features, train_labels, test_features, test_labels, k, temperature)
    cosine, neighbours = nearest(test_features, train_features, min(k, len(train_features)))
    weight = ((cosine - cosine[:, :1]) / temperature).exp()  # relative to the nearest: cannot overflow
    train_labels, test_labels = train_labels.to(weight.device), test_labels.to(weight.device)
    classes, place = torch.unique(train_labels, return_inverse=True)  # class numbers may have gaps
    votes = weight.new_zeros(len(weight), len(classes)).scatter_add_(1, place[neighbours], weight)
    return int((classes[votes.argmax(1)] == test_labels).sum()) / len(votes)


def retrieval_hits(features: Tensor, labels: Tensor) -> Tensor:
    """Find out for each image whether its nearest other image, by cosine, has the same label.

    Args:
        features: Features, shape (images, width).
        labels: Classes, int64, shape (images,).

    Returns:
        A bool tensor of shape (images,).

    Raises:
        ValueError: If the shapes disagree, there are fewer than two images, or a feature is not finite.

    Examples:
        >>> import torch
        >>> from byov import metrics
        >>> features = torch.tensor([[1.0, 0.0], [0.9, 0.1], [0.0, 1.0]])
        >>> metrics.retrieval_hits(features, torch.tensor([0, 0, 1])).tolist()
        [True, True, False]
    """
    check_features(features, "features")
    if labels.dtype != torch.int64 or labels.shape != features.shape[:1] or len(labels) < 2:
        raise ValueError(
            f"{len(features)} rows of features need as many int64 labels, at least two, "
            f"not {labels.dtype} of shape {tuple(labels.shape)}."
        )
    labels = labels.detach().cpu()
    return labels[nearest_other(features).cpu()] == labels


def recall_at_1(features: Tensor, labels: Tensor) -> float:
    """Compute the fraction of images whose nearest other image has the same label.

    Args:
        features: Features, shape (images, width).
        labels: Classes, int64, shape (images,).

    Returns:
        Recall@1, from 0 to 1.

    Raises:
        ValueError: If the shapes disagree, there are fewer than two images, or a feature is not finite.

    Examples:
        >>> import torch
        >>> from byov import metrics
        >>> features = torch.tensor([[1.0, 0.0], [0.9, 0.1], [0.0, 1.0], [0.1, 0.9]])
        >>> metrics.recall_at_1(features, torch.tensor([0, 0, 1, 1]))
        1.0
    """
    return float(retrieval_hits(features, labels).double().mean())


def r_auroc(uncertainty: Tensor, hits: Tensor) -> float:
    """Compute the chance that an image with a wrong nearest neighbour is less certain than one with a right one.

    Args:
        uncertainty: One value per image; higher means less certain.
        hits: The result of `retrieval_hits`; one search serves every uncertainty.

    Returns:
        R-AUROC, from 0 to 1; NaN if all or none are hits.

    Raises:
        ValueError: If the shapes disagree, or a value is NaN.

    Examples:
        >>> import torch
        >>> from byov import metrics
        >>> metrics.r_auroc(torch.tensor([0.1, 0.2, 0.9]), torch.tensor([True, True, False]))
        1.0
    """
    return auroc(uncertainty, hits.logical_not())


def nearest(features: Tensor, reference: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return cosine and index (images, k) of the k reference images nearest to each image, the nearest first."""
    found = [similarity.topk(k, dim=1) for similarity in _similarities(features, reference)]
    return torch.cat([values for values, _ in found]), torch.cat([indices for _, indices in found])


def nearest_other(features: Tensor) -> Tensor:
    """Return the index (images,) of the image nearest to each, itself excluded."""
    found = []
    start = 0
    for similarity in _similarities(features, features):
        similarity.diagonal(start).fill_(-torch.inf)
        found.append(similarity.argmax(1))
        start += len(similarity)
    return torch.cat(found)


def _similarities(features: Tensor, reference: Tensor) -> Iterator[Tensor]:
    """Yield cosines (rows, reference), some rows at a time: memory is bounded for any number of images."""
    reference = normalize(reference.detach().float(), dim=1)
    queries = normalize(features.detach().to(reference.device).float(), dim=1)
    for block in torch.split(queries, max(1, BLOCK // len(reference))):
        yield block @ reference.T


def _check(
    train_features: Tensor, train_labels: Tensor, test_features: Tensor, test_labels: Tensor, k: int, temperature: float
) -> None:
    for name, features, labels in (("train", train_features, train_labels), ("test", test_features, test_labels)):
        if features.ndim != 2 or labels.ndim != 1 or len(features) != len(labels) or len(labels) == 0:
            raise ValueError(
                f"{name}: features (images, width) and labels (images,) are needed, "
                f"not {tuple(features.shape)} and {tuple(labels.shape)}."
            )
        if labels.dtype != torch.int64 or int(labels.min()) < 0:
            raise ValueError(f"{name}: labels must be int64 and not negative.")
        check_features(features, name)
    if train_features.shape[1] != test_features.shape[1]:
        raise ValueError(
            f"features have {train_features.shape[1]} and {test_features.shape[1]} columns; they must agree."
        )
    if k < 1 or not temperature > 0:
        raise ValueError(f"k = {k} and temperature = {temperature}, but both must be above 0.")
