"""Retrieval without training: is the nearest other image of the same class, and does the uncertainty know?

The two measures of the URL benchmark (Kirchhof et al. 2023): Recall@1, and R-AUROC, how well an uncertainty made
without these labels tells which images retrieve a wrong one.
"""

from __future__ import annotations

import torch
from torch import Tensor

from byov.metrics.checks import check_features
from byov.metrics.neighbours import nearest_other
from byov.metrics.ranking import auroc


def retrieval_hits(features: Tensor, labels: Tensor) -> Tensor:
    """(images,) bool: whether the nearest other image, by cosine, has the same label."""
    check_features(features, "features")
    if labels.dtype != torch.int64 or labels.shape != features.shape[:1] or len(labels) < 2:
        raise ValueError(
            f"{len(features)} rows of features need as many int64 labels, at least two, "
            f"not {labels.dtype} of shape {tuple(labels.shape)}."
        )
    labels = labels.detach().cpu()
    return labels[nearest_other(features).cpu()] == labels


def recall_at_1(features: Tensor, labels: Tensor) -> float:
    """The part of images whose nearest other image has the same label."""
    return float(retrieval_hits(features, labels).double().mean())


def r_auroc(uncertainty: Tensor, hits: Tensor) -> float:
    """The chance that an image which retrieves a wrong one is less certain than one which does not.

    `hits` is from `retrieval_hits`: one search serves every uncertainty. NaN where all or none are hits.
    """
    return auroc(uncertainty, hits.logical_not())
