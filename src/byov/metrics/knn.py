"""The cosine-weighted kNN classifier: how well features sort images into classes, with nothing to train."""

from __future__ import annotations

import torch
from torch import Tensor

from byov.metrics.checks import check_features
from byov.metrics.neighbours import nearest


def knn_accuracy(
    train_features: Tensor,
    train_labels: Tensor,
    test_features: Tensor,
    test_labels: Tensor,
    k: int = 20,
    temperature: float = 0.07,
) -> float:
    """Accuracy of a vote of the k nearest training images by cosine, each with weight exp(cosine / temperature).

    Wu et al. 2018 (instance discrimination), as in DINO; k = 20 is DINO's best. With temperature = inf all weigh alike.
    """
    _check(train_features, train_labels, test_features, test_labels, k, temperature)
    cosine, neighbours = nearest(test_features, train_features, min(k, len(train_features)))
    weight = ((cosine - cosine[:, :1]) / temperature).exp()  # relative to the nearest: cannot overflow
    train_labels, test_labels = train_labels.to(weight.device), test_labels.to(weight.device)
    classes = int(torch.maximum(train_labels.max(), test_labels.max())) + 1
    votes = weight.new_zeros(len(weight), classes).scatter_add_(1, train_labels[neighbours], weight)
    return int((votes.argmax(1) == test_labels).sum()) / len(votes)


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
