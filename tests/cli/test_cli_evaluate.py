"""`byov evaluate` as a command: its flags, what it prints, how it says no, and how it is interrupted."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from byov.evaluation import evaluate as module
from commands import SMALL, run


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("trained")
    for method in ("byov", "byol"):
        assert run("train", "digits", "--method", method, "--out", folder / method, *SMALL) == 0
    return {method: folder / method for method in ("byov", "byol")}


def test_flags_reach_the_results_and_the_report(trained: dict[str, Path], tmp_path: Path, capsys) -> None:
    np.savez(tmp_path / "noise.npz", images=np.random.default_rng(0).integers(0, 256, (30, 8, 8), dtype=np.uint8))
    noise = f"npz:{tmp_path / 'noise.npz'}"
    flags = ("--draws", 3, "--semi", "--ood", noise, f"{noise}@train", "--baseline", trained["byol"], "--threads", 1)
    # the second is another name for the same source
    assert run("evaluate", trained["byov"], *flags) == 0
    printed = capsys.readouterr()
    path = trained["byov"] / "results" / "evaluation.json"
    results = json.loads(path.read_text())
    for row in (
        "draws",
        "draws, not aligned",
        "4/5 of the labels",
        "with a temperature",
        "1% of the labels",
        "less the baseline",
    ):
        assert f"\n  {row} " in printed.out
    assert f"{results['draws.nll']:.4f}" in printed.out and printed.out.endswith(f"written: {path}\n")
    assert len(printed.out.splitlines()) < 20 and "is evaluated now" in printed.err
    assert (
        "\nOOD detection, AUROC " in printed.out
        and " probe's confidence " in printed.out
        and "warning" not in printed.err
    )
    assert results["settings"]["ood"]["sources"] == [noise, f"{noise}@train"]
    assert sum(key.endswith(".images") for key in results) == 2
    page = tmp_path / "page.html"
    assert run("report", *trained.values(), "--out", page) == 0
    text = page.read_text(encoding="utf-8")
    assert "draws.selective.mutual_information.aurc" in text and "draws.bins" not in text


def test_results_of_an_older_version_can_be_reported_and_compared_with(trained, tmp_path: Path, capsys) -> None:
    path = trained["byol"] / "results" / "evaluation.json"
    old = {"top1": 0.5, "top5": 1.0, "ece": 0.125, "brier": 0.5, "nll": 2.0, "knn": 0.5, "median_sigma": None}
    old |= {"bins": [[355, 0.5, 0.5]], "settings": {"step": 3, "data": "digits"}}
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(old))
    path.with_suffix(".safetensors").unlink(missing_ok=True)
    assert run("report", *trained.values(), "--out", tmp_path / "page.html") == 0
    assert run("evaluate", trained["byov"], "--baseline", trained["byol"], "--threads", 1) == 0
    results = json.loads((trained["byov"] / "results" / "evaluation.json").read_text())
    assert results["baseline.nll"] == results["nll"] - 2.0
    assert "baseline.aurc" not in results and "baseline.top1_interval" not in results
    assert "less the baseline" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--draws", "-1"], "at least 1"),
        (["--draws", "many"], "whole number"),
        (["--ood", "nothing"], "there is no source"),
        (["--baseline", "nowhere"], "there is no run"),
        (["--teacher", "--draws", "2"], "leave out --teacher"),
        (["--data", "digits@test"], "only test"),
        (["--shift"], "--shifts"),
    ],
)
def test_mistakes(trained: dict[str, Path], capsys, flags: list[str], words: str) -> None:
    assert run("evaluate", trained["byov"], *flags) == 2
    printed = capsys.readouterr()
    lines = printed.err.splitlines()
    assert (
        printed.out == "" and lines[-1].startswith("byov: ") and words in lines[-1] and "Traceback" not in printed.err
    )


def test_interrupted_work_is_kept(trained: dict[str, Path], capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*arguments: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(module, "semi_measures", stop)
        assert run("evaluate", trained["byov"], "--semi", "--threads", 1) == 130
    assert "repeat the same command to continue" in capsys.readouterr().err
    partial = trained["byov"] / "results" / "partial"
    assert any(path.name.startswith("means-probe") for path in partial.iterdir())
    assert run("evaluate", trained["byov"], "--semi", "--threads", 1) == 0
    assert not partial.exists()


def test_a_polite_kill_is_as_ctrl_c(trained: dict[str, Path], capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(module, "semi_measures", lambda subject: os.kill(os.getpid(), signal.SIGTERM))
        assert run("evaluate", trained["byov"], "--semi", "--threads", 1) == 130
    assert "repeat the same command to continue" in capsys.readouterr().err


def test_align_compares_with_supervised_runs(
    trained: dict[str, Path], tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    others = [tmp_path / f"bbb-{seed}" for seed in (0, 1)]
    for seed, out in enumerate(others):
        assert run("train", "digits", "--method", "supervised-bbb", "--seed", seed, "--out", out, *SMALL) == 0
    capsys.readouterr()
    with monkeypatch.context() as patch:
        patch.setattr("byov.evaluation.agreement._predictions", None)  # the evaluation's own draws serve it
        assert run("evaluate", trained["byov"], "--draws", 3, "--align", *others, "--threads", 1) == 0
    printed = capsys.readouterr().out
    found = json.loads((trained["byov"] / "results" / "alignment.json").read_text())
    assert f"{found['ceiling.spearman']:.3f}" in printed and f"{found['partial_spearman']:.3f}" in printed
    together = json.loads((trained["byov"] / "results" / "evaluation.json").read_text())
    assert together["align.spearman"] == found["spearman"] and "top1" in together
    assert "align.scatter" not in together and len(together["align.spearman_interval"]) == 2
    assert (trained["byov"] / "figures" / "alignment.png").read_bytes()[:4] == b"\x89PNG"
    text = (Path(__file__).parents[2] / "docs" / "reference" / "evaluation-keys.md").read_text(encoding="utf-8")
    keys = [key.removeprefix("align.").removesuffix("_interval") for key in together if key.startswith("align.")]
    assert not [key for key in keys if not all(f"`{part}" in text or f".{part}" in text for part in key.split("."))]
    assert (
        run("evaluate", trained["byov"], "--draws", 2, "--threads", 1) == 0
    )  # what it does not have is saved separately
    kept = trained["byov"] / "results" / "evaluation.previous.json"
    said = f"results of an earlier evaluation that this one does not have (align, draws): {kept}."
    assert said in " ".join(capsys.readouterr().err.split())
    assert json.loads(kept.read_text()) == together
    assert run("evaluate", trained["byov"], "--draws", 3, "--align", *others, "--threads", 1) == 0
    assert not kept.exists(), "all is there again"
    assert run("evaluate", trained["byov"], "--align", trained["byol"], "--threads", 1) == 2
    assert "supervised-bbb" in capsys.readouterr().err
    assert run("evaluate", trained["byov"], "--align", *others, others[0], "--threads", 1) == 2


def test_shifts_are_printed_and_a_smaller_evaluation_keeps_them_beside(trained: dict[str, Path], capsys) -> None:
    assert run("evaluate", trained["byol"], "--shifts", "--threads", 1) == 0
    printed = capsys.readouterr().out
    path = trained["byol"] / "results" / "evaluation.json"
    results = json.loads(path.read_text())
    names = {key.split(".")[1] for key in results if key.startswith("shifts.")}
    mean = sum(results[f"shifts.{name}.5.top1"] for name in names) / len(names)
    assert f"\nmean of {len(names)} shifts " in printed and f"\n  severity 5       {mean:.4f}" in printed
    assert run("evaluate", trained["byol"], "--threads", 1) == 0
    kept = path.with_suffix(".previous.json")
    said = f"results of an earlier evaluation that this one does not have (shifts): {kept}."
    assert said in " ".join(capsys.readouterr().err.split()) and json.loads(kept.read_text()) == results


def test_mistakes_are_told_before_the_work(
    trained: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    monkeypatch.setenv("BYOV_DATA", str(tmp_path))
    bayesian = tmp_path / "bbb"
    assert run("train", "digits", "--method", "supervised-bbb", "--out", bayesian, *SMALL) == 0
    capsys.readouterr()
    for flags, says in (
        (("--ood",), "--ood needs at least one source"),
        (("--align",), "--align needs at least one run"),
        (("--ood", "digits", "mnist@test"), "run `byov data get mnist`"),
        (("--align", bayesian), "has nothing random"),
    ):
        assert run("evaluate", trained["byol"], *flags) == 2
        printed = capsys.readouterr()
        assert says in printed.err and printed.err.count("\n") == 1 and printed.out == ""
    results = trained["byov"] / "results" / "evaluation.json"
    results.parent.mkdir(exist_ok=True)
    before = results.read_text() if results.exists() else None
    for flags, says in (
        (("--align", bayesian, bayesian), "have the same seed"),
        (("--align", bayesian, "--draws", "1"), "at least 2"),
        (("--align", bayesian, "--data", "digits@test"), "was trained on digits, not on digits@test"),
        (("--align", bayesian, "--teacher"), "leave out --align or --teacher"),
        (("--align", trained["byol"]), "align with one that was trained with --method supervised-bbb"),
    ):
        assert run("evaluate", trained["byov"], *flags) == 2
        printed = capsys.readouterr()
        assert says in printed.err and printed.err.count("\n") == 1 and printed.out == ""
        assert (results.read_text() if results.exists() else None) == before
