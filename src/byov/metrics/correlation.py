"""How two scores of the same images relate: correlation, partial correlation, and the fit of a joint Gaussian.

Correlations take variables (images,) and optional weights (..., images): how often each image counts. A bootstrap
resample is one such row of counts, so thousands of them are one vectorised call without sorting again.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from byov._core.randomness import generator
from byov.metrics.ranking import midranks

ROUNDING = 1e-12  # a spread this small relative to a variable is rounding: its correlation means nothing


def pearson(x: Tensor, y: Tensor, weights: Tensor | None = None) -> Tensor:
    """Compute Pearson's linear correlation.

    Args:
        x: First variable, shape (images,).
        y: Second variable, shape (images,).
        weights: How often each image counts, shape (..., images); unset: once.

    Returns:
        The correlation, shape (...); NaN if a variable is constant.

    Raises:
        ValueError: If the shapes disagree, or a value is not finite.

    Examples:
        >>> import torch
        >>> from byov import metrics
        >>> x, y = torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.tensor([1.0, 4.0, 9.0, 16.0])
        >>> round(float(metrics.pearson(x, y)), 4)
        0.9844
    """
    (x, y), w = _checked((x, y), weights)
    return _cosine(_centred(x, w), _centred(y, w), w)


def spearman(x: Tensor, y: Tensor, weights: Tensor | None = None) -> Tensor:
    """Compute Spearman's rank correlation; equal values share a rank.

    Args:
        x: First variable, shape (images,).
        y: Second variable, shape (images,).
        weights: How often each image counts, shape (..., images); unset: once.

    Returns:
        The correlation, shape (...); NaN if a variable is constant.

    Raises:
        ValueError: If the shapes disagree, or a value is not finite.

    Examples:
        >>> import torch
        >>> from byov import metrics
        >>> x, y = torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.tensor([1.0, 4.0, 9.0, 16.0])
        >>> float(metrics.spearman(x, y))
        1.0
    """
    (x, y), w = _checked((x, y), weights)
    return _cosine(_centred(midranks(x, w), w), _centred(midranks(y, w), w), w)


def partial_pearson(x: Tensor, y: Tensor, given: Tensor, weights: Tensor | None = None) -> Tensor:
    """Compute the correlation of x and y after removing the best linear function of `given` from each.

    Args:
        x: First variable, shape (images,).
        y: Second variable, shape (images,).
        given: Variable to control for, shape (images,).
        weights: How often each image counts, shape (..., images); unset: once.

    Returns:
        The partial correlation, shape (...); NaN if nothing is left of a variable.

    Raises:
        ValueError: If the shapes disagree, or a value is not finite.

    Examples:
        >>> import torch
        >>> from byov import metrics
        >>> x, y = torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.tensor([1.0, 4.0, 9.0, 16.0])
        >>> float(metrics.partial_pearson(x, y, given=x))
        nan
    """
    (x, y, given), w = _checked((x, y, given), weights)
    return _partial(x, y, given, w)


def partial_spearman(x: Tensor, y: Tensor, given: Tensor, weights: Tensor | None = None) -> Tensor:
    """Compute the partial rank correlation of x and y given a third variable.

    Args:
        x: First variable, shape (images,).
        y: Second variable, shape (images,).
        given: Variable to control for, shape (images,).
        weights: How often each image counts, shape (..., images); unset: once.

    Returns:
        The partial correlation of the ranks, shape (...); NaN if nothing is left of a variable.

    Raises:
        ValueError: If the shapes disagree, or a value is not finite.

    Examples:
        >>> import torch
        >>> from byov import metrics
        >>> x, y = torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.tensor([1.0, 4.0, 9.0, 16.0])
        >>> round(float(metrics.partial_spearman(x, y, given=torch.tensor([4.0, 1.0, 3.0, 2.0]))), 4)
        1.0
    """
    (x, y, given), w = _checked((x, y, given), weights)
    return _partial(midranks(x, w), midranks(y, w), midranks(given, w), w)


def _checked(variables: tuple[Tensor, ...], weights: Tensor | None) -> tuple[tuple[Tensor, ...], Tensor]:
    """Return everything as float64 on the CPU."""
    shapes = [tuple(v.shape) for v in variables]
    if variables[0].ndim != 1 or len(set(shapes)) > 1 or len(variables[0]) < 2:
        raise ValueError(f"variables must be of one shape (images,), at least two images, not {shapes}.")
    if not all(bool(v.isfinite().all()) for v in variables):
        raise ValueError("some values are not finite, so there is no correlation; leave those images out.")
    weights = torch.ones(len(variables[0])) if weights is None else weights
    return tuple(v.detach().to("cpu", torch.float64) for v in variables), weights.to("cpu", torch.float64)


def _partial(x: Tensor, y: Tensor, given: Tensor, w: Tensor) -> Tensor:
    x, y, given = (_centred(v, w) for v in (x, y, given))
    return _cosine(_without(x, given, w), _without(y, given, w), w)


def _centred(x: Tensor, w: Tensor) -> Tensor:
    """Subtract the mean; exactly 0 where only rounding is left."""
    return _unless_rounding(x - ((w * x).sum(-1) / w.sum(-1))[..., None], x, w)


def _without(x: Tensor, given: Tensor, w: Tensor) -> Tensor:
    """Subtract from x its best multiple of `given`, both centred; a constant `given` explains nothing."""
    slope = (w * x * given).sum(-1) / (w * given.square()).sum(-1)
    return _unless_rounding(x - slope.nan_to_num(0)[..., None] * given, x, w)


def _unless_rounding(rest: Tensor, whole: Tensor, w: Tensor) -> Tensor:
    left, before = ((w * v.square()).sum(-1, keepdim=True) for v in (rest, whole))
    return torch.where(left > ROUNDING**2 * before, rest, 0)


def _cosine(x: Tensor, y: Tensor, w: Tensor) -> Tensor:
    """Return the cosine; NaN (0 / 0) where one vector is 0."""
    norms = ((w * x.square()).sum(-1) * (w * y.square()).sum(-1)).sqrt()
    return ((w * x * y).sum(-1) / norms).clamp(-1, 1)


class GaussianFit(NamedTuple):
    """The maximum-likelihood Gaussian of two variables, and how far they are from it.

    With thousands of images any test rejects a Gaussian. The misfit is therefore given by two effect sizes that do not
    grow with the number of images: `ks_distance` responds to tails and peak, `skewness` to asymmetry.
    """

    mean: Tensor
    """(2,)."""
    covariance: Tensor
    """(2, 2)."""
    ks_distance: float
    """Kolmogorov-Smirnov distance of the squared Mahalanobis distances to chi-squared with 2 degrees of freedom.

    The largest difference, from 0 to 1, between the fraction of images inside an ellipse and the Gaussian's. A true
    Gaussian has at most 1.36 / sqrt(images) in 95% of samples (less, because the ellipse is fitted).
    """
    skewness: float
    """Mardia's skewness: the sum of all squared third moments of the whitened scores, 0 for symmetric distributions.

    Two independent exponentials have 8; a sample of a true Gaussian has 24 / images on average.
    """


def gaussian_fit(x: Tensor, y: Tensor) -> GaussianFit:
    """Fit a joint Gaussian to two scores of the same images.

    Args:
        x: First variable, shape (images,).
        y: Second variable, shape (images,).

    Returns:
        Mean, covariance, and two effect sizes of the misfit.

    Raises:
        ValueError: If the shapes disagree, there are fewer than three images, or the variables lie on a line.

    Examples:
        >>> import torch
        >>> from byov import metrics
        >>> x, y = torch.randn(2, 2000, generator=torch.Generator().manual_seed(0))
        >>> metrics.gaussian_fit(x, y).ks_distance < 0.03
        True
    """
    if x.ndim != 1 or x.shape != y.shape or len(x) < 3:
        raise ValueError(
            f"two variables of one shape (images,), at least three images, are needed, "
            f"not {tuple(x.shape)} and {tuple(y.shape)}."
        )
    points = torch.stack([v.detach().to("cpu", torch.float64) for v in (x, y)], 1)
    mean, std = points.mean(0), points.std(0, correction=0)
    scaled = (points - mean) / std  # so that variables of very different units round alike
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


def misfit_replicates(x: Tensor, y: Tensor, resamples: int = 200, seed: int = 0) -> dict[str, Tensor]:
    """Compute both effect sizes of the misfit on resamples of the images: (resamples,) each."""
    drawn = torch.randint(len(x), (resamples, len(x)), generator=generator(seed))
    fits = [gaussian_fit(x[images], y[images]) for images in drawn]
    names = ("ks_distance", "skewness")
    return {name: torch.tensor([getattr(fit, name) for fit in fits], dtype=torch.float64) for name in names}


def _ks_distance(uniform: Tensor) -> float:
    """Return the largest gap between the steps of sorted values and the uniform distribution function."""
    steps = torch.arange(len(uniform) + 1, dtype=torch.float64) / len(uniform)
    return float(torch.maximum(steps[1:] - uniform, uniform - steps[:-1]).max())
