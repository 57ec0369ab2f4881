"""The uncertainties that need no weight draws: what the posterior's has to beat. Higher means less certain.

Three are of a classifier's output, two of features against a bank of training images.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.special import entr

from byov.metrics.checks import check_features, checked_logits, checked_probabilities
from byov.metrics.neighbours import nearest
from byov.metrics.ranking import levels


def max_softmax(probabilities: Tensor) -> Tensor:
    """(images,): 1 - the top probability (Hendrycks and Gimpel 2017)."""
    return 1 - checked_probabilities(probabilities).amax(1)


def entropy(probabilities: Tensor) -> Tensor:
    """(images,): entropy of the class probabilities, in nats."""
    nats: Tensor = entr(checked_probabilities(probabilities))
    return nats.sum(1)


def energy(logits: Tensor) -> Tensor:
    """(images,): -logsumexp of the logits (Liu et al. 2020, at temperature 1)."""
    return -checked_logits(logits).logsumexp(1)


def knn_distance(features: Tensor, bank: Tensor, k: int = 10) -> Tensor:
    """(images,): mean cosine distance to the k nearest images of the bank (all, where it has fewer).

    By cosine, because Sun et al. 2022 found unit vectors to be what makes the distance work.
    """
    _check_bank(features, bank)
    if k < 1:
        raise ValueError(f"k is {k}, but at least the nearest image must count.")
    cosine, _ = nearest(features, bank, min(k, len(bank)))
    return 1 - cosine.double().mean(1).cpu()


def mahalanobis(features: Tensor, bank: Tensor, labels: Tensor | None = None) -> Tensor:
    """(images,): distance to the nearest class mean of the bank, in units of the spread within classes.

    Lee et al. 2018. Without labels the bank is one class. The classes share one covariance, shrunk as Ledoit and Wolf
    2004 do, so that a bank of fewer images than features will do.
    """
    from sklearn.covariance import ledoit_wolf  # here: importing scikit-learn takes a second

    _check_bank(features, bank)
    if labels is not None and (labels.dtype != torch.int64 or labels.shape != bank.shape[:1]):
        raise ValueError(
            f"a bank of {len(bank)} images needs as many int64 labels, not {labels.dtype} of {tuple(labels.shape)}."
        )
    x, known = (f.detach().to("cpu", torch.float64) for f in (features, bank))
    group = torch.zeros(len(known), dtype=torch.int64) if labels is None else labels.detach().cpu()
    _, group, images = levels(group)
    means = torch.zeros(len(images), known.shape[1], dtype=known.dtype).index_add_(0, group, known) / images[:, None]
    covariance = torch.from_numpy(ledoit_wolf((known - means[group]).numpy())[0])
    if not covariance.any():  # a collapsed bank: no unit to measure in
        covariance = torch.eye(len(covariance), dtype=covariance.dtype)
    whiten = torch.linalg.cholesky(covariance.inverse())
    return torch.cdist(x @ whiten, means @ whiten).amin(1)


def _check_bank(features: Tensor, bank: Tensor) -> None:
    check_features(features, "features")
    check_features(bank, "bank")
    if features.shape[1] != bank.shape[1]:
        raise ValueError(f"features have {features.shape[1]} columns and the bank {bank.shape[1]}; they must agree.")
