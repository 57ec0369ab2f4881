"""Pruned weights: mean 0, no noise, no gradient, not in the KL.

A mask is a bool tensor by a parameter's name, True where the weight is kept. At the log-variance PRUNED a sigma,
exp(log_variance / 2), is exactly 0 in float32 and float64, so every draw is exactly 0 there. Gradients are stopped by
hooks on the parameters. So neither the draw nor the step, the hot path, needs to know about masks.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from byov.posterior.priors import Gaussian
from byov.training.learners import Learner

PRUNED = -2000.0  # exp(-1000) is 0; a log-variance of -inf would turn its gradients into NaNs


def pruned(tensors: Mapping[str, Tensor], masks: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Prune a checkpoint's tensors, in the student and in the teacher, which is its average.

    The optimizer's moments are dropped, since they belong to the weights before; it starts again.
    """
    kept = {name: value for name, value in tensors.items() if not name.startswith(("optimizer.", "mask."))}
    for name, mask in masks.items():
        for place in ("student.mean.", "student.other.", "teacher.mean.", "teacher.variance.", "teacher.other."):
            if place + name in kept:
                kept[place + name] = kept[place + name] * mask
        sigma = f"student.log_variance.{name}"
        if sigma in kept:
            kept[sigma] = kept[sigma].masked_fill(~mask, PRUNED)
    return kept | {f"mask.{name}": mask for name, mask in masks.items()}


def hold_pruned(learner: Learner, masks: Mapping[str, Tensor]) -> None:
    """Keep weights pruned while training; their means are 0 and their log-variances PRUNED already."""
    if not masks:
        return
    posterior = learner.posterior
    device = posterior.means.device
    learner.masks = {name: mask.to(device) for name, mask in masks.items()}
    flat = torch.ones_like(posterior.means, dtype=torch.bool, requires_grad=False)
    for name, view in posterior.segments.named(flat).items():
        if name in masks:
            view.copy_(masks[name])
    _silence(posterior.means, flat)
    for name, parameter in posterior.module.named_parameters():
        if name in masks:
            _silence(parameter, learner.masks[name])
    if isinstance(learner.prior, Gaussian):
        learner.prior.kept = flat.nonzero()[:, 0]


def _silence(parameter: nn.Parameter, mask: Tensor) -> None:
    """Set the gradient to 0 where the mask is off: neither AdamW, with moments of 0, nor LARS moves the weight."""
    parameter.register_hook(lambda gradient: gradient * mask)  # type: ignore[no-untyped-call]
