"""A joint Gaussian fitted to two scores of the same images, and how far they are from one (Figure 1b).

With thousands of images any test rejects a Gaussian, so the misfit is told by two effect sizes, neither of which grows
with the number of images. They see different faults: `ks_distance` tails and the peak, `skewness` lopsidedness.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from byov._core.randomness import generator


class GaussianFit(NamedTuple):
    """The maximum-likelihood Gaussian, and its misfit."""

    mean: Tensor
    """(2,)."""
    covariance: Tensor
    """(2, 2)."""
    ks_distance: float
    """Kolmogorov and Smirnov's distance of the squared Mahalanobis distances to chi-squared with 2 degrees of freedom.

    By how many images, as a part of all, the content of any ellipse differs from the Gaussian's: from 0 to 1. A true
    Gaussian has at most 1.36 / sqrt(images), 19 times of 20 (less, because the ellipse is fitted).
    """
    skewness: float
    """Mardia's: the sum of all squared third moments of the whitened scores, 0 for what is symmetric about a point.

    Two independent exponentials have 8; a true Gaussian's sample has 24 / images on average.
    """


def gaussian_fit(x: Tensor, y: Tensor) -> GaussianFit:
    """Fits two variables (images,)."""
    if x.ndim != 1 or x.shape != y.shape or len(x) < 3:
        raise ValueError(
            f"two variables of one shape (images,), at least three images, are needed, "
            f"not {tuple(x.shape)} and {tuple(y.shape)}."
        )
    points = torch.stack([v.detach().to("cpu", torch.float64) for v in (x, y)], 1)
    mean, std = points.mean(0), points.std(0, correction=0)
    scaled = (points - mean) / std  # so that two very different units round alike
    correlation = scaled.T @ scaled / len(points)
    if not float(correlation.det()) > 1e-12:  # `not >`: a NaN (a constant, an infinite value) is caught too
        raise ValueError("the two variables lie on a line or are not finite: they have no joint Gaussian density.")
    white = torch.linalg.solve_triangular(torch.linalg.cholesky(correlation), scaled.T, upper=False)
    squared = white.square().sum(0).sort().values
    third = torch.einsum("in,jn,kn->ijk", white, white, white) / len(points)
    return GaussianFit(
        mean=mean,
        covariance=correlation * std * std[:, None],
        ks_distance=_ks_distance(-torch.expm1(-squared / 2)),  # the distribution function of chi-squared with 2
        skewness=float(third.square().sum()),
    )


def misfit_errors(x: Tensor, y: Tensor, resamples: int = 200, seed: int = 0) -> dict[str, float]:
    """Bootstrap standard errors over images of both effect sizes of the misfit."""
    drawn = torch.randint(len(x), (resamples, len(x)), generator=generator(seed))
    fits = [gaussian_fit(x[images], y[images]) for images in drawn]
    names = ("ks_distance", "skewness")
    return {name: float(torch.tensor([getattr(fit, name) for fit in fits]).std()) for name in names}


def _ks_distance(uniform: Tensor) -> float:
    """The largest gap between the steps of sorted values and the uniform distribution function."""
    steps = torch.arange(len(uniform) + 1, dtype=torch.float64) / len(uniform)
    return float(torch.maximum(steps[1:] - uniform, uniform - steps[:-1]).max())
