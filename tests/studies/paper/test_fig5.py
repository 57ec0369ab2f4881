"""Figure 5: what the claims read, and one whole study."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import handmade
from byov.evaluation.predictive import predict_classes
from byov.evaluation.probe import fit_probe
from byov.inference.run import ReferenceSet
from byov.studies.framework.claims import verdict
from byov.studies.framework.lab import Lab
from byov.studies.paper import fig5
from byov.studies.paper.fig5 import CLAIMS, CLEAN, SHIFTS, draw, probabilities_of_draws


def rows(rate: float, drift: float, worst: float = 0.0) -> list[dict[str, Any]]:
    """A std that falls as draws^-rate, and a mean that moves by `drift` from 30 to 50 draws; blur does `worst` more."""
    return [
        {
            "seed": seed,
            "shift": shift,
            "draws": draws,
            "mean": 0.8 + (drift + worst * (shift == "blur")) * (draws - 30) / 20 + 1e-4 * seed,
            "std": (0.03 + 1e-4 * seed) * draws**-rate,
            "image_std": 0.1 * draws**-rate,
        }
        for seed in (0, 1)
        for shift in (CLEAN, *SHIFTS)
        for draws in range(1, 51)
    ]


def test_monte_carlos_rate_is_shown_and_no_fall_is_opposite() -> None:
    assert [verdict(claim, rows(0.5, 0.0)).word for claim in CLAIMS] == ["shown"] * 3
    assert CLAIMS[0].effects(rows(0.5, 0.0))[0].value == pytest.approx(1 - 100 * 0.03 / 50**0.5)
    assert [verdict(claim, rows(0.0, -0.02)).word for claim in CLAIMS] == ["opposite"] * 3


def test_one_shift_that_moves_is_reported() -> None:
    moved = [claim.effects(rows(0.5, 0.0, worst=-0.02))[0].value for claim in CLAIMS]
    assert moved[1] == pytest.approx(-0.4) and moved[2] == pytest.approx(2)


def test_seeds_that_move_to_either_side_do_not_cancel() -> None:
    up, down = rows(0.5, 0.0, worst=0.02), rows(0.5, 0.0, worst=-0.02)
    found = [row for row in up if row["seed"] == 0] + [row for row in down if row["seed"] == 1]
    assert [verdict(claim, found).word for claim in CLAIMS[1:]] == ["cannot tell", "opposite"]


def test_the_figure_has_a_line_for_each_shift() -> None:
    panels = draw(rows(0.5, 0.0), "micro").axes
    assert len(panels) == 3 and all(len(axes.lines) == 5 for axes in panels)


def test_a_study_from_runs_to_rows(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("DRAWS", 6), ("USUAL", 4), ("IMAGES", 40)):
        monkeypatch.setattr(fig5, name, value)
    lab.seeds = 1
    found = fig5.results(lab)
    assert [(row["shift"], row["draws"]) for row in found[:7]] == [(CLEAN, k) for k in range(1, 7)] + [(SHIFTS[0], 1)]
    assert len(found) == 5 * 6 and all(0 < row["mean"] <= 1 and row["std"] > 0 for row in found)
    assert fig5.results(lab) == found
    assert all(len(claim.effects(found)) == 1 for claim in CLAIMS)


def test_the_mean_over_draws_is_the_streaming_mean(tmp_path: Path) -> None:
    run = handmade.run(tmp_path, handmade.Affine(4), sigma=0.2)
    images = handmade.images(40, seed=3)
    probe = fit_probe(run.features(images), torch.arange(40) % 3)
    found = probabilities_of_draws(ReferenceSet(run), probe, images, draws=5)
    assert found.shape == (5, 40, 3) and float(found.std(dim=0).mean()) > 0
    expected = predict_classes(ReferenceSet(run), probe, images, draws=5).aligned
    assert torch.allclose(found.double().mean(0), expected.mean, atol=1e-6)
