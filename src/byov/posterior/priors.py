"""Priors over the random weights, each with a closed-form KL[q || prior], in the posterior's flat coordinates.

A prior is any object with `kl(means, log_variances) -> scalar`; a custom one may use plain autograd. The Gaussian ones
here have a closed-form gradient: with means m and variances v, and the prior's m0 and v0,

    KL = sum of ((v + (m - m0)^2) / v0 - 1 - log v + log v0) / 2
    dKL/dm = (m - m0) / v0,   dKL/dlog v = (v / v0 - 1) / 2

`add_kl` adds that gradient directly to the posterior's gradients: on a CPU in one pass over memory, where autograd
needs a dozen. No gradient flows into a prior.
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
    """Add the gradient of scale * KL[q || prior] to the posterior's gradients.

    It equals `(scale * posterior.kl(prior)).backward()`, but faster: on a CPU it is one pass over memory.

    Args:
        posterior: The posterior whose `grad`s are added to.
        prior: Any prior.
        scale: Factor on the KL.

    Returns:
        The KL, detached.

    Examples:
        >>> import torch
        >>> from byov import Posterior, priors
        >>> posterior = Posterior(torch.nn.Linear(4, 2))
        >>> kl = priors.add_kl(posterior, priors.Standard(), scale=1.0)
        >>> torch.allclose(posterior.means.grad, posterior.means)  # d KL / d mean = mean
        True
    """
    if (
        not isinstance(prior, Gaussian)
        or type(prior).kl is not Gaussian.kl  # a custom one
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
    """N(mean, diag(variance)), the base of the other priors.

    Args:
        mean: A number, or a flat tensor with one value per random weight, read at every call.
        variance: A number, or a flat tensor with one value per random weight, read at every call.
        floor: Smallest variance.

    Raises:
        ValueError: If the variance is a number that is not positive.

    Examples:
        >>> import torch
        >>> from byov import Posterior, priors
        >>> posterior = Posterior(torch.nn.Linear(4, 2))
        >>> posterior.kl(priors.Gaussian(0.0, 0.25)).item() > 0
        True
    """

    def __init__(self, mean: Tensor | float = 0.0, variance: Tensor | float = 1.0, floor: float = 0.0) -> None:
        if isinstance(variance, float | int) and not variance > 0:
            raise ValueError(f"the prior's variance must be positive, not {variance}.")
        self.mean = mean.detach() if isinstance(mean, Tensor) else mean
        self.variance = variance.detach() if isinstance(variance, Tensor) else variance
        self.floor = floor
        self.kept: Tensor | None = None  # indices of the weights that count, if others are pruned

    def precision(self) -> Tensor | float:
        """Return one over the variance, a number or one value per weight."""
        if isinstance(self.variance, Tensor):
            return 1 / self.variance.clamp(min=self.floor)
        return 1 / max(float(self.variance), self.floor)

    def kl(self, means: Tensor, log_variances: Tensor) -> Tensor:
        """Compute KL[q || this], summed over the weights in float32 (float64 for float64 weights); differentiable."""
        if self.kept is not None:
            return self._among(self.kept).kl(means[self.kept], log_variances[self.kept])
        return _GaussianKL.apply(means, log_variances, self)  # type: ignore[no-any-return, no-untyped-call]

    @torch.no_grad()
    def evaluate(
        self, means: Tensor, log_variances: Tensor, gradients: tuple[Tensor, Tensor] | None = None, scale: float = 1.0
    ) -> Tensor:
        """Compute the KL, and add scale * its gradient to `gradients` in place; on a CPU in one pass over memory."""
        mean, variance = (value if isinstance(value, Tensor) else None for value in (self.mean, self.variance))
        for tensor in (mean, variance):
            if tensor is not None and tensor.shape != means.shape:
                sizes = f"{tuple(tensor.shape)} weights, the posterior over {tuple(means.shape)}"
                raise ValueError(f"the prior is over {sizes}.")
        if log_variances.shape != means.shape:
            raise ValueError(f"{tuple(means.shape)} means do not match {tuple(log_variances.shape)} log-variances.")
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
        """Restrict the prior to some of the weights."""
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
        if grad.device.type == "cpu":  # no synchronisation, and two passes over memory less
            ctx.prior.evaluate(means, log_variances, gradients, float(grad))
            return *gradients, None
        ctx.prior.evaluate(means, log_variances, gradients)
        return gradients[0].mul_(grad), gradients[1].mul_(grad), None


class Standard(Gaussian):
    """N(0, I), the prior of Blundell et al. (2015).

    Examples:
        >>> import torch
        >>> from byov import Posterior, priors
        >>> Posterior(torch.nn.Linear(4, 2)).kl(priors.Standard()).requires_grad
        True
    """

    def __init__(self) -> None:
        super().__init__(0.0, 1.0)


class TeacherMean(Gaussian):
    """N(teacher, I), centred on a moving average of the student's means.

    Args:
        teacher: The teacher's flat weights, read at every call.

    Examples:
        >>> import torch
        >>> from byov import Posterior, priors
        >>> posterior = Posterior(torch.nn.Linear(4, 2), init_log_variance=0.0)
        >>> posterior.kl(priors.TeacherMean(posterior.means)).item()  # the teacher equals the student
        0.0
    """

    def __init__(self, teacher: Tensor) -> None:
        super().__init__(teacher, 1.0)


class TeacherMoments(Gaussian):
    """N(teacher, diag(v)), with v the running variance of the student's means.

    Args:
        teacher: The teacher's flat weights, read at every call.
        variance: Their running variance, flat, read at every call.
        floor: Smallest variance.

    Examples:
        >>> import torch
        >>> from byov import Posterior, priors
        >>> posterior = Posterior(torch.nn.Linear(4, 2), init_log_variance=0.0)
        >>> posterior.kl(priors.TeacherMoments(posterior.means, torch.ones_like(posterior.means))).item()
        0.0
    """

    def __init__(self, teacher: Tensor, variance: Tensor, floor: float = math.exp(-10.0)) -> None:
        super().__init__(teacher, variance, floor)


class Pretrained(Gaussian):
    """N(weights, std^2), centred on given weights.

    Args:
        weights: Flat weights; a copy is stored.
        std: Standard deviation, a number or a flat tensor.

    Examples:
        >>> import torch
        >>> from byov import Posterior, priors
        >>> posterior = Posterior(torch.nn.Linear(4, 2))
        >>> posterior.kl(priors.Pretrained(posterior.means, std=0.1)).item() > 0
        True
    """

    def __init__(self, weights: Tensor, std: Tensor | float) -> None:
        super().__init__(weights.detach().clone(), std**2)
