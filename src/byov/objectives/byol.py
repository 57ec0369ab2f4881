"""BYOL's objective: align the student's prediction of one view with the teacher's projection of the other."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def loss(prediction1: Tensor, prediction2: Tensor, target1: Tensor, target2: Tensor) -> Tensor:
    """Compute the mean over the batch of (2 - 2 cos(p1, z2')) + (2 - 2 cos(p2, z1')).

    `target1` and `target2` are the teacher's projections of views 1 and 2; no gradient flows into them.
    """
    return (4 - 2 * _cosine(prediction1, target2) - 2 * _cosine(prediction2, target1)).mean()


def _cosine(prediction: Tensor, target: Tensor) -> Tensor:
    precise = torch.promote_types(prediction.dtype, torch.float32)  # also under bfloat16
    return F.cosine_similarity(prediction.to(precise), target.detach().to(precise), dim=-1)
