"""Figure 7: what the claims read, and one whole study."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import pearsonr, spearmanr

import handmade
from byov._core.randomness import uniforms
from byov.data.shifts import gaussian_noise
from byov.studies.framework.lab import Lab
from byov.studies.paper import fig7
from byov.studies.paper.fig7 import CLAIMS, KINDS, LEVELS, STRENGTHS, draw, noise_statistics, noisy_variances


def summary(seed: int, kind: str, value: float | None) -> dict[str, Any]:
    names = ("spearman", "growth", "shrinkage")
    row: dict[str, Any] = {"kind": "summary", "seed": seed, "variance": kind, **dict.fromkeys(names, value)}
    return row | {f"{name}.error": 0.01 for name in names}


def test_raw_variances_are_judged_first_and_aligned_ones_apart() -> None:
    rows = [summary(0, "raw", -0.5), summary(0, "aligned", 0.8)]
    assert [claim.effects(rows)[0].value for claim in CLAIMS] == pytest.approx([-0.5, -50, -50, 0.8, 80, 80])
    assert [claim.effects(rows)[0].error for claim in CLAIMS] == pytest.approx([0.01, 1, 1] * 2)
    assert all(not claim.effects([summary(0, kind, None) for kind in KINDS]) for claim in CLAIMS)
    unknown = [summary(0, kind, 0.5) | {"growth.error": None} for kind in KINDS]
    assert [len(claim.effects(unknown)) for claim in CLAIMS] == [1, 0, 1] * 2  # an unknown error is not none


def test_a_study_from_runs_to_rows_and_the_figure(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fig7, "DRAWS", 3)
    monkeypatch.setattr(fig7, "IMAGES", 12)
    lab.seeds = 1
    rows = fig7.results(lab)
    images = [row for row in rows if row["kind"] == "image"]
    assert len(images) == len(KINDS) * len(STRENGTHS) * 12 and all(row[level] > 0 for row in images for level in LEVELS)
    raw, aligned = (row for row in rows if row["kind"] == "summary")
    clean = [row["encoder"] for row in images if row["variance"] == "raw" and row["noise"] == 0]
    strong = [row["encoder"] for row in images if row["variance"] == "raw" and row["noise"] == STRENGTHS[-1]]
    assert raw["encoder.growth"] == pytest.approx(sum(strong) / sum(clean) - 1, abs=1e-4)
    assert aligned["variance"] == "aligned" and -1 <= aligned["spearman"] <= 1
    assert fig7.results(lab) == rows
    panels = draw(rows, "micro").axes
    assert len(panels) == 7 and panels[0].get_xlabel() == "variance, encoder"  # 2 x 3 and the bar
    assert len(panels[0].collections[0].get_offsets()) == len(STRENGTHS) * 12


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
    assert np.isfinite([value for key, value in found.items() if not key.endswith("replicates")]).all()
