"""Figure 7: what the claims read, and one whole study."""

from __future__ import annotations

from typing import Any

import pytest

from byov.studies.framework.lab import Lab
from byov.studies.measurements.variance_under_noise import STRENGTHS
from byov.studies.paper import fig7
from byov.studies.paper.fig7 import CLAIMS, KINDS, LEVELS, draw


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


def test_a_study_from_runs_to_rows_and_the_picture(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
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
