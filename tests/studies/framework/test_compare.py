"""Arms compared with a reference: rows of tiny runs, effects of rows made by hand, and cached predictions."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from byov.config import Config, Model, Monitor, Optim
from byov.evaluation.evaluate import evaluate
from byov.evaluation.measures import class_measures
from byov.evaluation.probe import subject_of
from byov.inference.run import Run, load
from byov.studies.framework import compare as comparing
from byov.studies.framework.claims import Effect
from byov.studies.framework.compare import (
    MEASURES,
    Predictions,
    compare,
    effects,
    largest_rise,
    measures_of,
    predict,
    predictions,
    read_predictions,
    write_predictions,
)
from byov.studies.framework.lab import Lab
from byov.training.prepare import prepare


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


def test_runs_with_other_test_images_are_not_compared(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    p, labels = torch.full((4, 3), 1 / 3), torch.tensor([0, 1, 2, 0])
    found = {"byov": Predictions(labels, {"means": p}), "byol": Predictions(labels.flip(0).roll(1), {"means": p})}
    monkeypatch.setattr(comparing, "predictions", lambda lab, config: found[config.method])
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
    assert byol["median_sigma"] is None and 0 < byov["median_sigma"] < 1
    assert byov["prior"] == "standard" and "prior" not in byol
    for name in MEASURES:
        assert byol[f"{name}.difference"] == byol[f"{name}.error"] == 0
        assert draws[f"{name}.difference"] == pytest.approx(draws[name] - byol[name])
    assert byov["brier.error"] > 0
    monkeypatch.setattr(comparing, "predict", None)  # they are not made again
    byov_again, byol_again = (predictions(lab, lab.config(method, 0)) for method in ("byov", "byol"))
    assert torch.equal(byov_again.labels, byol_again.labels)
    known = evaluate(lab.run(lab.config("byov", 0)), draws=2, say=lambda text: None)
    for name in MEASURES:
        assert byov[name] == pytest.approx(known[name], abs=1e-6)
        assert draws[name] == pytest.approx(known[f"draws.{name}"], abs=1e-6)


def trained(folder: Path, method: str) -> Run:
    model, optim = Model(width=16, depth=1, heads=2, head_hidden=16, head_output=8), Optim(epochs=1, batch_size=32)
    monitor = Monitor(tensorboard=False)
    config = Config(method=method, images=96, threads=1, device="cpu", model=model, optim=optim, monitor=monitor)
    prepare(config, folder, say=lambda text: None).run()
    return load(folder)


def test_random_weights_have_three_places_and_others_one(tmp_path: Path) -> None:
    byov = predict(subject_of(trained(tmp_path / "byov", "byov")), draws=2)
    byol = predict(subject_of(trained(tmp_path / "byol", "byol")), draws=2)
    assert list(byov.probabilities) == ["means", "draws", "draws_unaligned"] and list(byol.probabilities) == ["means"]
    assert torch.equal(byov.labels, byol.labels)
    for p in (*byov.probabilities.values(), *byol.probabilities.values()):
        assert p.shape == (len(byov.labels), 10) and p.dtype == torch.float32
        assert torch.allclose(p.sum(1), torch.ones(len(p)), atol=1e-5)
    assert not torch.equal(byov.probabilities["means"], byov.probabilities["draws"])
    assert measures_of(byov.probabilities["means"], byov.labels)["top1"] > 0.2  # it does know something


def test_they_come_back_for_the_same_settings_only(tmp_path: Path) -> None:
    p = torch.rand(6, 3).softmax(1)
    written = Predictions(torch.tensor([0, 1, 2, 0, 1, 2]), {"means": p, "draws": p.flip(0)})
    path = tmp_path / "results" / "outcomes.safetensors"
    settings = {"draws": 20, "test": 6}
    assert read_predictions(path, settings) is None
    write_predictions(path, written, settings)
    found = read_predictions(path, {"test": 6, "draws": 20})
    assert found is not None and torch.equal(found.labels, written.labels)
    assert list(found.probabilities) == ["means", "draws"]
    assert all(torch.equal(found.probabilities[at], written.probabilities[at]) for at in ("means", "draws"))
    assert read_predictions(path, settings | {"draws": 30}) is None
    path.write_bytes(path.read_bytes()[:-4])
    assert read_predictions(path, settings) is None


def test_measures_have_the_names_and_values_of_the_evaluation() -> None:
    p, labels = torch.rand(50, 7).softmax(1), torch.arange(50) % 7
    found, all_of_them = measures_of(p, labels), class_measures(p, labels)
    assert tuple(found) == MEASURES
    assert found == pytest.approx({name: all_of_them[name] for name in MEASURES})


def test_a_spike_is_found_on_a_slow_trend_and_at_any_scale() -> None:
    trend = [100 * 0.99**i for i in range(100)]
    assert largest_rise(trend) == pytest.approx(5.5 * math.log(0.99), rel=1e-2)  # each lies below the ten before it
    spiky = [value * (8 if i == 60 else 1) for i, value in enumerate(trend)]
    assert largest_rise(spiky) == pytest.approx(math.log(8) + 5.5 * math.log(0.99), rel=1e-2)
    assert largest_rise([1000 * value for value in spiky]) == pytest.approx(largest_rise(spiky))


def test_the_start_of_a_trace_is_no_spike_and_a_short_one_has_none() -> None:
    assert largest_rise([50.0, 20.0, *[1.0] * 20]) == 0.0
    assert largest_rise([1.0] * 10) is None
    assert largest_rise([1.0] * 20 + [0.0]) is None
