"""Runs are trained once, named by what they learn from, and measured once per setting; all studies from one command."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import pytest

from byov._core.errors import BadInput, TrainingFailed
from byov.cli import main as cli
from byov.config import Config, Objective, flatten, to_dict
from byov.data.sources import open_source
from byov.studies.framework import lab as labs
from byov.studies.framework.lab import Lab, Scale, identity
from byov.studies.framework.workers import Task, run_in_parallel

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


def test_runs_are_started_with_the_given_command(lab: Lab, tmp_path: Path) -> None:
    config = lab.config("byol", 0, QUICK)
    lab.launch = [sys.executable, "-c", "import sys; print(sys.argv[1:]); sys.exit(3)"]
    with pytest.raises(TrainingFailed, match=r"'train', .*--threads"):
        lab.train([config])


def test_a_run_that_fails_is_reported_with_its_last_line(lab: Lab) -> None:
    with pytest.raises(TrainingFailed, match=r"heads.*; see .*\.log"):
        lab.train([lab.config("byol", 0, {**QUICK, "model.heads": 3})])


def test_a_run_that_fails_stops_no_other(lab: Lab) -> None:
    bad, good = lab.config("byol", 0, {**QUICK, "model.heads": 3}), lab.config("byol", 0, QUICK)
    with pytest.raises(TrainingFailed, match="heads"):
        lab.train([bad, good])
    assert lab.is_trained(good) and not lab.is_trained(bad)


def test_a_measure_is_cached_with_its_settings(lab: Lab) -> None:
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


def test_a_source_that_is_not_here_is_reported_before_anything_is_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BYOV_DATA", str(tmp_path / "nothing"))
    with pytest.raises(BadInput, match="byov data get cifar10"):
        Lab(tmp_path, "mini")
    with pytest.raises(BadInput, match="no images to train on"):
        Lab(tmp_path, "micro", data="digits@test")


def test_a_source_that_is_not_here_is_skipped_with_a_message(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(labs.fetch, "is_there", lambda name: name != "mnist")
    messages: list[str] = []
    lab.say = messages.append
    assert lab.available(["mnist", "cifar10", "digits"]) == ["cifar10", "digits"]
    assert len(messages) == 1 and "byov data get mnist" in messages[0]


def test_a_folder_of_photos_has_its_own_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(labs, "open_source", lambda spec: open_source("digits"))
    monkeypatch.setattr(labs.fetch, "is_there", lambda name: True)
    small, photos = Lab(tmp_path, "adapted"), Lab(tmp_path, "adapted", data="folder:pets")
    assert (small.scale.data, small.scale.images, small.config("byov").image_size) == ("cifar10", 10_000, 96)
    assert (photos.name, photos.scale.images, photos.config("byov").image_size) == ("adapted-folder-pets", None, 128)
    for lab in (small, photos):
        for method in ("byov", "byol"):
            config = lab.config(method, 1)
            assert config.init == "lite0" and config.model.frozen_until is not None and config.views.cached > 0
        assert lab.config("byol").optim.epochs == lab.config("byov").optim.epochs


def test_runs_share_their_cached_views(lab: Lab) -> None:
    plain, cached = lab.config("byol"), lab.config("byol", 0, {"views.cached": 4})
    assert "--view-caches" not in lab._training(plain).command
    command = lab._training(cached).command
    assert command[command.index("--view-caches") + 1] == str(lab.folder / "views")


def test_every_scale_has_its_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(labs, "open_source", lambda spec: open_source("digits"))
    monkeypatch.setattr(labs.fetch, "is_there", lambda name: True)
    for scale in labs.SCALES:
        for method in ("byov", "byol", "supervised-bbb"):
            assert Lab(tmp_path, scale).config(method, 1).method == method


def test_runs_of_the_first_studies_keep_their_names() -> None:
    """The hash of what a config was before `posterior.scale`, `model.weight_init` and `objective` existed."""
    later = ("threads", "device", "posterior.scale", "model.weight_init", "optim.variances")
    flat = {k: v for k, v in flatten(to_dict(Config())).items() if k not in later}
    flat = {k: v for k, v in flat.items() if not k.startswith(("monitor.", "objective."))}
    assert identity(Config()) == sha256(json.dumps(flat, sort_keys=True).encode()).hexdigest()[:12]


def test_a_later_setting_counts_once_it_is_used() -> None:
    config = Config()
    soft = replace(config, posterior=replace(config.posterior, scale="softplus"))
    pushed = replace(config, objective=Objective("byol_negatives"))
    stronger = replace(config, objective=Objective("byol_negatives", negatives_weight=2.0))
    assert len({identity(c) for c in (config, soft, pushed, stronger)}) == 4


def test_a_failed_study_stops_no_other_and_reports_why(lab, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["fig2", "score", "working-point"]
    monkeypatch.setattr(labs, "names", lambda: names)
    monkeypatch.setattr(lab, "train", lambda configs: list(configs))
    program = 'import sys; print("byov: no such images.", file=sys.stderr); sys.exit(2 * (sys.argv[1] == "score"))'
    monkeypatch.setattr(lab, "command", lambda name: [sys.executable, "-c", program, name])
    begun: list[str] = []

    def noted(tasks: list[Task], jobs: int):
        begun.extend(task.command[-1] for task in tasks)
        return run_in_parallel(tasks, jobs)

    monkeypatch.setattr(labs, "run_in_parallel", noted)
    assert dict(labs.make_all(lab)) == {"fig2": None, "score": "no such images.", "working-point": None}
    assert begun == ["working-point", "fig2", "score"]


def test_the_command_of_a_study_makes_the_same_lab(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    monkeypatch.setattr(labs, "make", lambda name, lab: made.append((name, lab)) or tmp_path)
    monkeypatch.setattr(labs.fetch, "is_there", lambda name: True)
    given = labs.Lab(tmp_path / "a b", "fashion", 2, "mnist", 3, ["srun", "python 3"])
    python, m, byov, *arguments = given.command("fig2")
    assert (python, m, byov) == (sys.executable, "-m", "byov")
    with pytest.raises(SystemExit, match="0"):
        cli.main(arguments)
    ((name, again),) = made
    assert name == "fig2"
    for what in ("folder", "name", "scale", "seeds", "jobs", "launch"):
        assert getattr(again, what) == getattr(given, what)


def test_a_study_that_lacks_something_is_reported_before_anything_is_trained(
    lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lacking(lab: labs.Lab) -> list[object]:
        raise BadInput("there are no tasks.")

    monkeypatch.setattr(labs, "names", lambda: ["fig2", "priors-tasks"])
    monkeypatch.setattr(labs.find("priors-tasks"), "runs", lacking)
    done: list[str] = []
    monkeypatch.setattr(lab, "train", lambda configs: done.append(f"{len(configs)} trained"))
    monkeypatch.setattr(lab, "command", lambda name: [sys.executable, "-c", ""])
    for name, why in labs.make_all(lab):
        done.append(f"{name}: {why}")
    assert done == ["priors-tasks: there are no tasks.", f"{len(labs.find('fig2').runs(lab))} trained", "fig2: None"]


def test_quotes_that_do_not_close_are_bad_input(tmp_path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        cli.main(["study", "fig2", "--launch", "'srun", "--out", str(tmp_path)])
    assert "fix the quoting" in capsys.readouterr().err


@pytest.mark.parametrize(("why", "code"), [(None, 0), ("no such images.", 1)])
def test_all_reports_what_was_made_and_what_was_not(
    why: str | None, code: int, tmp_path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(labs, "make_all", lambda lab: iter([("fig2", None), ("score", why)]))
    with pytest.raises(SystemExit, match=str(code)):
        cli.main(["study", "all", "--out", str(tmp_path)])
    out, err = capsys.readouterr()
    assert out.splitlines()[0] == f"written: {tmp_path}/fig2/micro"
    if why:
        assert "failed: score: no such images." in err and "some studies failed (score)" in err
