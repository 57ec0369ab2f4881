"""LARS (You et al., 2017), as in DeepMind's BYOL: each weight matrix moves in proportion to its norm."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from byov.config import Optim
from byov.posterior import Posterior
from byov.posterior.segments import kind_of


class Part(NamedTuple):
    """One tensor with its own norm: a parameter, or a segment of the flat means."""

    weight: Tensor
    gradient: Tensor
    velocity: Tensor
    kind: str


class Lars(torch.optim.Optimizer):
    """LARS for means and for what is not random; AdamW for log-variances.

        g <- g + weight_decay * w;   g <- g * trust * |w| / |g|;   v <- momentum * v + g;   w <- w - lr * v

    The first two apply to weight matrices only: biases, norms, positions and the like have plain momentum. If |w| or
    |g| is 0, g stays as it is. The norm of log-variances does not say how far they should move: they use AdamW.
    """

    def __init__(self, posterior: Posterior, config: Optim) -> None:
        self.config = config
        self.means, self.segments = posterior.means, posterior.segments
        self.kinds: dict[Tensor, str] = {}  # of what is not random
        for owner in posterior.module.modules():
            for name, parameter in owner.named_parameters(recurse=False):
                if parameter.requires_grad:
                    self.kinds.setdefault(parameter, kind_of(owner, name))
        random = posterior.segments.numel > 0
        groups: list[dict[str, Any]] = [{"role": "mean", "params": [*([self.means] if random else []), *self.kinds]}]
        if random and config.variances == "adam":
            fused = self.means.device.type in ("cpu", "cuda")
            groups.append({"role": "log_variance", "params": [posterior.log_variances], "fused": fused})
        super().__init__(groups, {"lr": 0.0})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            if group["role"] == "mean":
                self._lars(parameters, group["lr"])
            else:
                self._adamw(parameters, group["lr"], group["fused"])

    def _lars(self, parameters: list[Tensor], lr: float) -> None:
        for p in parameters:
            if not self.state[p]:
                self.state[p]["momentum"] = torch.zeros_like(p)
        velocities = [self.state[p]["momentum"] for p in parameters]
        torch._foreach_mul_(velocities, self.config.momentum)
        parts = [part for p in parameters for part in self._parts(p)]
        matrices = [part for part in parts if part.kind == "weight"]
        others = [part for part in parts if part.kind != "weight"]
        if matrices:
            torch._foreach_add_([part.velocity for part in matrices], self._adapted(matrices))
        if others:
            torch._foreach_add_([part.velocity for part in others], [part.gradient for part in others])
        torch._foreach_add_(parameters, velocities, alpha=-lr)

    def _parts(self, parameter: Tensor) -> list[Part]:
        assert parameter.grad is not None
        tensors = (parameter.detach(), parameter.grad, self.state[parameter]["momentum"])
        if parameter is not self.means:
            return [Part(*tensors, self.kinds[parameter])]
        weights, gradients, velocities = (self.segments.views(flat) for flat in tensors)
        kinds = [segment.kind for segment in self.segments]
        return [Part(*row) for row in zip(weights, gradients, velocities, kinds, strict=True)]

    def _adapted(self, matrices: list[Part]) -> list[Tensor]:
        """Return gradients with weight decay, each scaled to `trust` times its weight's norm; all norms at once."""
        weights = [part.weight for part in matrices]
        updates = torch._foreach_add([part.gradient for part in matrices], weights, alpha=self.config.weight_decay or 0)
        w, g = (torch.stack(torch._foreach_norm(tensors)) for tensors in (weights, updates))
        factors = torch.where((w > 0) & (g > 0), self.config.trust * w / g, 1.0)
        torch._foreach_mul_(updates, factors.unbind())
        return list(updates)

    def _adamw(self, parameters: list[Tensor], lr: float, fused: bool) -> None:
        """Apply torch's functional AdamW."""
        for p in parameters:
            state = self.state[p]
            if not state:
                state["step"] = torch.zeros((), device=p.device if fused else "cpu")
                state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(p), torch.zeros_like(p)
            first, second, steps = [state["exp_avg"]], [state["exp_avg_sq"]], [state["step"]]
            assert p.grad is not None
            beta1, beta2 = self.config.betas
            options: dict[str, Any] = {"lr": lr, "beta1": beta1, "beta2": beta2, "eps": 1e-8, "weight_decay": 0.0}
            adamw([p], [p.grad], first, second, [], steps, fused=fused, amsgrad=False, maximize=False, **options)
