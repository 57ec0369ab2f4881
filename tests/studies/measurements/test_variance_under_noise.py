"""Variance of three levels under noise: against the closed form of an affine encoder, scipy, and numbers by hand."""

from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.stats import pearsonr, spearmanr

import handmade
from byov._core.randomness import uniforms
from byov.data.shifts import gaussian_noise
from byov.studies.measurements.variance_under_noise import STRENGTHS, noise_statistics, noisy_variances


def test_the_variance_of_an_affine_encoder_is_known(tmp_path: Path) -> None:
    """Weights N(mean, sigma^2) give outputs of variance sigma^2 (|x|^2 + 1), x being the noisy image."""
    run = handmade.student_run(tmp_path, sigma=0.05)
    found = noisy_variances(run, draws=100, images=10)
    assert set(found) == {"raw", "aligned"} and set(found["raw"]) == {"encoder", "projector", "predictor"}
    ids = torch.arange(10) * 120 // 10
    for strength, variance in zip(STRENGTHS, found["raw"]["encoder"], strict=True):
        noisy = gaussian_noise(handmade.images(120)[ids], strength, lambda count: uniforms(ids, count))
        expected = 0.05**2 * (handmade.pixels(noisy).square().sum(1) + 1)
        assert variance.numpy() == pytest.approx(expected.numpy(), rel=4 * (2 / (6 * 100)) ** 0.5)
    assert float(found["aligned"]["encoder"].mean()) < float(found["raw"]["encoder"].mean())


def made(images: int = 80) -> dict[str, torch.Tensor]:
    """Three levels with known growth: from mean 1 to 3, to 2 and to 4."""
    g = torch.Generator().manual_seed(0)
    common = torch.rand(len(STRENGTHS), images, generator=g, dtype=torch.float64) - 0.5
    grown = torch.linspace(0, 1, len(STRENGTHS), dtype=torch.float64)[:, None]
    return {
        name: 1 + (rise - 1) * grown + common * (1 - shrunk * grown)
        for name, rise, shrunk in (("a", 3, 0.5), ("b", 2, 0.8), ("c", 4, -0.5))
    }


def test_statistics_are_scipys_and_the_least_of_all() -> None:
    levels = made()
    found = noise_statistics(levels, resamples=50)
    flat = {name: level.flatten().numpy() for name, level in levels.items()}
    assert found["a_b.spearman"] == pytest.approx(spearmanr(flat["a"], flat["b"]).statistic)
    assert found["b_c.pearson"] == pytest.approx(pearsonr(flat["b"], flat["c"]).statistic)
    assert found["clean_spearman"] == pytest.approx(1)  # without noise, all levels are the same
    for statistic in ("pearson", "spearman", "growth", "shrinkage"):
        of_each = [value for key, value in found.items() if key.endswith(f".{statistic}")]
        assert len(of_each) == 3 and found[statistic] == min(of_each)
    first, last = levels["b"][0].numpy(), levels["b"][-1].numpy()
    assert found["b.growth"] == found["growth"] == pytest.approx(last.mean() / first.mean() - 1)
    assert found["b.shrinkage"] == pytest.approx(1 - last.std() / first.std())
    assert found["c.shrinkage"] == found["shrinkage"] < 0 < found["b.shrinkage"]


def test_the_error_is_over_images_not_over_their_noisy_copies() -> None:
    """All strengths alike: six times the points, but the error of a correlation of the images alone."""
    g = torch.Generator().manual_seed(1)
    x, y = torch.rand(2, 100, generator=g, dtype=torch.float64) + 1
    levels = {name: v.expand(len(STRENGTHS), -1) for name, v in (("a", x), ("b", y), ("c", x + y))}
    found = noise_statistics(levels, resamples=400)
    assert found["a_b.pearson.error"] == pytest.approx(0.1, abs=0.02)  # 1 / sqrt(images)
    assert found["growth"] == found["growth.error"] == 0
    assert np.isfinite(list(found.values())).all()
