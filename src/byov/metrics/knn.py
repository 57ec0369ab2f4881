"""The cosine-weighted kNN classifier: how well features sort images into classes, with nothing to train."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import normalize

BLOCK = 1 << 24  # similarities at a time: 64 MiB, however many images there are


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
    k = min(k, len(train_features))
    bank = normalize(train_features.detach().float(), dim=1)
    queries = normalize(test_features.detach().float(), dim=1)
    train_labels, test_labels = train_labels.to(bank.device), test_labels.to(bank.device)
    classes = int(torch.maximum(train_labels.max(), test_labels.max())) + 1
    hits = 0
    rows = max(1, BLOCK // len(bank))
    for block, truth in zip(torch.split(queries, rows), torch.split(test_labels, rows), strict=True):
        cosine, nearest = (block @ bank.T).topk(k, dim=1)
        weight = ((cosine - cosine[:, :1]) / temperature).exp()  # relative to the nearest: cannot overflow
        votes = weight.new_zeros(len(block), classes).scatter_add_(1, train_labels[nearest], weight)
        hits += int((votes.argmax(1) == truth).sum())
    return hits / len(queries)


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
        if not bool(features.isfinite().all()):
            raise ValueError(f"{name}: some features are not finite, so nothing is near to them.")
    if train_features.shape[1] != test_features.shape[1]:
        raise ValueError(
            f"features have {train_features.shape[1]} and {test_features.shape[1]} columns; they must agree."
        )
    if k < 1 or not temperature > 0:
        raise ValueError(f"k = {k} and temperature = {temperature}, but both must be above 0.")
