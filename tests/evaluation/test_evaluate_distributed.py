"""`byov evaluate` by two gloo processes, as torchrun starts them, gives what one gives."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import byov
from byov._core.errors import BadInput
from byov.config import Config, Model, Monitor, Optim
from byov.data.sources import open_source
from byov.evaluation import predictive
from byov.evaluation.evaluate import evaluate
from byov.evaluation.probe import Probe
from byov.inference.run import ReferenceSet, Run, at_draw
from byov.training.distributed.processes import Processes
from byov.training.prepare import prepare

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
    folder = tmp_path_factory.mktemp("distributed")
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
    assert ended.stdout.count("evaluation.json") == 1  # printed once
    two = json.loads((folder / "byov" / "results" / "evaluation.json").read_text())
    assert one.keys() == two.keys()
    smooth = [key for key in one if key.endswith(("top1", "brier", "nll", "mean_std", "pearson", "auroc"))]
    assert {"draws", "levels", "shifts", "ood", "align"} <= {key.split(".")[0] for key in smooth}
    for key in smooth:  # what is binned may leap where two numbers differ in their last bit
        assert two[key] == pytest.approx(one[key], rel=1e-6, abs=1e-9), key
    assert not (folder / "byov" / "results" / "partial").exists()


# ------------------------------------------------------------------------------------------------ who takes which draws


def _classify(rank: int, folder: Path, swapped: bool) -> None:
    """One of two processes that pass three images through five draws; each saves what came of it."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    taken: list[int] = []

    @contextmanager
    def noted(network: Any, seed: int, k: int) -> Iterator[None]:
        taken.append(k)
        with at_draw(network, seed, k):
            yield

    predictive.at_draw = noted  # type: ignore[assignment]
    said, found = "", None
    run = byov.load(folder / "byov", processes=Processes(rank, 2))
    try:
        found = _classes(run, 1.01 if swapped and rank else 1.0)
    except BadInput as error:
        said = str(error)
    torch.save((taken, said, found), folder / f"{rank}.pt")
    os._exit(0)  # a thread of gloo may still hold a tensor, and a Python closing down then aborts


def _classes(run: Run, factor: float = 1.0) -> dict[str, torch.Tensor]:
    with torch.no_grad():
        run.encoder.means.mul_(factor)
    bank = ReferenceSet(run)
    width = bank.means.features.shape[1]
    g, zeros = torch.Generator().manual_seed(0), torch.zeros(width).double()
    weights = torch.randn(4, width, generator=g, dtype=torch.float64)
    probe = Probe(weights, zeros[:4], zeros, zeros + 1, 1.0, 0.0, True)
    images = torch.randint(0, 256, (3, 1, 8, 8), generator=g, dtype=torch.uint8)
    return predictive.predict_classes(bank, probe, images, 5, resumable=True).aligned.state()


def test_each_takes_its_draws_and_all_have_the_whole(folder: Path, tmp_path: Path) -> None:
    torch.set_num_threads(1)  # as in each of the two: rounding depends on it
    shutil.copytree(folder / "byov", tmp_path / "byov")
    mp.spawn(_classify, (tmp_path, False), nprocs=2)
    (ours, _, first), (theirs, _, second) = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    assert (ours, theirs) == ([0, 2, 4], [1, 3])
    for name, value in _classes(byov.load(folder / "byov")).items():
        torch.testing.assert_close(first[name], value, rtol=1e-10, atol=1e-10)
        assert torch.equal(first[name], second[name])
    assert not (tmp_path / "byov" / "results" / "partial").exists()


def test_processes_with_different_weights_are_refused(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "byov", tmp_path / "byov")
    mp.spawn(_classify, (tmp_path, True), nprocs=2)
    for rank in range(2):
        taken, said, found = torch.load(tmp_path / f"{rank}.pt")
        assert "not the same for all processes" in said and taken == [] and found is None


# ----------------------------------------------------------------------------------------------------- the command line


def test_a_mistake_is_reported_once_and_ends_both(tmp_path: Path) -> None:
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
    assert "repeat the same command to continue" in err, err
    assert process.returncode != 0
