"""Arms beside a reference: rows of tiny runs, and effects of rows made by hand."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch

from byov.evaluation.evaluate import evaluate
from byov.studies.framework import lab as labs
from byov.studies.framework.claims import Effect
from byov.studies.framework.compare import compare, effects
from byov.studies.framework.lab import Lab
from byov.studies.measurements.predictions import MEASURES, Outcomes


def row(arm: str, seed: int, at: str, ece: float, reference: float, error: float) -> dict[str, Any]:
    return {"arm": arm, "seed": seed, "at": at, "ece": ece, "ece.difference": ece - reference, "ece.error": error}


ROWS = [
    row("byol", 0, "means", 0.10, 0.10, 0.0),
    row("byov", 0, "means", 0.07, 0.10, 0.003),
    row("byov", 0, "draws", 0.05, 0.10, 0.004),
    row("byol", 1, "means", 0.20, 0.20, 0.0),
    row("byov", 1, "means", 0.22, 0.20, 0.006),
]


def test_effects_are_in_points_and_signed_as_the_paper_has_it() -> None:
    found = effects(ROWS, "byov", "ece", sign=-1)
    assert [e.seed for e in found] == [0, 1]
    assert [e.value for e in found] == pytest.approx([3, -2])
    assert [e.error for e in found] == pytest.approx([0.3, 0.6])


def test_effects_are_of_one_place() -> None:
    (found,) = effects(ROWS, "byov", "ece", at="draws", sign=-1)  # of seed 1 there are no draws
    assert found == Effect(0, pytest.approx(5), pytest.approx(0.4))
    assert effects(ROWS, "nobody", "ece") == []


def test_runs_with_other_test_images_are_not_set_beside_each_other(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    p, labels = torch.full((4, 3), 1 / 3), torch.tensor([0, 1, 2, 0])
    found = {"byov": Outcomes(labels, {"means": p}), "byol": Outcomes(labels.flip(0).roll(1), {"means": p})}
    monkeypatch.setattr(lab, "outcomes", lambda config: found[config.method])
    arms = {method: lambda seed, method=method: lab.config(method, seed) for method in found}
    lab.seeds = 1
    with pytest.raises(ValueError, match="differ in their test images"):
        compare(lab, arms, "byol")


def test_arms_of_real_runs(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    arms = {method: lambda seed, method=method: lab.config(method, seed) for method in ("byol", "byov")}
    lab.seeds = 1
    rows = compare(lab, arms, "byol", {"byov": {"prior": "standard"}})
    json.dumps(rows, allow_nan=False)
    assert [(r["arm"], r["at"]) for r in rows] == [
        ("byol", "means"),
        ("byov", "means"),
        ("byov", "draws"),
        ("byov", "draws_unaligned"),
    ]
    byol, byov, draws, _ = rows
    assert byol["median_sigma"] is None and byov["median_sigma"] == pytest.approx(math.exp(-5), rel=0.5)
    assert byov["prior"] == "standard" and "prior" not in byol
    for name in MEASURES:
        assert byol[f"{name}.difference"] == byol[f"{name}.error"] == 0
        assert draws[f"{name}.difference"] == pytest.approx(draws[name] - byol[name])
    assert byov["brier.error"] > 0
    monkeypatch.setattr(labs, "outcomes", None)  # they are not made again
    assert torch.equal(lab.outcomes(lab.config("byov", 0)).labels, lab.outcomes(lab.config("byol", 0)).labels)
    known = evaluate(lab.run(lab.config("byov", 0)), draws=2, say=lambda text: None)
    for name in MEASURES:
        assert byov[name] == pytest.approx(known[name], abs=1e-6)
        assert draws[name] == pytest.approx(known[f"draws.{name}"], abs=1e-6)
