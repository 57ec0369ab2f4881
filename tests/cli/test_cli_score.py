"""`byov score` as a whole command: a table, a page, its messages, and how it resumes after Ctrl-C."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

import byov
from byov.cli.main import main
from byov.cli.tables import oddest
from byov.data.sources import open_source
from byov.data.transforms import resized
from byov.inference.run import load
from byov.scoring import table as scoring
from byov.scoring.scores import DEFAULT, DEFAULT_AT_MEANS, Scorer

SMALL = [
    *("--image-size", "16", "--optim.batch-size", "16", "--optim.epochs", "1", "--threads", "1"),
    *("--model.width", "32", "--model.depth", "1", "--model.heads", "2"),
    *("--model.head-hidden", "32", "--model.head-output", "16", "--monitor.no-tensorboard"),
]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)  # --threads is for the whole process


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `photos`, 90 of them and 2 broken, and the runs `byov` and `byol` on them; do not change it."""
    home = tmp_path_factory.mktemp("trained")
    noise = np.random.default_rng(0)
    for i in range(90):
        path = home / "photos" / "ab"[i % 2] / f"{i:02d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        coarse = Image.fromarray(noise.integers(0, 256, (4, 4, 3), dtype=np.uint8))
        coarse.resize((30, 24 + i % 9), Image.Resampling.BICUBIC).save(path)
        if i in (7, 50):
            path.write_bytes(path.read_bytes()[:200])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BYOV_DATA", str(home / "data"))
        for method in ("byov", "byol"):
            data = ("--data", f"folder:{home / 'photos'}")
            assert run("train", "--out", home / method, "--method", method, "--init", "none", *data, *SMALL) == 0
    return home


@pytest.fixture(autouse=True)
def data_folder(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BYOV_DATA", str(trained / "data"))


def run(*arguments: object) -> int:
    with pytest.raises(SystemExit) as stop:
        main([str(argument) for argument in arguments])
    assert isinstance(stop.value.code, int)
    return stop.value.code


def score(trained: Path, out: Path, *more: object, method: str = "byov", images: object = None) -> int:
    some = trained / "photos" if images is None else images
    return run("score", trained / method, some, "--out", out, "--threads", 1, "--draws", 3, *more)


@pytest.mark.parametrize("method", ["byov", "byol"])
def test_a_folder_becomes_a_table_and_a_page(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], method: str
) -> None:
    out = tmp_path / "odd.parquet"
    assert score(trained, out, method=method) == 0
    printed = capsys.readouterr()
    assert "warning: 2 of 90 files" in printed.err and "Traceback" not in printed.err
    aside = byov.load(trained / method).config.calibration
    assert f"\n(percentile: among the {aside} images that were set aside" in printed.out
    assert printed.out.endswith(f"written: {out}, {tmp_path / 'odd.html'}\n")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["odd.html", "odd.parquet", "odd.parquet.skipped.txt"]
    table = pq.read_table(out)
    assert len(table) == 88 and {"a/00.jpg", "b/89.jpg"} <= set(table["path"].to_pylist())
    oddest = table.sort_by([("oddness", "descending")])["path"][0].as_py()
    lines = printed.out.splitlines()
    assert lines[0].split() == ["oddest", "oddness", "percentile", "uncertainty", "percentile"]
    assert lines[1].startswith(oddest)
    page = (tmp_path / "odd.html").read_text(encoding="utf-8")
    assert f'data-name="{oddest}" data-rank="1"' in page

    opened = byov.load(trained / method)
    images = open_source(f"folder:{trained / 'photos'}", 16).load("train", say=lambda text: None).images
    embedding = np.stack(table["embedding"].to_numpy())
    np.testing.assert_allclose(embedding, opened.features(resized(images, 16)), rtol=1e-4, atol=1e-5)


