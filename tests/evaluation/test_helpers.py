"""`byov evaluate` by two gloo processes, as torchrun starts them, gives what one gives."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import byov
from byov.config import Config, Model, Monitor, Optim
from byov.data.sources import open_source
from byov.evaluation.evaluate import evaluate
from byov.training.run import prepare

SMALL = Config(
    threads=1,
    device="cpu",
    model=Model(width=16, depth=1, heads=2, head_hidden=16, head_output=8),
    optim=Optim(epochs=1, batch_size=16),
    monitor=Monitor(tensorboard=False, knn_every=0),
)
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "byov"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Some digits, and a run of byov and one of supervised-bbb on them."""
    folder = tmp_path_factory.mktemp("helped")
    parts = {}
    for split in ("train", "test"):
        data = open_source("digits").load(split).subset(torch.arange(100))
        parts |= {f"x_{split}": data.images[:, 0].numpy(), f"y_{split}": data.labels.numpy()}
    np.savez(folder / "digits.npz", **parts)
    for method in ("byov", "supervised-bbb"):
        prepare(replace(SMALL, data=f"npz:{folder / 'digits.npz'}", method=method), folder / method).run()
    return folder


def test_two_processes_find_what_one_finds(folder: Path) -> None:
    """Draws of every kind: of test images, of levels, of shifted images, of another source, of another run."""
    outside, supervised = f"npz:{folder / 'digits.npz'}", folder / "supervised-bbb"
    shutil.copytree(folder / "byov", folder / "alone")
    alone, bbb = byov.load(folder / "alone"), byov.load(supervised)
    one = evaluate(alone, draws=3, shifts=True, ood=[outside], supervised=[bbb])
    asked = ["--draws", "3", "--shifts", "--ood", outside, "--align", str(supervised)]
    ended = subprocess.run(
        [*TORCHRUN, "evaluate", str(folder / "byov"), *asked], capture_output=True, text=True, timeout=300
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("evaluation.json") == 1  # said once
    two = json.loads((folder / "byov" / "results" / "evaluation.json").read_text())
    assert one.keys() == two.keys()
    smooth = [key for key in one if key.endswith(("top1", "brier", "nll", "mean_std", "pearson", "auroc"))]
    assert {"draws", "levels", "shifts", "ood", "align"} <= {key.split(".")[0] for key in smooth}
    for key in smooth:  # what is binned may leap where two numbers differ in their last bit
        assert two[key] == pytest.approx(one[key], rel=1e-6, abs=1e-9), key
    assert not (folder / "byov" / "results" / "partial").exists()


def test_a_mistake_is_said_once_and_ends_both(tmp_path: Path) -> None:
    ended = subprocess.run([*TORCHRUN, "evaluate", str(tmp_path)], capture_output=True, text=True, timeout=120)
    assert ended.returncode != 0
    assert ended.stderr.count("byov: ") == 1 and "checkpoint" in ended.stderr


def test_interrupted_both_end_and_say_how_to_go_on(folder: Path) -> None:
    command = [*TORCHRUN, "evaluate", str(folder / "byov"), "--draws", "1000000"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
    for _ in range(600):
        if list((folder / "byov" / "reference").glob("*/draw-00010.*")) or process.poll() is not None:  # amid its draws
            break
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert "the same command goes on" in err, err
