"""Priors on other tasks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from byov._core.errors import BadInput
from byov.data import fetch
from byov.data.sources import open_source
from byov.studies.beyond import priors_tasks
from byov.studies.beyond.priors_tasks import BYOL, CLAIMS, PRIORS
from byov.studies.framework.checklist import sections
from byov.studies.framework.lab import Lab


def row(arm: str, task: str, difference: float, error: float, at: str = "means") -> dict[str, Any]:
    found: dict[str, Any] = {"task": task, "arm": arm, "seed": 0, "at": at, "top1": 0.5, "ece": 0.1, "errors": None}
    return found | {"top1.difference": difference, "top1.error": error}


def test_claims_of_readers_are_not_counted_as_the_papers() -> None:
    assert [sections(claim.where) for claim in CLAIMS] == [[]] * len(CLAIMS)


def test_effects_are_averaged_over_tasks_whose_errors_are_independent() -> None:
    arm = PRIORS["teacher_moments"]
    rows = [row(arm, "mnist", -0.02, 0.03), row(arm, "cifar10", -0.06, 0.04), row(arm, "mnist", 9.0, 9.0, "draws")]
    (effect,) = CLAIMS[1].effects(rows)
    assert effect.value == pytest.approx(4.0) and effect.error == pytest.approx(2.5)  # worse, as the paper says
    (little,) = CLAIMS[0].effects([row(PRIORS["teacher_mean"], "mnist", 0.01, 0.01)])
    assert little.value == pytest.approx(1.0) and CLAIMS[0].equal


def test_the_study_from_runs_to_figure(lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    digits = open_source("digits").load("test")
    assert digits.labels is not None
    pixels, labels = np.rot90(digits.images.numpy(), axes=(2, 3)), (digits.labels % 3).numpy()
    path = tmp_path / "turned.npz"
    np.savez(path, x_train=pixels[:200], y_train=labels[:200], x_test=pixels[200:], y_test=labels[200:])
    task = f"npz:{path}"
    monkeypatch.setattr(priors_tasks, "TASKS", (task, "digits", "mnist"))  # the second is the run's own
    monkeypatch.setattr(fetch, "is_there", lambda name: False)
    lab.seeds = 1
    with pytest.raises(BadInput, match=r"finds 1: fetch more with `byov data get mnist`"):
        priors_tasks.runs(lab)
    monkeypatch.setattr(priors_tasks, "FEWEST", 1)
    lab.train(priors_tasks.runs(lab))
    rows = priors_tasks.results(lab)
    assert {r["tasks"] for r in rows} == {task}
    places = [(r["arm"], r["at"]) for r in rows]
    assert places == [(arm, at) for arm in PRIORS.values() for at in ("means", "draws")] + [(BYOL, "means")]
    assert [r["top1.difference"] for r in rows[:2]] == [0, 0] and all(0.2 < r["top1"] < 1 for r in rows)
    with monkeypatch.context() as patch:
        patch.setattr(priors_tasks, "transferred", lambda: None)  # a call with arguments fails
        assert rows == priors_tasks.results(lab)  # from the cache
        patch.setattr("byov.studies.beyond.priors_tasks.TEST", 50)
        with pytest.raises(TypeError):  # it would be made again
            priors_tasks.results(lab)
    figure = priors_tasks.draw(rows, lab.name)
    assert len(figure.axes) == 3
