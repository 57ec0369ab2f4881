"""Priors over the random weights, each with its closed-form KL[q || prior], in the posterior's flat coordinates.

A prior is anything with `kl(means, log_variances) -> scalar`; a user's own may use plain autograd. The Gaussian ones
here know their gradient by formula: with means m and variances v against m0 and v0,

    KL = sum of ((v + (m - m0)^2) / v0 - 1 - log v + log v0) / 2
    dKL/dm = (m - m0) / v0,   dKL/dlog v = (v / v0 - 1) / 2

`add_kl` puts that gradient straight onto the posterior's gradients: on a CPU in one pass over memory, where autograd
makes a dozen. No gradient flows into a prior.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from byov._compiled import fused
from byov.posterior.posterior import Posterior, Prior


def add_kl(posterior: Posterior, prior: Prior, scale: float) -> Tensor:
    """Adds the gradient of scale * KL[q || prior] to the posterior's gradients; returns the KL."""
    if (
        not isinstance(prior, Gaussian)
        or type(prior).kl is not Gaussian.kl  # a user's own
        or prior.kept is not None  # some weights are pruned
    ):
        kl = posterior.kl(prior)
        (scale * kl).backward()  # type: ignore[no-untyped-call]
        return kl.detach()
    gradients = []
    for parameter in (posterior.means, posterior.log_variances):
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        gradients.append(parameter.grad)
    return prior.evaluate(posterior.means, posterior.log_variances, (gradients[0], gradients[1]), scale)


class Gaussian:
    """N(mean, diag(variance)); each a number or a flat tensor, read afresh at every call; `floor`: least variance."""

    def __init__(self, mean: Tensor | float = 0.0, variance: Tensor | float = 1.0, floor: float = 0.0) -> None:
        if isinstance(variance, float | int) and not variance > 0:
            raise ValueError(f"the prior's variance must be positive, not {variance}.")
        self.mean = mean.detach() if isinstance(mean, Tensor) else mean
        self.variance = variance.detach() if isinstance(variance, Tensor) else variance
        self.floor = floor
        self.kept: Tensor | None = None  # indices of the weights that count, where others are pruned

    def kl(self, means: Tensor, log_variances: Tensor) -> Tensor:
        """KL[q || this], summed over the weights in float32 (float64 for float64); differentiable in both arguments."""
        if self.kept is not None:
            return self._among(self.kept).kl(means[self.kept], log_variances[self.kept])
        return _GaussianKL.apply(means, log_variances, self)  # type: ignore[no-any-return, no-untyped-call]

    @torch.no_grad()
    def evaluate(
        self, means: Tensor, log_variances: Tensor, gradients: tuple[Tensor, Tensor] | None = None, scale: float = 1.0
    ) -> Tensor:
        """The KL; adds scale * its gradient to `gradients`, in place. On a CPU it is one pass over memory."""
        mean, variance = (value if isinstance(value, Tensor) else None for value in (self.mean, self.variance))
        for tensor in (mean, variance):
            if tensor is not None and tensor.shape != means.shape:
                sizes = f"{tuple(tensor.shape)} weights, the posterior over {tuple(means.shape)}"
                raise ValueError(f"the prior is over {sizes}.")
        if log_variances.shape != means.shape:
            raise ValueError(f"{tuple(means.shape)} means came with {tuple(log_variances.shape)} log-variances.")
        centred = mean is not None or not self.mean
        if centred and fused.fits(means, log_variances, mean, variance, *(gradients or ())):
            least = self.floor if variance is not None else max(float(self.variance), self.floor)
            return fused.kl(means, log_variances, mean, variance, least, gradients, scale)
        precise = torch.promote_types(means.dtype, torch.float32)
        if variance is None:
            v0: Tensor | float = max(float(self.variance), self.floor)
            log_v0: Tensor | float = math.log(v0)
        else:
            v0 = variance.to(precise).clamp(min=self.floor)
            log_v0 = v0.log()
        away, log_v = means.to(precise) - self.mean, log_variances.to(precise)
        v = log_v.exp()
        total = ((v + away * away) / v0 - 1 - (log_v - log_v0)).sum(dtype=torch.float64)
        if gradients is not None:
            gradients[0].add_(away / v0, alpha=scale)
            gradients[1].add_(v / v0 - 1, alpha=0.5 * scale)
        return total.mul_(0.5).to(precise)

    def _among(self, indices: Tensor) -> Gaussian:
        """The same prior over some of the weights."""
        mean, variance = (v[indices] if isinstance(v, Tensor) else v for v in (self.mean, self.variance))
        return Gaussian(mean, variance, self.floor)


class _GaussianKL(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, means: Tensor, log_variances: Tensor, prior: Gaussian) -> Tensor:
        ctx.prior = prior
        # The prior's tensors are saved only so that autograd complains if they change before backward.
        ctx.save_for_backward(means, log_variances, *(t for t in (prior.mean, prior.variance) if isinstance(t, Tensor)))
        return prior.evaluate(means, log_variances)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        means, log_variances, *_ = ctx.saved_tensors
        gradients = torch.zeros_like(means), torch.zeros_like(log_variances)
        if grad.device.type == "cpu":  # no waiting for it, and two passes over memory less
            ctx.prior.evaluate(means, log_variances, gradients, float(grad))
            return *gradients, None
        ctx.prior.evaluate(means, log_variances, gradients)
        return gradients[0].mul_(grad), gradients[1].mul_(grad), None


class Standard(Gaussian):
    """N(0, I), the prior of Blundell et al. (2015)."""

    def __init__(self) -> None:
        super().__init__(0.0, 1.0)


class TeacherMean(Gaussian):
    """N(teacher, I): around the moving average of the student's means."""

    def __init__(self, teacher: Tensor) -> None:
        super().__init__(teacher, 1.0)


class TeacherMoments(Gaussian):
    """N(teacher, diag(v)), v the running variance of the student's means (`training.teacher` keeps both)."""

    def __init__(self, teacher: Tensor, variance: Tensor, floor: float = math.exp(-10.0)) -> None:
        super().__init__(teacher, variance, floor)


class Pretrained(Gaussian):
    """N(w0, std^2) around given weights; the standard deviation is a number, or one for each weight."""

    def __init__(self, weights: Tensor, std: Tensor | float) -> None:
        super().__init__(weights.detach().clone(), std**2)
