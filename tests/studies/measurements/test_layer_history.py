"""A run's log of its training, from files made by hand."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from byov.studies.framework.compare import gradient_spike
from byov.studies.measurements.layer_history import layer_history, log_distance, log_ratios


def write(path: Path, rows: list[dict]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def layer(name: str, epoch: int) -> dict:
    measures = {"sigma_mean": 0.1 + epoch, "sigma_max": 1.0, "snr_mean": 2.0, "snr_max": 3.0}
    return {"epoch": epoch, "step": 3 * epoch, "layer": name, "weights": 4, "sigma_median": 0.1, **measures}


def test_weights_without_biases_at_evenly_spaced_epochs(tmp_path: Path) -> None:
    names = ("encoder.stem.weight", "encoder.stem.bias", "encoder.positions", "projector.0.weight")
    write(tmp_path / "posterior.jsonl", [layer(name, epoch) for epoch in range(46) for name in names])
    rows = layer_history(tmp_path, epochs=10)
    assert {row["layer"] for row in rows} == {name for name in names if "bias" not in name}
    assert [row["epoch"] for row in rows[::3]] == [0, 4, 8, 12, 16, 20, 24, 28, 32, 36, 40, 44, 45]  # first and last
    assert rows[3] == {k: v for k, v in layer(names[0], 4).items() if k not in ("step", "weights", "sigma_median")}
    assert len(layer_history(tmp_path, epochs=100)) == 3 * 46


def test_a_run_without_random_weights_has_no_layers_and_a_gradient(tmp_path: Path) -> None:
    norms = [1.0] * 20 + [4.0] + [1.0] * 5
    write(tmp_path / "metrics.jsonl", [{"step": i, "grad_norm": norm} for i, norm in enumerate(norms)])
    assert layer_history(tmp_path) == []
    assert gradient_spike(tmp_path) == pytest.approx(math.log(4))


def test_a_layer_twice_as_large_and_one_half_as_large_are_both_a_factor_of_two_away() -> None:
    a, b = {"one": 2.0, "two": 0.5, "three": 3.0}, {"one": 1.0, "two": 1.0, "three": 3.0}
    assert log_ratios(a, b) == pytest.approx({"one": math.log(2), "two": -math.log(2), "three": 0.0})
    assert log_distance(a, b) == pytest.approx(2 / 3 * math.log(2))
    assert log_distance(a, b) == log_distance(b, a)
    assert log_distance({k: 10 * v for k, v in a.items()}, a) == pytest.approx(math.log(10))


def test_only_layers_that_both_have_are_compared() -> None:
    assert log_ratios({"one": 1.0, "two": 2.0}, {"two": 1.0, "three": 5.0}) == pytest.approx({"two": math.log(2)})
    with pytest.raises(ValueError, match="no layer in common"):
        log_distance({"one": 1.0}, {"two": 1.0})
    with pytest.raises(ValueError, match="positive"):
        log_distance({"one": 0.0}, {"one": 1.0})