def test_csv_of_a_source_without_a_page(trained: Path, tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", images=np.random.default_rng(0).integers(0, 256, (9, 16, 16, 3), dtype=np.uint8))
    out, source = tmp_path / "odd.csv", f"npz:{tmp_path / 'x.npz'}"
    assert score(trained, out, "--no-page", images=source) == 0
    rows = out.read_text().splitlines()
    assert rows[0] == "path,oddness,oddness_percentile,uncertainty,uncertainty_percentile" and len(rows) == 10
    assert rows[1].startswith(f"{source}@train#0,") and not (tmp_path / "odd.csv.html").exists()


def test_ctrl_c_and_on(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(scoring, "CHUNK_IMAGES", 64)
    assert score(trained, tmp_path / "whole.parquet", "--no-page") == 0
    write, out = scoring.Partial.write, tmp_path / "odd.parquet"

    def one_chunk(*arguments: object) -> None:
        write(*arguments)  # type: ignore[arg-type]
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(scoring.Partial, "write", one_chunk)
        assert score(trained, out) == 130
    assert "repeat the same command to continue" in capsys.readouterr().err and not out.exists()
    assert run("score", trained / "byov", trained / "photos", "--out", out, "--draws", 2) == 2
    assert "differs in draws)" in capsys.readouterr().err
    assert score(trained, out) == 0
    assert "64 of 90 images are done" in capsys.readouterr().err
    assert pq.read_table(out).equals(pq.read_table(tmp_path / "whole.parquet"))


KILLED = """
import os, sys
from byov._core import cache
from byov.cli.main import main
from byov.scoring import table as scoring
scoring.CHUNK_IMAGES, save = 64, cache.save_file
def save_file(tensors, path, **options):
    save(tensors, path, **options)
    if len(tensors["position"]) < 50:
        os.kill(os.getpid(), 9)
cache.save_file = save_file
main(sys.argv[1:])
"""


def test_killed_and_on(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """kill -9 while the second chunk is written."""
    monkeypatch.setattr(scoring, "CHUNK_IMAGES", 64)
    out = tmp_path / "odd.csv"
    arguments = ["score", trained / "byov", trained / "photos", "--out", out, "--draws", 3, "--threads", 1]
    done = subprocess.run([sys.executable, "-c", KILLED, *map(str, arguments)], stderr=subprocess.DEVNULL)
    assert done.returncode == -signal.SIGKILL and not out.exists()
    chunks = [path.name for path in (tmp_path / ".odd.csv.partial").glob("chunk-*")]
    assert len(chunks) == 1 and chunks[0].startswith("chunk-000000000-")
    assert score(trained, out, "--no-page") == 0
    assert score(trained, tmp_path / "whole.csv", "--no-page") == 0
    assert out.read_text() == (tmp_path / "whole.csv").read_text()
    assert not list(tmp_path.glob(".*"))


def test_grey_images_are_scored_by_a_run_on_photographs(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "digits.parquet"
    assert score(trained, out, "--no-page", images="digits") == 0
    assert "digits: grey made RGB by repeating it" in capsys.readouterr().err
    images = open_source("digits").load("test").images
    scorer = Scorer(load(trained / "byov"), draws=3)
    expected, table = scorer.scores(images.repeat(1, 3, 1, 1)), pq.read_table(out)
    for name in ("oddness", "oddness_percentile", "uncertainty", "uncertainty_percentile"):
        np.testing.assert_allclose(table[name].to_numpy(), getattr(expected, name).numpy(), rtol=1e-4, atol=1e-6)


def test_two_runs_are_one_ensemble(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert score(trained, tmp_path / "odd.parquet", "--ensemble", trained / "byol") == 0
    printed = capsys.readouterr().err
    assert "encoder check: " in printed or "warning: this encoder" in printed
    assert f"{trained / 'byol'}: " in printed  # each run is checked
    table = pq.read_table(tmp_path / "odd.parquet")
    settings = json.loads(table.schema.metadata[b"byov"])
    assert [text.split(" (step ")[0] for text in settings["ensemble"]] == [str(trained / "byol")]
    assert str(trained / "byol") in (tmp_path / "odd.html").read_text(encoding="utf-8")
    opened = byov.load(trained / "byov")
    found = opened.score(trained / "photos", draws=3, ensemble=[byov.load(trained / "byol")])
    np.testing.assert_allclose(table["uncertainty"].to_numpy(), found.uncertainty.numpy(), rtol=1e-4)
    capsys.readouterr()
    for others, more, says in (
        (["byov"], (), "is in the ensemble twice"),
        (["byol"], ("--fast",), "leave out --ensemble or --fast"),
        (["nowhere"], (), "there is no run"),
    ):
        paths = [trained / name for name in others]
        assert score(trained, tmp_path / "new.csv", *more, "--ensemble", *paths) == 2
        printed = capsys.readouterr().err
        assert says in printed and printed.count("\n") == 1 and not (tmp_path / "new.csv").exists()


def test_no_in_one_sentence(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    taken = tmp_path / "odd.parquet"
    taken.write_text("mine")
    for out, more, says in (
        (taken, {}, "exists already"),
        (tmp_path / "odd.txt", {}, "ends in .parquet or .csv"),
        (tmp_path / "new.csv", {"images": tmp_path / "nowhere"}, f"there is no folder {tmp_path / 'nowhere'}; check"),
        (tmp_path / "new.csv", {"images": "nowhere"}, "there is no source"),
        (tmp_path / "new.csv", {"images": taken}, "is a file; give the folder"),
        (tmp_path / "new.csv", {"method": "no-run"}, "there is no run"),
    ):
        assert score(trained, out, **more) == 2  # type: ignore[arg-type]
        printed = capsys.readouterr()
        assert says in printed.err and printed.err.count("\n") == 1 and printed.out == ""
    assert run("score", trained / "byov", trained / "photos", "--out", tmp_path / "n.csv", "--draws", 0) == 2
    assert "--draws must be at least 1" in capsys.readouterr().err
    assert taken.read_text() == "mine" and [path.name for path in tmp_path.iterdir()] == ["odd.parquet"]


@pytest.mark.parametrize(("method", "uncertainty", "draws"), [("byov", DEFAULT, 8), ("byol", DEFAULT_AT_MEANS, 0)])
def test_what_is_scored_by_is_written_with_the_table(
    trained: Path, tmp_path: Path, method: str, uncertainty: str, draws: int
) -> None:
    out = tmp_path / "odd.parquet"
    assert run("score", trained / method, trained / "photos", "--out", out, "--no-page", "--threads", 1) == 0
    settings = json.loads(pq.read_schema(out).metadata[b"byov"])
    assert (settings["uncertainty"], settings["draws"]) == (uncertainty, draws)


def test_the_oddest_are_printed_with_both_percentiles() -> None:
    oddness = np.array([0.1, 0.3, 0.2])
    lines = oddest(["a", "b", "c"], oddness, np.array([10.0, 99.0, 50.0]), np.array([1.0, 2.25, 3.0]), 2).splitlines()
    assert [line.split() for line in lines[1:]] == [["b", "0.3", "99.0", "2.2"], ["c", "0.2", "50.0", "3.0"]]
    assert [line.split() for line in oddest(["a", "b", "c"], oddness, None, None).splitlines()[1:]] == [
        ["b", "0.3"],
        ["c", "0.2"],
        ["a", "0.1"],
    ]
