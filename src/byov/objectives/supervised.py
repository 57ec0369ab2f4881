"""The supervised objective: cross-entropy, for the supervised baselines."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Compute the mean negative log-likelihood of the labels."""
    return F.cross_entropy(logits.to(torch.promote_types(logits.dtype, torch.float32)), labels)
