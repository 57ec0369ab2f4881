"""AdamW over a posterior: the means, the log-variances at a learning rate of their own, and what is not random."""

from __future__ import annotations

import torch
from torch import nn

from byov import schedules
from byov.config import Optim
from byov.posterior import Posterior
from byov.segments import kind_of


def build_optimizer(posterior: Posterior, config: Optim) -> torch.optim.AdamW:
    """AdamW with three groups, told apart by their key `role`."""
    decayed: list[nn.Parameter] = []
    plain: list[nn.Parameter] = []
    for owner in posterior.module.modules():
        for name, parameter in owner.named_parameters(recurse=False):
            if parameter.requires_grad:
                (decayed if kind_of(owner, name) == "weight" else plain).append(parameter)
    random = posterior.segments.numel > 0
    groups = [
        {"role": "mean", "params": [*([posterior.means] if random else []), *plain], "weight_decay": 0.0},
        {"role": "mean", "params": decayed, "weight_decay": config.weight_decay or 0.0},
        {"role": "log_variance", "params": [posterior.log_variances] if random else [], "weight_decay": 0.0},
    ]
    fused = posterior.means.device.type in ("cpu", "cuda")
    return torch.optim.AdamW([g for g in groups if g["params"]], lr=0.0, betas=config.betas, fused=fused)


def set_learning_rates(optimizer: torch.optim.Optimizer, config: Optim, progress: float) -> tuple[float, float]:
    """Puts the schedule's learning rates in; returns those of means and log-variances."""
    rates = {
        "mean": schedules.learning_rate(progress, config.lr, config.warmup),
        "log_variance": schedules.learning_rate(progress, config.log_variance_lr, config.warmup),
    }
    for group in optimizer.param_groups:
        group["lr"] = rates[group["role"]]
    return rates["mean"], rates["log_variance"]


@torch.no_grad()
def decay_means(posterior: Posterior, amount: float) -> None:
    """Decoupled weight decay on random weight matrices: off in the recipes (the KL does that work), for study."""
    if amount and len(posterior.segments):
        views = posterior.segments.views(posterior.means.detach())
        weights = [v for s, v in zip(posterior.segments, views, strict=True) if s.kind == "weight"]
        torch._foreach_mul_(weights, 1 - amount)


def clip_gradients(posterior: Posterior, largest: float | None) -> float:
    """Clips the gradient of means and non-random parameters to a norm; returns the norm before.

    A norm that is not finite is returned with the gradients left alone, so that their first NaN can be found.
    """
    own = [p for p in (posterior.means, *posterior.module.parameters()) if p.grad is not None]
    norm = nn.utils.get_total_norm([p.grad for p in own if p.grad is not None])
    if largest is not None and bool(norm.isfinite()):
        nn.utils.clip_grads_with_norm_(own, largest, norm)
    return float(norm)
