"""Variances from the curvature of the loss: sigma goes where the data put it, not where a learning rate stops it.

With independent weights, loss + KL / ess is stationary in sigma where

    1 / sigma^2 = 1 / v + ess * h,      h = E[d^2 loss / d w^2] = E[g (w - mean)] / sigma^2

v is the prior's variance, ess the effective sample size N / (temperature * beta), g the gradient at a draw w.
Variational online Newton methods (IVON: Shen et al., 2024) average the last expression, Stein's identity, weight by
weight. It is unbiased, but the standard deviation of one estimate is 20 to 300 times its mean: it would settle after
10^5 steps (docs/concepts/sigma.md; benchmarks/curvature.py). So the draw sets one scale for each group of weights, and
the running mean of g^2, whose noise is small, distributes it within the group:

    h = H * (mean of g^2) / (sum of the group's means of g^2)
    balance = mean over the group of sigma^2 / v + ess * g (w - mean)
    H <- H exp(d),  d = rate * (balance - 1), within +-0.2

The balance is 1 where the objective is stationary in the group's scale. For a quadratic loss and for linear regression
g^2 is in proportion to h, so that every single variance is right.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from byov._compiled import fused
from byov._core.errors import BadInput
from byov.posterior.posterior import Posterior
from byov.posterior.priors import Gaussian

GROUP = 2048  # weights at least: the scale's noise falls with their root; smaller tensors join the one before
SHARE, LONGEST, SHORTEST = 0.2, 1000.0, 20.0  # windows of the means: a fifth of the steps so far, within these bounds
LARGEST = 0.2  # change of a scale's logarithm in a step: far from the optimum the estimate is mostly noise
NO_NOISE = -1000.0  # log-variance below which sigma is 0: a pruned weight stays as it is
LEAST = 1e-30


class NewtonVariances:
    """Sets the variances of a posterior from the curvature of the loss.

    Call `observe` after the backward pass, before anything else changes the gradients, and `step` with the optimizer
    of the means. The log-variances need no optimizer.

    Args:
        posterior: The posterior whose variances are set.
        prior: One of `byov.priors`.
        effective_images: Number of images, over the temperature if there is one: the loss is a mean over images.

    Raises:
        BadInput: If the prior is not Gaussian, or `effective_images` is not positive and finite.

    Examples:
        >>> import torch
        >>> from byov import NewtonVariances, Posterior, priors
        >>> posterior, x, y = Posterior(torch.nn.Linear(4, 1)), torch.randn(100, 4), torch.randn(100, 1)
        >>> means = torch.optim.Adam([posterior.means], lr=1e-2)
        >>> variances = NewtonVariances(posterior, priors.Standard(), effective_images=100)
        >>> for _ in range(3):
        ...     posterior.zero_grad()
        ...     with posterior.sampled():
        ...         (posterior(x) - y).square().mean().backward()
        ...     variances.observe()
        ...     kl = priors.add_kl(posterior, priors.Standard(), scale=1 / 100)
        ...     means.step()
        ...     variances.step()
    """

    def __init__(self, posterior: Posterior, prior: Gaussian, effective_images: float) -> None:
        if not isinstance(prior, Gaussian):
            raise BadInput("Newton's variances need a Gaussian prior: use one of byov.priors, or Adam.")
        if not 0 < effective_images < float("inf"):
            raise BadInput(f"the effective number of images is {effective_images}: it must be positive and finite.")
        self.posterior, self.prior, self.effective_images = posterior, prior, effective_images
        offsets = [0]
        for segment in posterior.segments:
            if segment.stop - segment.offset >= GROUP <= segment.offset:
                offsets.append(segment.offset)
        stops = [*offsets[1:], posterior.segments.numel]
        self.sizes = [stop - start for start, stop in zip(offsets, stops, strict=True)]
        self.squares = torch.zeros_like(posterior.means.detach())
        variances = torch.exp(posterior.log_variances.detach())
        precisions = (1 / variances).sub_(prior.precision()).clamp_(min=LEAST)
        self.scales = self._sums(precisions).div_(effective_images)  # H: the start's, until the data have spoken
        self.beyond = self._sums(variances * prior.precision())  # sum of sigma^2 / v
        self.steps = torch.zeros((), dtype=torch.int64)

    @torch.no_grad()
    def observe(self) -> None:
        """Take the curvature at this step's draw from the gradients of the loss, without the KL and not clipped."""
        to_means, to_log_variances = self.posterior.means.grad, self.posterior.log_variances.grad
        assert to_means is not None and to_log_variances is not None, "observe comes after the backward pass"
        self.steps += 1
        window = min(LONGEST, SHARE * float(self.steps))
        rate, pulls = 1 / max(1.0, window), []
        for squares, g, to_own in zip(*self._split(self.squares, to_means, to_log_variances), strict=True):
            pulls.append(_observe(squares, g, to_own, rate))
        sizes = self.scales.new_tensor(self.sizes)
        # The gradient to a log-variance is g (w - mean) / 2.
        balance = (self.beyond + 2 * self.effective_images * torch.stack(pulls)) / sizes
        self.scales.mul_(((balance - 1) / max(SHORTEST, window)).clamp_(-LARGEST, LARGEST).exp_())

    @torch.no_grad()
    def step(self) -> None:
        """Set every variance to 1 / (1 / v + ess * h)."""
        variance = self.prior.variance
        own = [variance] if isinstance(variance, Tensor) else []
        least = self.prior.floor if own else max(float(variance), self.prior.floor)
        beyond, scales = [], self.effective_images * self.scales
        parts = zip(*self._split(self.posterior.log_variances.detach(), self.squares, *own), strict=True)
        for scale, (log_variances, squares, *v) in zip(scales, parts, strict=True):
            factor = scale / squares.sum().clamp(min=LEAST)
            beyond.append(_settle(log_variances, squares, factor, v[0] if v else None, least))
        self.beyond = torch.stack(beyond)

    def _split(self, *flats: Tensor) -> list[tuple[Tensor, ...]]:
        return [torch.split(flat, self.sizes) for flat in flats]

    def _sums(self, flat: Tensor) -> Tensor:
        return torch.stack([part.sum() for part in torch.split(flat, self.sizes)])

    def tensors(self) -> dict[str, Tensor]:
        """Return the state, for a checkpoint."""
        return {"squares": self.squares, "scales": self.scales, "beyond": self.beyond, "steps": self.steps}

    def load_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Load what `tensors` returned."""
        own = self.tensors()
        if {name: t.shape for name, t in tensors.items()} != {name: t.shape for name, t in own.items()}:
            raise BadInput("the saved curvature belongs to another network: start a new run.")
        for name, tensor in own.items():
            tensor.copy_(tensors[name])


def _observe(squares: Tensor, g: Tensor, to_log_variances: Tensor, rate: float) -> Tensor:
    """Move the running mean of g^2; return the sum of the gradients to the log-variances."""
    if fused.fits(squares, g, to_log_variances):
        return fused.observe_(squares, g, to_log_variances, rate)
    squares.mul_(1 - rate).addcmul_(g, g, value=rate)
    return to_log_variances.sum()


def _settle(log_variances: Tensor, squares: Tensor, factor: Tensor, v: Tensor | None, least: float) -> Tensor:
    """Write -log(1 / v + factor * squares), except where a weight is pruned; return the sum of sigma^2 / v."""
    if fused.fits(log_variances, squares, v):
        return fused.settle_(log_variances, squares, float(factor), v, least)
    own = 1 / least if v is None else 1 / v.clamp(min=least)
    precision = own + squares * factor
    log_variances.copy_(torch.where(log_variances < NO_NOISE, log_variances, -precision.log()))
    return (own / precision).sum()
