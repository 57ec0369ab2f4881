"""`byov prune` and `byov export` as commands: what they print, what they leave behind, and how they say no."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import byov
from byov.training.loop import Interrupted, Trainer
from commands import SMALL, run


def complaint(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """The one sentence of a command that must say no."""
    capsys.readouterr()
    assert run(*arguments) == 2
    printed = capsys.readouterr()
    lines = printed.err.splitlines()
    assert printed.out == "" and len(lines) == 1 and lines[0].startswith("byov: ") and lines[0].endswith("."), printed
    return lines[0]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run; do not change it."""
    out = tmp_path_factory.mktemp("trained") / "run"
    assert run("train", "digits", "--out", out, *SMALL) == 0
    return out


def test_prune_then_export(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "pruned"
    flags = ("--sparsity", "0.5", "--structured", "--rounds", 2, "--epochs", 1, "--curve", "0.3", "--threads", 1)
    assert run("prune", trained, "--by", "snr", *flags, "--out", out) == 0
    printed = capsys.readouterr().out
    assert "refitted.top1" in printed and printed.count("trained 1 epoch") == 2 and "smaller dense" in printed
    assert (out / "figures" / "pruning.png").is_file()
    results = json.loads((out / "results" / "pruning.json").read_text())
    assert results["settings"]["rounds"] == 2 and len(results["curve"]) == 3
    assert f"{results['weights']['pruned']:,}" in printed
    assert run("evaluate", out, "--threads", 1) == 0 and run("report", out, "--out", tmp_path / "page.html") == 0

    capsys.readouterr()
    assert run("export", out, "--format", "safetensors") == 0
    file = out / "export" / "encoder.safetensors"
    assert f"written: {file} ({file.stat().st_size:,} bytes)" in capsys.readouterr().out
    assert "exists already" in complaint(capsys, "export", out, "--format", "safetensors")
    assert run("export", out, "--format", "safetensors", "--out", tmp_path / "p.safetensors", "--posterior") == 0


def test_mistakes(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def prune(*flags: object) -> str:
        said = complaint(capsys, "prune", trained, "--out", tmp_path / "pruned", *flags)
        assert not (tmp_path / "pruned").exists()
        return said

    assert "between 0 and 1" in prune("--by", "snr", "--sparsity", 2)
    assert "--sparsity" in prune("--by", "snr")
    assert "snr" in prune("--by", "luck", "--sparsity", 0.5)
    assert "there is no source" in prune("--by", "snr", "--sparsity", 0.5, "--data", "nothing")
    assert "there is no run" in complaint(capsys, "export", tmp_path / "none", "--format", "onnx")
    assert "--format" in complaint(capsys, "export", trained)


def test_interrupted_training_is_saved(trained: Path, tmp_path: Path, capsys, monkeypatch) -> None:
    def stopped(trainer: Trainer) -> None:
        trainer._advance()
        trainer.save()
        raise Interrupted("SIGINT")

    out = tmp_path / "pruned"
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "run", stopped)
        assert run("prune", trained, "--by=snr", "--sparsity=.5", "--epochs=1", "--out", out, "--threads=1") == 130
    assert "repeat the same command to continue" in capsys.readouterr().err
    assert run("train", "--out", out, "--resume") == 0
    weights = torch.cat(
        [w.flatten() for name, w in byov.load(out).encoder.snr().items() if name.endswith("qkv.weight")]
    )
    assert abs(float((weights > 0).float().mean()) - 0.5) < 0.01
