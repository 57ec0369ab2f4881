"""Runs are trained once, named by what they learn from, and measured once a setting."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from byov._core.errors import BadInput, TrainingFailed
from byov.config import Config
from byov.data.sources import open_source
from byov.studies.framework import lab as labs
from byov.studies.framework.lab import Lab, Scale, identity

QUICK = {"optim.epochs": 1, "model.width": 16, "model.depth": 1, "model.heads": 2, "model.head_hidden": 16}


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Lab:
    monkeypatch.setitem(labs.SCALES, "tiny", Scale("digits", "digits", 64, 1, 2, "seconds"))
    return Lab(tmp_path, "tiny", say=lambda text: None)


def test_a_run_is_named_by_what_it_learns_from() -> None:
    config = Config()
    hotter = replace(config.posterior, temperature=0.5)
    assert identity(config) == identity(replace(config, threads=7, device="cpu"))
    assert identity(config) != identity(replace(config, seed=1))
    assert identity(config) != identity(replace(config, posterior=hotter))
    for method in ("byol", "supervised"):  # nothing is random there
        assert identity(replace(config, method=method)) == identity(replace(config, method=method, posterior=hotter))


def test_a_config_is_the_scales_recipe_with_changes(lab: Lab) -> None:
    config = lab.config("byol", 3, {"optim.epochs": 2, "posterior.temperature": 0.5})
    assert (config.data, config.images, config.method, config.seed) == ("digits", 64, "byol", 3)
    assert (config.optim.epochs, config.posterior.temperature) == (2, 0.5)
    with pytest.raises(BadInput, match=r"no setting 'optim\.epoch'"):
        lab.config("byol", 0, {"optim.epoch": 2})


def test_what_is_trained_is_not_trained_again(lab: Lab) -> None:
    lab.jobs = 2
    configs = [lab.config("byol", seed, QUICK) for seed in (0, 1, 0)]  # the third is the first
    assert not lab.is_trained(configs[0])
    lab.train(configs)
    assert len(list((lab.folder / "runs").glob("*/summary.json"))) == 2
    before = (lab.path(configs[0]) / "summary.json").stat().st_mtime_ns
    lab.train(configs)
    assert (lab.path(configs[0]) / "summary.json").stat().st_mtime_ns == before
    assert lab.run(configs[1]).config.seed == 1


def test_runs_are_started_as_one_says(lab: Lab, tmp_path: Path) -> None:
    config = lab.config("byol", 0, QUICK)
    lab.launch = [sys.executable, "-c", "import sys; print(sys.argv[1:]); sys.exit(3)"]
    with pytest.raises(TrainingFailed, match=r"'train', .*--threads"):
        lab.train([config])


def test_a_run_that_fails_is_told_with_its_last_words(lab: Lab) -> None:
    with pytest.raises(TrainingFailed, match=r"heads.*tells more"):
        lab.train([lab.config("byol", 0, {**QUICK, "model.heads": 3})])


def test_a_run_that_fails_stops_no_other(lab: Lab) -> None:
    bad, good = lab.config("byol", 0, {**QUICK, "model.heads": 3}), lab.config("byol", 0, QUICK)
    with pytest.raises(TrainingFailed, match="heads"):
        lab.train([bad, good])
    assert lab.is_trained(good) and not lab.is_trained(bad)


def test_a_measure_is_kept_with_its_settings(lab: Lab) -> None:
    config, calls = lab.config("byol", 0, QUICK), []

    def measure(run: object) -> dict[str, int]:
        calls.append(run)
        return {"found": len(calls), "undefined": [{"x": float("nan")}]}

    assert lab.measured("m", config, measure, {"draws": 2})["found"] == 1
    assert lab.measured("m", config, measure, {"draws": 2})["found"] == 1
    found = lab.measured("m", config, measure, {"draws": 3})
    assert found["found"] == 2 and found["undefined"] == [{"x": None}]  # as JSON has it
    assert json.loads((lab.path(config) / "results" / "m.json").read_text())["settings"] == {"draws": 3}


def test_unknown_scales_and_silly_numbers_are_bad_input(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="no scale 'huge'"):
        Lab(tmp_path, "huge")
    with pytest.raises(BadInput, match="at least 1"):
        Lab(tmp_path, "micro", seeds=0)
    with pytest.raises(BadInput, match="imagenet"):
        Lab(tmp_path, "paper")  # no such folder here


def test_a_source_that_is_not_here_is_told_before_anything_is_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BYOV_DATA", str(tmp_path / "nothing"))
    with pytest.raises(BadInput, match="byov data get cifar10"):
        Lab(tmp_path, "mini")
    with pytest.raises(BadInput, match="no images to train on"):
        Lab(tmp_path, "micro", data="digits@test")


def test_every_scale_has_its_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(labs, "open_source", lambda spec: open_source("digits"))
    monkeypatch.setattr(labs.fetch, "is_there", lambda name: True)
    for scale in labs.SCALES:
        for method in ("byov", "byol", "supervised-bbb"):
            assert Lab(tmp_path, scale).config(method, 1).method == method
