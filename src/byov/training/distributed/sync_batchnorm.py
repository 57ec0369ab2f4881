"""Batch normalisation over the images of all processes; torch's SyncBatchNorm runs on GPUs only.

With it, two processes with 64 images each learn the same as one with 128.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.nn.modules.batchnorm import _BatchNorm


class _Sum(torch.autograd.Function):
    """The sum over all processes. Each has its own loss that depends on it, so gradients are summed, too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        total = x.clone()
        distributed.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        total = grad.clone()
        distributed.all_reduce(total)
        return total


class SharedBatchNorm(_BatchNorm):
    """nn.BatchNorm1d, 2d or 3d, with the batch's statistics over all processes (each with as many images)."""

    def _check_input_dim(self, input: Tensor) -> None:
        pass

    def forward(self, input: Tensor) -> Tensor:
        if not self.training:
            return super().forward(input)
        rank, world = distributed.get_rank(), distributed.get_world_size()
        x = input.to(torch.promote_types(input.dtype, torch.float32))
        others = [dim for dim in range(x.dim()) if dim != 1]
        var, mean = torch.var_mean(x, others, correction=0)
        # Every process fills its own row; the sum is a table of all, from which the total variance follows stably.
        rows = torch.zeros(world, 2, len(mean), dtype=x.dtype, device=x.device)
        rows = rows.index_put((torch.tensor(rank, device=x.device),), torch.stack([mean, var]))
        means, variances = _Sum.apply(rows).unbind(1)  # type: ignore[no-untyped-call]
        mean = means.mean(0)
        var = (variances + (means - mean).square()).mean(0)
        self._follow(mean.detach(), var.detach(), world * x.numel() // len(mean))
        shape = [1, -1] + [1] * (x.dim() - 2)
        x = (x - mean.view(shape)) * (var + self.eps).rsqrt().view(shape)
        if self.affine:
            x = x * self.weight.view(shape) + self.bias.view(shape)
        normalised: Tensor = x.to(input.dtype)
        return normalised

    @torch.no_grad()
    def _follow(self, mean: Tensor, var: Tensor, count: int) -> None:
        """Update the running statistics, as torch does."""
        if self.running_mean is None or self.running_var is None or self.num_batches_tracked is None:
            return
        self.num_batches_tracked.add_(1)
        share = 1 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), share)
        self.running_var.lerp_((var * (count / max(count - 1, 1))).to(self.running_var.dtype), share)


def share_batch_norms(network: nn.Module, say: Callable[[str], None]) -> None:
    """Make every batch normalisation in a network one over all processes; warn of layers with another forward."""
    others = []
    for module in network.modules():
        if isinstance(module, _BatchNorm) and type(module).forward is _BatchNorm.forward:
            module.__class__ = SharedBatchNorm  # same parameters, same names
        elif isinstance(module, _BatchNorm) and not isinstance(module, SharedBatchNorm):
            others.append(type(module).__name__)
    if others:
        kinds = ", ".join(sorted(set(others)))
        say(f"warning: {len(others)} layers ({kinds}) normalise over each process's own images, not over all.")
