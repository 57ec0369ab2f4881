"""The parameter of sigma that the optimizer updates: the log-variance (exp, default), or Blundell's rho (softplus).

A posterior always holds log-variances, and draws, KL and checkpoints use only these. With `softplus`, where
sigma = log(1 + exp(rho)), the optimizer's step is taken in rho: the log-variances become rho and their gradient that to
rho, the optimizer steps, and they become log-variances again. At a small sigma, rho is nearly log(sigma), half of the
log-variance: the same learning rate then moves sigma twice as fast as with `exp`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor

from byov.posterior import Posterior

SMALL = -40.0  # log(sigma) below which rho is log(sigma) to the last digit, also of a pruned weight, whose sigma is 0


@contextmanager
def optimized_scale(posterior: Posterior, scale: str) -> Iterator[None]:
    """Let the optimizer update rho instead of the log-variances within the block, for `softplus`."""
    flat = posterior.log_variances
    if scale == "exp":
        yield
        return
    with torch.no_grad():
        flat.copy_(to_rho(flat))
        if flat.grad is not None:
            flat.grad.mul_(slope(flat))
    try:
        yield
    finally:
        with torch.no_grad():
            flat.copy_(to_log_variance(flat))


def to_rho(log_variance: Tensor) -> Tensor:
    """Return the rho whose softplus is sigma = exp(log_variance / 2)."""
    log_sigma = log_variance / 2
    sigma = log_sigma.clamp(min=SMALL).exp()
    return torch.where(log_sigma < SMALL, log_sigma, sigma + torch.log(-torch.expm1(-sigma)))


def to_log_variance(rho: Tensor) -> Tensor:
    """Return the log of the square of softplus(rho)."""
    return 2 * torch.where(rho < SMALL, rho, F.softplus(rho.clamp(min=SMALL)).log())


def slope(rho: Tensor) -> Tensor:
    """Return d log_variance / d rho."""
    kept = rho.clamp(min=SMALL)
    return 2 * torch.sigmoid(kept) / F.softplus(kept)
