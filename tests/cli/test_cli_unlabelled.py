"""What the commands say of an encoder without labels: `byov score` warns, `byov evaluate` measures what it can."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import byov
from byov.data.sources import open_source
from byov.evaluation import encoder_check
from byov.evaluation.unlabelled import has_labels
from byov.runs import checkpoints
from commands import SMALL, run


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small run on digits, and a folder `flat` of others without labels."""
    folder = tmp_path_factory.mktemp("home")
    assert run("train", "digits", "--out", folder / "run", *SMALL) == 0
    (folder / "flat").mkdir()
    for i, image in enumerate(open_source("digits").load("test").images[:40, 0]):
        Image.fromarray(image.numpy()).save(folder / "flat" / f"{i}.png")
    return folder


@pytest.fixture(autouse=True)
def data_folder(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BYOV_DATA", str(home / "data"))


def score(home: Path, out: Path, *more: object) -> int:
    return run("score", home / "run", home / "flat", "--out", out, "--draws", 2, "--threads", 1, *more)


def test_score_warns_of_an_encoder_that_has_learned_little(home: Path, tmp_path: Path, capsys, monkeypatch) -> None:
    assert score(home, tmp_path / "a.csv") == 0
    printed = capsys.readouterr()
    warnings = [line for line in printed.err.splitlines() if line.startswith("warning: ")]
    assert len(warnings) == 1 and warnings[0].startswith("warning: this encoder finds an image from an augmented view")
    assert "has not finished" not in printed.err
    page = (tmp_path / "a.csv.html").read_text(encoding="utf-8")
    assert "<dt>encoder check</dt>" in page and "finds an image from an augmented view of it" in page
    monkeypatch.setattr(encoder_check, "_all_hits", None)  # the second time it is known
    assert score(home, tmp_path / "b.csv", "--no-page") == 0
    assert warnings[0] in capsys.readouterr().err


def test_scores_are_given_where_the_check_cannot_be_made(home: Path, tmp_path: Path, capsys, monkeypatch) -> None:
    def gone(*arguments: object) -> None:
        raise byov._core.errors.BadInput("the images are gone: put them back.")

    monkeypatch.setattr(encoder_check, "check_encoder", gone)
    assert score(home, tmp_path / "a.csv", "--no-page") == 0
    assert "warning: the encoder was not checked: the images are gone" in capsys.readouterr().err


def test_a_run_that_has_not_finished_is_scored_with_a_warning(home: Path, tmp_path: Path, capsys) -> None:
    path = home / "run" / "checkpoints" / "last.safetensors"
    whole = path.read_bytes()
    tensors, state = checkpoints.load(path)
    step = state["step"]
    try:
        checkpoints.save(path, tensors, state | {"total": 4321})
        assert score(home, tmp_path / "a.csv") == 0
    finally:
        path.write_bytes(whole)
    said = (
        f"has not finished: this is step {step:,} of 4,321; resume it with `byov train --resume --out {home / 'run'}`."
    )
    assert said in capsys.readouterr().err
    assert "<dt>training</dt>" in (tmp_path / "a.csv.html").read_text(encoding="utf-8")


@pytest.mark.parametrize("teacher", [False, True])
def test_evaluate_without_labels(home: Path, capsys, monkeypatch, teacher: bool) -> None:
    monkeypatch.chdir(home)
    assert run("evaluate", "run", "--data", "folder:flat", "--threads", 1, *["--teacher"] * teacher) == 0
    printed = capsys.readouterr()
    written = Path(printed.out.splitlines()[-1].removeprefix("written: "))
    results = json.loads(written.read_text())
    assert results["labels"] is False and results["retrieval.images"] == 40 and results["retrieval.views"] == 280
    for key in ("encoder", "untrained", "pixels"):
        assert 0 <= results[f"retrieval.{key}"] <= 1
        assert f"{results[f'retrieval.{key}']:.3f}" in printed.out
    assert 1 <= results["effective_rank"] <= 64 and results["feature_std"] > 0
    assert "top1" not in results and results["settings"]["test_images"] == 40
    assert "accuracy and calibration need a source with labels" in printed.out and "RGB made grey" in printed.err


def test_the_runs_own_images_without_labels(home: Path, tmp_path: Path, capsys) -> None:
    images = open_source("digits").load("train").images[:90, 0].numpy()
    np.savez(tmp_path / "x.npz", images=images)
    mine, data = tmp_path / "mine", f"npz:{tmp_path / 'x.npz'}"
    assert run("train", "digits", "--data", data, "--out", mine, *SMALL) == 0
    assert run("evaluate", mine, "--threads", 1) == 0
    results = json.loads((mine / "results" / "evaluation.json").read_text())
    assert results["retrieval.images"] == 48 and not results["settings"]["retrieval"]["held_out"]
    assert run("report", mine, "--out", tmp_path / "page.html") == 0
    assert "retrieval.encoder" in (tmp_path / "page.html").read_text(encoding="utf-8")
    assert not has_labels(byov.load(mine), data) and has_labels(byov.load(mine), "digits")


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--draws", "3"], "--draws needs"),
        (["--shifts", "--semi"], "--shifts and --semi need:"),
        (["--finetune"], "--finetune needs"),
        (["--baseline", "nowhere"], "--baseline needs"),
        (["--align", "nowhere"], "--align needs"),
        (["--ood", "digits"], "--ood needs"),
    ],
)
def test_what_needs_labels_is_refused(home: Path, capsys, flags: list[str], named: str) -> None:
    before = sorted(home.glob("run/results/*"))
    assert run("evaluate", home / "run", "--data", f"folder:{home / 'flat'}", *flags) == 2
    printed = capsys.readouterr()
    last = printed.err.splitlines()[-1]
    assert last.startswith("byov: ") and "has no labels" in last and named in last and printed.out == ""
    assert "Traceback" not in printed.err and sorted(home.glob("run/results/*")) == before
