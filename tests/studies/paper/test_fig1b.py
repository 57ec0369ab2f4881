"""Figure 1b: which runs are compared, what the claims read, and one whole study."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from byov.studies.framework.claims import verdict
from byov.studies.framework.lab import Lab
from byov.studies.framework.replicates import unpacked
from byov.studies.paper import fig1b
from byov.studies.paper.fig1b import CLAIMS, CORRELATIONS, PREFIXES, draw


def summary(seed: int, correlation: float | None, misfit: float) -> dict[str, Any]:
    row: dict[str, Any] = {"kind": "summary", "seed": seed}
    for prefix in PREFIXES:
        row |= {prefix + name: correlation for name in CORRELATIONS}
        row |= {f"{prefix}{name}.error": 0.01 for name in CORRELATIONS}
        row |= {f"{prefix}ks_distance": misfit, f"{prefix}skewness": 40 * misfit}
    row |= {f"ceiling.{name}": 0.9 for name in CORRELATIONS}
    return row | {"ks_distance.error": 0.001, "skewness.error": 0.04}


def words(*summaries: dict[str, Any]) -> list[str]:
    return [verdict(claim, list(summaries)).word for claim in CLAIMS]


def test_claims_ask_for_a_small_misfit_and_for_correlation() -> None:
    assert words(summary(0, 0.5, 0.03), summary(1, 0.52, 0.032)) == ["shown"] * 5
    assert words(summary(0, -0.5, 0.2), summary(1, -0.52, 0.21)) == ["opposite"] * 5
    assert words(summary(0, 0.01, 0.1), summary(1, -0.01, 0.1)) == ["not shown"] * 5
    assert [len(claim.effects([summary(0, None, 0.1)])) for claim in CLAIMS] == [1, 1, 0, 0, 0]  # undefined: no effect
    low = [summary(seed, 0.01, 0.1) | {"ceiling.pearson": 0.3} for seed in (0, 1)]  # two supervised models do not agree
    assert words(low[0], low[1] | {"pearson": -0.01})[2] == "no room"
    unknown = summary(0, 0.5, 0.1) | {"spearman.error": None, "skewness.error": None}
    assert [len(claim.effects([unknown])) for claim in CLAIMS] == [1, 0, 1, 0, 1]  # an unknown error is not none


def test_another_seed_of_the_supervised_model_is_the_ceiling(lab: Lab) -> None:
    assert [(c.method, c.seed) for c in fig1b.runs(lab)] == [
        ("byov", 0),
        ("byov", 1),
        ("supervised-bbb", 0),
        ("supervised-bbb", 1),
        ("supervised-bbb", 2),
    ]
    assert all((c.posterior.beta_start, c.posterior.beta_end) == (0, 1) for c in fig1b.runs(lab))


def test_the_figure_has_points_density_and_ellipses() -> None:
    g = torch.Generator().manual_seed(0)
    x = torch.rand(30, 3, generator=g).tolist()
    images = [
        {"kind": "image", "seed": seed, "byov": a, "supervised": b, "second": c, "confidence": 0.5}
        for seed in (0, 1)
        for a, b, c in x
    ]
    figure = draw([summary(0, 0.25, 0.1), summary(1, 0.75, 0.1), *images], "micro")
    own, ceiling, _ = figure.axes
    assert len(own.collections[0].get_offsets()) == 30  # of one seed
    assert len(own.patches) == len(ceiling.patches) == 2 and "Pearson 0.50" in own.get_title()


def test_a_study_from_runs_to_rows(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fig1b, "DRAWS", 3)
    monkeypatch.setattr(fig1b, "IMAGES", 120)
    monkeypatch.setattr(fig1b, "SHOWN", 100)
    lab.seeds = 1
    rows = fig1b.results(lab)
    (row,) = [row for row in rows if row["kind"] == "summary"]
    images = [row for row in rows if row["kind"] == "image"]
    assert len(images) == 60 and all(image["supervised"] >= 0 for image in images)  # every other of 120
    assert -1 <= row["pearson"] <= 1 and row["pearson.error"] > 0 and row["ks_distance.error"] > 0
    assert row["ceiling.spearman"] != row["spearman"]
    for name in (*CORRELATIONS, "ks_distance", "skewness"):
        assert len(unpacked(row[f"{name}.replicates"])) >= 200
    assert fig1b.results(lab) == rows  # from the cache
    assert draw(rows, "micro").axes
