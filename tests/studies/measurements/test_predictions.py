"""What a run says of its test images: kept whole, and the same as `byov evaluate` says."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from byov.config import Config, Model, Monitor, Optim
from byov.evaluation.named_metrics import class_measures
from byov.inference.load import Run, load
from byov.studies.measurements.predictions import (
    MEASURES,
    Outcomes,
    measures_of,
    outcomes,
    read_outcomes,
    write_outcomes,
)
from byov.training.prepare import prepare


def trained(folder: Path, method: str) -> Run:
    model, optim = Model(width=16, depth=1, heads=2, head_hidden=16, head_output=8), Optim(epochs=1, batch_size=32)
    monitor = Monitor(tensorboard=False)
    config = Config(method=method, images=96, threads=1, device="cpu", model=model, optim=optim, monitor=monitor)
    prepare(config, folder, say=lambda text: None).run()
    return load(folder)


def test_random_weights_have_three_places_and_others_one(tmp_path: Path) -> None:
    byov = outcomes(trained(tmp_path / "byov", "byov"), draws=2)
    byol = outcomes(trained(tmp_path / "byol", "byol"), draws=2)
    assert list(byov.probabilities) == ["means", "draws", "draws_unaligned"] and list(byol.probabilities) == ["means"]
    assert torch.equal(byov.labels, byol.labels)
    for p in (*byov.probabilities.values(), *byol.probabilities.values()):
        assert p.shape == (len(byov.labels), 10) and p.dtype == torch.float32
        assert torch.allclose(p.sum(1), torch.ones(len(p)), atol=1e-5)
    assert not torch.equal(byov.probabilities["means"], byov.probabilities["draws"])
    assert measures_of(byov.probabilities["means"], byov.labels)["top1"] > 0.2  # it does know something


def test_they_come_back_for_the_same_settings_only(tmp_path: Path) -> None:
    p = torch.rand(6, 3).softmax(1)
    written = Outcomes(torch.tensor([0, 1, 2, 0, 1, 2]), {"means": p, "draws": p.flip(0)})
    path = tmp_path / "results" / "outcomes.safetensors"
    settings = {"draws": 20, "test": 6}
    assert read_outcomes(path, settings) is None
    write_outcomes(path, written, settings)
    found = read_outcomes(path, {"test": 6, "draws": 20})
    assert found is not None and torch.equal(found.labels, written.labels)
    assert list(found.probabilities) == ["means", "draws"]
    assert all(torch.equal(found.probabilities[at], written.probabilities[at]) for at in ("means", "draws"))
    assert read_outcomes(path, settings | {"draws": 30}) is None
    path.write_bytes(path.read_bytes()[:-4])
    assert read_outcomes(path, settings) is None


def test_measures_have_the_names_and_values_of_the_evaluation() -> None:
    p, labels = torch.rand(50, 7).softmax(1), torch.arange(50) % 7
    found, all_of_them = measures_of(p, labels), class_measures(p, labels)
    assert tuple(found) == MEASURES
    assert found == pytest.approx({name: all_of_them[name] for name in MEASURES})
