"""`byov score --fast` and `byov export --with-uncertainty` as commands."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from byov.scoring import table as scoring
from commands import SMALL, run


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run; do not change it."""
    out = tmp_path_factory.mktemp("trained") / "run"
    assert run("train", "digits", "--out", out, *SMALL) == 0
    return out


def score(trained: Path, out: Path, *more: object) -> int:
    return run("score", trained, "digits@test", "--out", out, "--threads", 1, "--draws", 3, *more)


def test_one_pass_gives_a_table_that_is_not_mixed_with_the_other(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    full, fast = tmp_path / "full.parquet", tmp_path / "fast.parquet"
    assert score(trained, full, "--no-page") == 0 and score(trained, fast, "--fast") == 0
    assert "one pass: one forward pass per image; the uncertainty is predicted" in capsys.readouterr().err
    assert "one forward pass per image" in fast.with_suffix(".html").read_text()
    ours, theirs = (pq.read_table(path) for path in (fast, full))
    assert ours.column_names == theirs.column_names
    np.testing.assert_allclose(ours["oddness"], theirs["oddness"], rtol=1e-4, atol=1e-6)
    steps = 3  # rounding may take an image past one of the 72 calibration images
    np.testing.assert_allclose(ours["oddness_percentile"], theirs["oddness_percentile"], atol=steps)
    assert ours["uncertainty"] != theirs["uncertainty"]
    settings = [json.loads(table.schema.metadata[b"byov"]) for table in (ours, theirs)]
    assert settings[0] == settings[1] | {"fast": True}

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(scoring.Partial, "write", stop)
        assert score(trained, tmp_path / "half.csv", "--fast", "--no-page") == 130
    capsys.readouterr()
    assert score(trained, tmp_path / "half.csv", "--no-page") == 2
    assert "it differs in fast" in capsys.readouterr().err
    assert score(trained, tmp_path / "half.csv", "--fast", "--no-page") == 0


def test_a_scorer_for_use_without_byov(trained: Path, tmp_path: Path) -> None:
    """In its own process, as a user would."""
    pytest.importorskip("onnxruntime")
    command = [sys.executable, "-m", "byov", "export", str(trained), "--with-uncertainty"]
    bad = subprocess.run([*command, "--format", "timm"], capture_output=True, text=True, check=False)
    assert bad.returncode == 2 and bad.stderr.count("\n") == 1 and "use --format onnx" in bad.stderr
    out = tmp_path / "scorer.onnx"
    done = subprocess.run([*command, "--format", "onnx", "--out", out], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "-> embedding (N, 64), and scores (N)" in done.stdout and out.is_file()
