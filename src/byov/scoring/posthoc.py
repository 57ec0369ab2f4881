"""A posterior without training (`--method posthoc`): noise around given weights, as wide as neighbourhoods allow.

The sigma of each tensor is c times a scale: the standard deviation of its weights, their root mean square, or the noise
that this tensor alone tolerates. The standard deviation works best (docs/score.md): the scales of BatchNorm are large
numbers that hardly differ, and noise of their size destroys the network. The common c is found by bisection on draws of
all tensors together: the mean Jaccard overlap of the nearest reference images between two draws must fall to a given
level (`posterior.overlap`). It takes forward passes only. This follows training-free Bayesianization (Shi et al., arXiv
2412.05723), with neighbourhoods in place of a validation loss.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import normalize

from byov._core.callbacks import Progress
from byov.data.transforms import resized
from byov.inference.run import aligned, at_draw, at_this_draw, before_draws, moments_of
from byov.posterior import Posterior
from byov.runs.split import divide
from byov.scoring.scores import CONSISTENT_SHARE, neighbour_count
from byov.training.loop import Trainer

IMAGES = 1000  # reference images whose neighbourhoods are compared
FEW_IMAGES = 300  # the same while searching one tensor at a time
DRAWS = 3
STEPS, FEW_STEPS = 8, 6  # of a bisection: c to within 3%, and 11%
WIDEST = (1e-3, 1.0)  # the range of c
LEAST = 1e-8  # scale of a tensor whose weights are all equal


class Fitted(NamedTuple):
    """The result of the bisection."""

    c: float
    overlap: float
    """Mean Jaccard overlap of the nearest reference images between two draws."""


class Neighbourhoods:
    """Measures how much the nearest reference images of each reference image change between draws."""

    def __init__(self, encoder: Posterior, images: Tensor, seed: int) -> None:
        self.encoder, self.seed = encoder, seed
        self.before = before_draws(encoder, images, images.shape[-1])
        self.moments = moments_of(at_this_draw(encoder, self.before))
        self.count = neighbour_count(len(images), CONSISTENT_SHARE)

    def overlap(self, draws: int = DRAWS) -> float:
        """Return the mean Jaccard overlap over images and pairs of draws; the noise is the same at every call."""
        near = [self._near(k) for k in range(draws)]
        pairs = [(a, b) for i, a in enumerate(near) for b in near[:i]]
        common = torch.stack([(a & b).sum(1).double() for a, b in pairs])
        return float((common / (2 * self.count - common)).mean())

    def _near(self, k: int) -> Tensor:
        """(images, images) bool: whether the second is among the nearest of the first."""
        with at_draw(self.encoder, self.seed, k):
            features = at_this_draw(self.encoder, self.before)
        unit = normalize(aligned(features, moments_of(features), self.moments), dim=1)
        cosines = (unit @ unit.T).fill_diagonal_(-torch.inf)
        which = cosines.topk(self.count, dim=1).indices
        return torch.zeros_like(cosines, dtype=torch.bool).scatter_(1, which, True)


def fit_posthoc(trainer: Trainer, progress: Progress = lambda what, done, total: None) -> Fitted:
    """Set the log-variances of a run without training; the run is then finished, but not saved."""
    config = trainer.config
    assert config.images is not None and config.calibration is not None
    posterior = trainer.learner.posterior.eval()
    reference = divide(len(trainer.data), config.images, config.calibration).bank
    chosen = reference[:: -(-len(reference) // IMAGES)]
    images = resized(trainer.data.images[chosen], trainer.learner.image_size)
    encoder = posterior.part("encoder")  # a copy: the bisection does not change the run
    scales = _scales(encoder, images, config.posterior.scales, config.posterior.overlap, config.seed, progress)
    where = Neighbourhoods(encoder, images, config.seed)

    def overlap(c: float) -> float:
        _spread(encoder, scales, c)
        return where.overlap()

    fitted = bisect(overlap, config.posterior.overlap, STEPS, lambda done: progress("fitting sigma", done, STEPS))
    with torch.no_grad():
        _spread(encoder, scales, fitted.c)
        whole = posterior.segments.named(posterior.log_variances)
        for name, value in encoder.segments.named(encoder.log_variances).items():
            whole[f"encoder.{name}"].copy_(value)
    return fitted


def bisect(overlap: Callable[[float], float], level: float, steps: int, advance: Callable[[int], None]) -> Fitted:
    """Find the c at which the overlap, which falls with c, reaches the level; on a logarithmic scale."""
    low, high = map(math.log, WIDEST)
    for step in range(steps):
        middle = (low + high) / 2
        low, high = (middle, high) if overlap(math.exp(middle)) > level else (low, middle)
        advance(step + 1)
    c = math.exp((low + high) / 2)
    return Fitted(c, overlap(c))


def _scales(
    encoder: Posterior, images: Tensor, how: str, level: float, seed: int, progress: Progress
) -> Sequence[float]:
    """The scale of each random tensor."""
    views = encoder.segments.views(encoder.means.detach())
    sizes = [view.std(correction=0) if how == "std" else view.square().mean().sqrt() for view in views]
    roots = [max(float(size), LEAST) for size in sizes]
    if how != "tensors":
        return roots
    where = Neighbourhoods(encoder, images[:: -(-len(images) // FEW_IMAGES)], seed)
    found = []
    for i, root in enumerate(roots):

        def overlap(c: float, i: int = i, root: float = root) -> float:
            _spread(encoder, [root if j == i else 0.0 for j in range(len(roots))], c)
            return where.overlap(2)

        found.append(root * bisect(overlap, level, FEW_STEPS, lambda done: None).c)
        progress("one tensor at a time", i + 1, len(roots))
    return found


@torch.no_grad()
def _spread(posterior: Posterior, scales: Sequence[float], c: float) -> None:
    """Set sigma to c times the scale of each tensor; a scale of 0 gives a sigma of 0."""
    for view, scale in zip(posterior.segments.views(posterior.log_variances), scales, strict=True):
        view.fill_(2 * math.log(c * scale) if scale else -torch.inf)
