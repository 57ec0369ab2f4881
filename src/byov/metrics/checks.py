"""Check the inputs of metrics, with one sentence about what is wrong.

Checked tensors are returned on the CPU in float64: sums over many images lose digits in float32.
"""

from __future__ import annotations

import torch
from torch import Tensor


def checked(probabilities: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Check probabilities (images, classes) and labels (images,) together."""
    p = checked_probabilities(probabilities)
    return p, checked_labels(labels, p)


def checked_probabilities(probabilities: Tensor) -> Tensor:
    """Check probabilities (images, classes)."""
    p = _checked_rows(probabilities, "probabilities")
    # `not all(...)`: catches NaN too
    if not bool((p >= 0).all()) or not bool(((p.sum(1) - 1).abs() <= 1e-3).all()):
        raise ValueError("every row of probabilities must be non-negative and sum to 1; apply softmax to logits first.")
    return p


def checked_logits(logits: Tensor) -> Tensor:
    """Check logits (images, classes); -inf marks an impossible class, as in the probe."""
    z = _checked_rows(logits, "logits")
    if not bool((z < torch.inf).all()) or not bool((z > -torch.inf).any(1).all()):
        raise ValueError("logits must be finite, or -inf for an impossible class; some are not.")
    return z


def checked_labels(labels: Tensor, rows: Tensor) -> Tensor:
    """Check labels (images,) against rows (images, classes)."""
    if labels.ndim != 1 or labels.dtype != torch.int64:
        raise ValueError(
            f"labels must be an int64 tensor of shape (images,), not {labels.dtype} of {tuple(labels.shape)}."
        )
    images, classes = rows.shape
    if len(labels) != images or images == 0:
        raise ValueError(f"{images} rows of {classes} classes do not match {len(labels)} labels.")
    y = labels.detach().cpu()
    if int(y.min()) < 0 or int(y.max()) >= classes:
        raise ValueError(
            f"labels run from {int(y.min())} to {int(y.max())}, but there are only classes 0 to {classes - 1}."
        )
    return y


def checked_scores(scores: Tensor, flags: Tensor) -> tuple[Tensor, Tensor]:
    """Check one score and one flag per image; a score may be infinite, since only its rank counts."""
    if scores.ndim != 1 or not scores.is_floating_point() or bool(scores.isnan().any()):
        raise ValueError(
            f"scores must be a float tensor of shape (images,) without NaN, "
            f"not {scores.dtype} of shape {tuple(scores.shape)}{' with NaN' if bool(scores.isnan().any()) else ''}."
        )
    if flags.dtype != torch.bool or flags.shape != scores.shape or len(scores) == 0:
        raise ValueError(
            f"{len(scores)} scores need as many flags, at least one, of dtype bool: "
            f"not {flags.dtype} of shape {tuple(flags.shape)}."
        )
    return scores.detach().to("cpu", torch.float64), flags.detach().cpu()


def check_features(features: Tensor, name: str) -> None:
    """Check features (images, width) to compute distances from; device and dtype stay as they are."""
    if features.ndim != 2 or not features.is_floating_point() or len(features) == 0:
        raise ValueError(
            f"{name} must be a float tensor of shape (images, width) with at least one image, "
            f"not {features.dtype} of shape {tuple(features.shape)}."
        )
    if not bool(features.isfinite().all()):
        raise ValueError(f"{name}: some features are not finite, so they have no neighbours.")


def _checked_rows(values: Tensor, name: str) -> Tensor:
    if values.ndim != 2 or not values.is_floating_point():
        raise ValueError(
            f"{name} must be a float tensor of shape (images, classes), "
            f"not {values.dtype} of shape {tuple(values.shape)}."
        )
    return values.detach().to("cpu", torch.float64)
