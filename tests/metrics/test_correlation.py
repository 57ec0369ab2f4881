"""Correlations and the joint Gaussian against scipy and by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chi2, kstest, pearsonr, rankdata, spearmanr
from torch import Tensor

from byov._core.randomness import generator
from byov.metrics import bootstrap, gaussian_fit, partial_pearson, partial_spearman, pearson, resampling, spearman
from byov.metrics.correlation import misfit_replicates
from byov.metrics.resampling import standard_errors


def variables(seed: int, images: int = 200, ties: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """x and y share a part of z, and another part with each other."""
    g = torch.Generator().manual_seed(seed)
    z, own, x, y = torch.randn(4, images, generator=g, dtype=torch.float64)
    x, y = x + z + own, y - z + own
    return (x.round(), y.round(), z.round()) if ties else (x, y, z)


def partial_by_least_squares(x: Tensor, y: Tensor, z: Tensor) -> float:
    design = np.stack([np.ones(len(z)), z], 1)
    left = [v - design @ np.linalg.lstsq(design, v)[0] for v in (x.numpy(), y.numpy())]
    return float(pearsonr(*left).statistic)


@pytest.mark.parametrize("ties", [False, True])
def test_equal_scipy(ties: bool) -> None:
    x, y, z = variables(0, ties=ties)
    assert float(pearson(x, y)) == pytest.approx(pearsonr(x, y).statistic, abs=1e-12)
    assert float(spearman(x, y)) == pytest.approx(spearmanr(x, y).statistic, abs=1e-12)
    assert float(partial_pearson(x, y, z)) == pytest.approx(partial_by_least_squares(x, y, z), abs=1e-12)
    ranks = (torch.from_numpy(rankdata(v)) for v in (x, y, z))
    assert float(partial_spearman(x, y, z)) == pytest.approx(partial_by_least_squares(*ranks), abs=1e-12)


def test_partial_by_the_formula_of_three_correlations() -> None:
    x, y, z = variables(1)
    xy, xz, yz = (float(pearson(a, b)) for a, b in ((x, y), (x, z), (y, z)))
    assert float(partial_pearson(x, y, z)) == pytest.approx(
        (xy - xz * yz) / math.sqrt((1 - xz**2) * (1 - yz**2)), abs=1e-12
    )


def test_what_the_third_explains_is_gone() -> None:
    """z + own and z + own: correlated 1/2, but not given z. A correlation r has the error (1 - r^2) / sqrt(n)."""
    z, a, b = torch.randn(3, 2000, generator=torch.Generator().manual_seed(0))
    assert float(pearson(z + a, z + b)) == pytest.approx(0.5, abs=4 * 0.75 / math.sqrt(2000))
    assert abs(float(partial_pearson(z + a, z + b, z))) < 4 / math.sqrt(2000)


def test_weights_repeat_images() -> None:
    x, y, z = variables(2, 60, ties=True)
    counts = torch.randint(0, 4, (3, 60), generator=torch.Generator().manual_seed(0))
    for statistic, given_variables in (
        (pearson, (x, y)),
        (spearman, (x, y)),
        (partial_pearson, (x, y, z)),
        (partial_spearman, (x, y, z)),
    ):
        one_by_one = [float(statistic(*(v.repeat_interleave(row) for v in given_variables))) for row in counts]
        assert statistic(*given_variables, weights=counts).tolist() == pytest.approx(one_by_one, abs=1e-12)


def test_undefined_is_nan_and_not_rounding() -> None:
    x, y, z = variables(3)
    constant = torch.full_like(x, 0.1)
    assert all(math.isnan(float(statistic(x, constant))) for statistic in (pearson, spearman))
    assert math.isnan(float(partial_pearson(x, 3 * z + 1, z)))  # nothing is left of the second
    assert math.isnan(float(partial_spearman(x, z.exp(), z)))
    assert float(partial_pearson(x, y, constant)) == pytest.approx(float(pearson(x, y)), abs=1e-12)


def test_bootstrap_is_the_quantiles_of_plain_resamples(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y, _ = variables(4, 50, ties=True)
    drawn = torch.randint(50, (40, 50), generator=generator(5))
    plain = [spearmanr(x[row], y[row]).statistic for row in drawn]
    for block in (1, 120, 1 << 20):
        monkeypatch.setattr(resampling, "BLOCK", block)
        found = bootstrap(spearman, x, y, resamples=40, level=0.8, seed=5)
        assert found.value == pytest.approx(float(spearman(x, y)))
        assert (found.low, found.high) == pytest.approx(np.quantile(plain, [0.1, 0.9]).tolist(), abs=1e-12)


def test_bootstrap_against_the_known_error_of_a_normal_sample() -> None:
    """Of two normals, r has the standard error (1 - r^2) / sqrt(n); 2,000 resamples know it within a few percent."""
    a, b = torch.randn(2, 3000, generator=torch.Generator().manual_seed(1))
    found = bootstrap(pearson, a + b, b, seed=1)
    error = (1 - found.value**2) / math.sqrt(3000)
    assert (found.high - found.low) / (2 * 1.96) == pytest.approx(error, rel=0.15)
    assert found.low < found.value < found.high
    assert bootstrap(pearson, a + b, b, seed=1) == found != bootstrap(pearson, a + b, b, seed=2)


def test_bootstrap_leaves_out_resamples_of_one_image_only() -> None:
    x = torch.tensor([0.0, 1.0])  # half of the resamples take one image twice: nothing varies there
    assert bootstrap(pearson, x, x, resamples=100) == (1, 1, 1)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**31), images=st.integers(4, 50))
def test_properties(seed: int, images: int) -> None:
    x, y, z = variables(seed, images)
    order = torch.randperm(images, generator=torch.Generator().manual_seed(seed))
    linear = {pearson: (x, y), partial_pearson: (x, y, z)}
    ranked = {spearman: (x, y), partial_spearman: (x, y, z)}
    for statistic, given_variables in (linear | ranked).items():
        value = float(statistic(*given_variables))
        if math.isnan(value):
            continue  # few images: the ranks of one may follow from those of the third
        assert -1 <= value <= 1
        assert float(statistic(*(v[order] for v in given_variables))) == pytest.approx(value, abs=1e-9)
        assert float(statistic(y, x, *given_variables[2:])) == pytest.approx(value, abs=1e-12)
        assert float(statistic(-x, *given_variables[1:])) == pytest.approx(-value, abs=1e-9)
        assert float(statistic(*(3 * v - 7 for v in given_variables))) == pytest.approx(value, abs=1e-9)
        if statistic in ranked:
            assert float(statistic(*((v / 5).exp() for v in given_variables))) == pytest.approx(value, abs=1e-12)


def test_bad_inputs_get_a_sentence_of_correlation() -> None:
    x, y, z = variables(5, 10)
    for arguments, says in (
        ((x, y[:9], z), "one shape"),
        ((x[:1], y[:1], z[:1]), "at least two"),
        ((x, y, z / 0), "finite"),
    ):
        for statistic in (partial_pearson, partial_spearman):
            with pytest.raises(ValueError, match=says):
                statistic(*arguments)
    with pytest.raises(ValueError, match="resamples = 0"):
        bootstrap(pearson, x, y, resamples=0)


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


def test_bad_inputs_get_a_sentence_of_the_gaussian() -> None:
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
    found = [standard_errors(misfit_replicates(*sample, resamples=60, seed=i)) for i, sample in enumerate(samples[:6])]
    for name in ("ks_distance", "skewness"):
        fresh = float(torch.tensor([getattr(fit, name) for fit in fits]).std())
        assert sum(errors[name] for errors in found) / 6 == pytest.approx(fresh, rel=0.5)
