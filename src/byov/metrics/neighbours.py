"""The nearest images by cosine, in blocks: memory is bounded, however many images there are."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.functional import normalize

BLOCK = 1 << 24  # similarities at a time: 64 MiB


def nearest(features: Tensor, bank: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Cosine and index (images, k) of the k images of the bank nearest to each, the nearest first."""
    found = [similarity.topk(k, dim=1) for similarity in _similarities(features, bank)]
    return torch.cat([values for values, _ in found]), torch.cat([indices for _, indices in found])


def nearest_other(features: Tensor) -> Tensor:
    """Index (images,) of the image nearest to each, itself left out."""
    found = []
    start = 0
    for similarity in _similarities(features, features):
        similarity.diagonal(start).fill_(-torch.inf)
        found.append(similarity.argmax(1))
        start += len(similarity)
    return torch.cat(found)


def _similarities(features: Tensor, bank: Tensor) -> Iterator[Tensor]:
    """Cosines (rows, bank), some rows at a time."""
    bank = normalize(bank.detach().float(), dim=1)
    queries = normalize(features.detach().to(bank.device).float(), dim=1)
    for block in torch.split(queries, max(1, BLOCK // len(bank))):
        yield block @ bank.T
