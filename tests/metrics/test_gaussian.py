"""The joint Gaussian fit against numpy and scipy, on samples whose misfit is known, and under linear maps."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chi2, kstest
from torch import Tensor

from byov.metrics import gaussian_fit
from byov.metrics.gaussian import misfit_errors


def normals(seed: int, images: int = 400) -> tuple[Tensor, Tensor]:
    a, b = torch.randn(2, images, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return a, 0.6 * a + 0.8 * b


@pytest.mark.parametrize("shape", ["lopsided", "ring"])
def test_equals_numpy_and_scipy(shape: str) -> None:
    x, y = normals(0)
    # a ring has too little inside, where the other has too much: the gap is above the steps or below them
    x, y = (x, y.exp()) if shape == "lopsided" else (x / x.hypot(y), y / x.hypot(y))
    found = gaussian_fit(x, y)
    points = np.stack([x, y], 1)
    assert np.allclose(found.mean, points.mean(0)) and np.allclose(found.covariance, np.cov(points.T, bias=True))
    centred = points - points.mean(0)
    products = centred @ np.linalg.inv(np.cov(points.T, bias=True)) @ centred.T
    assert found.ks_distance == pytest.approx(kstest(np.diag(products), chi2(2).cdf).statistic, abs=1e-9)
    assert found.skewness == pytest.approx((products**3).mean(), rel=1e-9)  # Mardia's own definition, over all pairs


def test_a_gaussian_fits() -> None:
    """Mardia: images * skewness / 6 is chi-squared with 4 degrees; the distance is below that of a known ellipse."""
    n = 5000
    found = gaussian_fit(*normals(1, n))
    assert n * found.skewness / 6 < chi2(4).ppf(0.9999)
    assert found.ks_distance < 2.23 / math.sqrt(n)  # Kolmogorov's 99.99%
    assert float(found.covariance[0, 1]) == pytest.approx(0.6, abs=4 * math.sqrt((1 + 0.36) / n))


def test_two_faults_are_told_apart() -> None:
    """Lopsided: two exponentials, each with a third moment of 2, so 8. Peaked but even: a mixture of two widths."""
    g = torch.Generator().manual_seed(2)
    lopsided = gaussian_fit(*torch.empty(2, 100_000, dtype=torch.float64).exponential_(generator=g))
    # a third moment g has an error below sqrt((265 - 4) / n), its sixth moment being 265; its square 2 g = 4 times that
    assert lopsided.skewness == pytest.approx(8, abs=4 * 4 * math.sqrt(2 * 261 / 100_000))
    width = torch.where(torch.rand(100_000, generator=g) < 0.5, 0.2, math.sqrt(2 - 0.04)).double()
    peaked = gaussian_fit(*(torch.randn(2, 100_000, generator=g, dtype=torch.float64) * width))
    assert peaked.skewness < 0.01
    # unit variance in all: the gap of the two distribution functions of the squared radius, where it is largest
    radius = torch.linspace(0, 10, 100_001, dtype=torch.float64)
    mixed = 1 - (torch.exp(-radius / 0.08) + torch.exp(-radius / (2 * 1.96))) / 2
    gap = float((mixed - (1 - torch.exp(-radius / 2))).abs().max())
    assert peaked.ks_distance == pytest.approx(gap, abs=2.23 / math.sqrt(100_000))


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**31), images=st.integers(5, 60))
def test_linear_maps_and_order_change_no_misfit(seed: int, images: int) -> None:
    x, y = normals(seed, images)
    found = gaussian_fit(x, y)
    assert 0 < found.ks_distance < 1 and found.skewness >= 0
    order = torch.randperm(images, generator=torch.Generator().manual_seed(seed))
    for other in (gaussian_fit(x[order], y[order]), gaussian_fit(1e-6 * x + 1, 1e3 * y - 2e2 * x), gaussian_fit(y, x)):
        assert other[2:] == pytest.approx(found[2:], rel=1e-5)


def test_bad_inputs_get_a_sentence() -> None:
    x, y = normals(3, 10)
    for arguments in ((x, 2 * x + 1), (x, x * 0), (x, y / 0)):
        with pytest.raises(ValueError, match="line or are not finite"):
            gaussian_fit(*arguments)
    for arguments in ((x, y[:9]), (x[:2], y[:2]), (x[:, None], y[:, None])):
        with pytest.raises(ValueError, match="at least three images"):
            gaussian_fit(*arguments)


def test_the_errors_of_the_misfit_are_its_spread_over_samples() -> None:
    """The bootstrap of one sample against many fresh samples of the same exponentials."""
    g = torch.Generator().manual_seed(0)
    samples = -torch.rand(60, 2, 400, generator=g, dtype=torch.float64).log()
    fits = [gaussian_fit(*sample) for sample in samples]
    found = [misfit_errors(*sample, resamples=60, seed=i) for i, sample in enumerate(samples[:6])]
    for name in ("ks_distance", "skewness"):
        fresh = float(torch.tensor([getattr(fit, name) for fit in fits]).std())
        assert sum(errors[name] for errors in found) / 6 == pytest.approx(fresh, rel=0.5)
