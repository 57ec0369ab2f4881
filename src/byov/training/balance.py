"""Has the posterior settled? The balance of each layer, and what the posterior gains over its prior.

The objective, loss + KL / ess with ess = N / (beta_end * temperature), is stationary in a layer's variances where

    balance = mean of sigma^2 (1 / v + ess * h) = 1,     ess * h sigma^2 = ess * E[g (w - mean)]

A layer below 1 could be noisier at no cost; one above 1 is too noisy. The margin is the expected loss over draws from
the prior, whose KL is 0, less loss + KL / ess of the posterior: if it is negative, the objective prefers the prior.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from byov._core.randomness import RandomStream
from byov.config import Config
from byov.posterior import Posterior
from byov.posterior.priors import Gaussian
from byov.training.learners import Batch, Learner

PRIOR_DRAWS = 4


def effective_images(config: Config) -> float:
    """Return N / (beta_end * temperature): the number of images that the KL is weighed against, as if at temperature 1.

    Newton's variances use beta_end from the first step on: at beta 0, sigma would be 0.
    """
    weight = config.posterior.beta_end * (config.posterior.temperature or 0.0)
    return (config.images or 1) / weight if weight else float("inf")


def pulls_of(posterior: Posterior) -> Tensor | None:
    """Return the mean over each segment of the loss's gradient to the log-variances, g (w - mean) / 2."""
    gradient = posterior.log_variances.grad
    if gradient is None or not len(posterior.segments):
        return None
    return torch.stack([part.mean() for part in posterior.segments.views(gradient)])


class Balance:
    """Accumulates the balance of each layer and the loss, from one epoch's end to the next."""

    def __init__(self, posterior: Posterior, prior: Gaussian, effective: float) -> None:
        self.posterior, self.prior, self.effective = posterior, prior, effective
        self.pulls = torch.zeros(len(posterior.segments), dtype=torch.float64, device=posterior.means.device)
        self.totals = torch.zeros(2, dtype=torch.float64)  # steps, and the sum of the losses without the KL

    def add(self, pulls: Tensor, nll: float) -> None:
        self.pulls += pulls.to(self.pulls)
        self.totals += torch.tensor([1.0, nll], dtype=torch.float64)

    def take(self) -> tuple[list[float], float]:
        """Return each layer's balance and the mean loss since the last call, and start again."""
        steps, loss = self.totals.tolist()
        precision = self.prior.precision() * torch.exp(self.posterior.log_variances.detach())
        beyond = torch.stack([part.mean() for part in self.posterior.segments.views(precision)]).to(self.pulls)
        balance = beyond + 2 * self.effective * self.pulls / max(steps, 1)
        self.pulls.zero_()
        self.totals.zero_()
        return balance.tolist(), loss / max(steps, 1)

    def tensors(self) -> dict[str, Tensor]:
        return {"pulls": self.pulls, "totals": self.totals}


@torch.no_grad()
def loss_at_prior(learner: Learner, batch: Batch, config: Config, step: int) -> float:
    """Return the mean loss of a batch over draws from the prior; teacher and non-random weights stay as they are."""
    posterior, prior = learner.posterior, learner.prior
    assert isinstance(prior, Gaussian)
    flats = (posterior.means, posterior.log_variances)
    before = [flat.detach().clone() for flat in flats]
    precision = prior.precision()
    with _buffers_kept([network.module for network in (posterior, learner.teacher) if network is not None]):
        try:
            posterior.means.copy_(torch.as_tensor(prior.mean).expand_as(before[0]))
            posterior.log_variances.copy_(-torch.as_tensor(precision).log().expand_as(before[1]))
            keys = [(RandomStream.PRIOR, config.seed, step, k) for k in range(PRIOR_DRAWS)]
            losses = [float(learner.loss(batch, key).nll) for key in keys]
        finally:
            for flat, value in zip(flats, before, strict=True):
                flat.copy_(value)
    return sum(losses) / len(losses)


def losing_to_its_prior(margin: float) -> str:
    """Say that the objective prefers the prior to this posterior."""
    return (
        f"by its objective this run is worse than its prior (elbo_margin {margin:.3g}): sigma is where the learning "
        "rate left it. Use --optim.variances newton, or lower posterior.temperature."
    )


@contextmanager
def _buffers_kept(modules: list[nn.Module]) -> Iterator[None]:
    """Restore buffers, such as BatchNorm's statistics, after the block."""
    before = [(buffer, buffer.clone()) for module in modules for buffer in module.buffers()]
    try:
        yield
    finally:
        for buffer, value in before:
            buffer.copy_(value)
