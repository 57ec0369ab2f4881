"""What every metric asks of its inputs, said in one sentence where it is not so."""

from __future__ import annotations

import torch
from torch import Tensor


def checked(probabilities: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """The inputs on the CPU, the probabilities as float64 (sums over many images lose digits in float32)."""
    if probabilities.ndim != 2 or not probabilities.is_floating_point():
        raise ValueError(
            f"probabilities must be a float tensor of shape (images, classes), "
            f"not {probabilities.dtype} of shape {tuple(probabilities.shape)}."
        )
    if labels.ndim != 1 or labels.dtype != torch.int64:
        raise ValueError(
            f"labels must be an int64 tensor of shape (images,), not {labels.dtype} of {tuple(labels.shape)}."
        )
    if len(labels) != len(probabilities) or len(labels) == 0:
        raise ValueError(f"{len(probabilities)} rows of probabilities do not go with {len(labels)} labels.")
    p, y = probabilities.detach().to("cpu", torch.float64), labels.detach().cpu()
    classes = p.shape[1]
    # `not all(...)`, so that a NaN is caught too
    if not bool((p >= 0).all()) or not bool(((p.sum(1) - 1).abs() <= 1e-3).all()):
        raise ValueError("every row of probabilities must be non-negative and sum to 1; apply softmax to logits first.")
    if int(y.min()) < 0 or int(y.max()) >= classes:
        raise ValueError(
            f"labels run from {int(y.min())} to {int(y.max())}, but there are only classes 0 to {classes - 1}."
        )
    return p, y
