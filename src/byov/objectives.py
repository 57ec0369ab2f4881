"""The training objectives: BYOL's, the same with negatives, and cross-entropy.

With negatives, a prediction is also pushed away from the teacher's other images. It is BYOL's ablation towards SimCLR
(Grill et al., 2020, "Ablation to contrastive methods"). For each direction, it adds to 2 - 2 cos(p_i, z'_i) the term
weight * 2 temperature * log mean over j != i of exp(cos(p_i, z'_j) / temperature), with p of one view and z' of the
other. Weight 0 is BYOL. Weight 1 is, up to a constant, InfoNCE with predictor and teacher, but without the positive in
the denominator and with negatives of the other view only (SimCLR has both views').
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor


def byol_loss(prediction1: Tensor, prediction2: Tensor, target1: Tensor, target2: Tensor) -> Tensor:
    """Compute the mean over the batch of (2 - 2 cos(p1, z2')) + (2 - 2 cos(p2, z1')).

    `target1` and `target2` are the teacher's projections of views 1 and 2; no gradient flows into them.
    """
    return (4 - 2 * _cosine(prediction1, target2) - 2 * _cosine(prediction2, target1)).mean()


def _cosine(prediction: Tensor, target: Tensor) -> Tensor:
    return F.cosine_similarity(_precise(prediction), _precise(target.detach()), dim=-1)


def contrastive_loss(
    prediction1: Tensor,
    prediction2: Tensor,
    target1: Tensor,
    target2: Tensor,
    weight: float = 1.0,
    temperature: float = 0.1,
) -> Tensor:
    """Compute BYOL's loss plus the repulsion from the batch's other images, both directions summed."""
    attraction = byol_loss(prediction1, prediction2, target1, target2)
    return attraction + weight * (
        repulsion(prediction1, target2, temperature) + repulsion(prediction2, target1, temperature)
    )


def repulsion(prediction: Tensor, target: Tensor, temperature: float) -> Tensor:
    """Compute the mean over i of 2 T log mean_{j != i} exp(cos(p_i, z'_j) / T), a soft maximum of the others' 2 cos."""
    if len(prediction) < 2:
        raise ValueError("a batch of one image has no negatives: give at least two.")
    p, z = (F.normalize(_precise(t), dim=-1) for t in (prediction, target.detach()))
    others = (p @ z.T / temperature).masked_fill(torch.eye(len(p), dtype=torch.bool, device=p.device), -torch.inf)
    return 2 * temperature * (others.logsumexp(1) - math.log(len(p) - 1)).mean()


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Compute the mean negative log-likelihood of the labels."""
    return F.cross_entropy(_precise(logits), labels)


def _precise(values: Tensor) -> Tensor:
    """Convert lower precision, such as bfloat16, to float32."""
    return values.to(torch.promote_types(values.dtype, torch.float32))
