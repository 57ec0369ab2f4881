"""`byov evaluate` by two gloo processes, as torchrun starts them, gives what one gives."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from safetensors import safe_open
from safetensors.torch import save_file

import byov
from byov._core.errors import BadInput
from byov.config import Config, Model, Monitor, Optim
from byov.data.sources import open_source
from byov.evaluation import predictive
from byov.evaluation.evaluate import evaluate
from byov.evaluation.multiprocess import help_draws
from byov.evaluation.probe import Probe
from byov.inference.load import Run
from byov.inference.reference import ReferenceSet
from byov.training.distributed.processes import Led, has_gone
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


# --------------------------------------------------------------------------------------------- who does what, in Python


def _together(rank: int, folder: Path, swapped: bool) -> None:
    """One of two processes that pass three images through five draws; each writes what came of it."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    taken, take = [], predictive._Classes.take

    def noted(self: Any, bank: ReferenceSet, k: int, *others: Any) -> None:
        taken.append(k)
        take(self, bank, k, *others)

    predictive._Classes.take = noted  # type: ignore[method-assign]
    team, said, found = Led(rank, 2), "", None
    try:
        if rank == 0:
            run = byov.load(folder / "byov", processes=team)
            found = _classes(run, swapped)
            team.part()
        else:
            help_draws(team, "cpu")
            team.part()
    except (BadInput, RuntimeError) as error:
        said = str(error)
    torch.save((taken, said, found), folder / f"{rank}.pt")
    os._exit(0)  # a thread of gloo may still hold a tensor, and a Python closing down then aborts


def _classes(run: Run, swapped: bool = False) -> dict[str, torch.Tensor]:
    bank = ReferenceSet(run)
    width = bank.means.features.shape[1]
    if swapped:  # the run is trained further, now that the first process has opened it
        path = run.folder / "checkpoints" / "last.safetensors"
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            metadata = file.metadata()
        save_file({name: 1.01 * t if t.is_floating_point() else t for name, t in tensors.items()}, path, metadata)
    g, zeros = torch.Generator().manual_seed(0), torch.zeros(width).double()
    weights = torch.randn(4, width, generator=g, dtype=torch.float64)
    probe = Probe(weights, zeros[:4], zeros, zeros + 1, 1.0, 0.0, True)
    images = torch.randint(0, 256, (3, 1, 8, 8), generator=g, dtype=torch.uint8)
    return predictive.predict_classes(bank, probe, images, 5, resumable=True).aligned.state()


def test_each_takes_its_draws_and_the_first_has_the_whole(folder: Path, tmp_path: Path) -> None:
    torch.set_num_threads(1)  # as in each of the two: rounding hangs on it
    shutil.copytree(folder / "byov", tmp_path / "byov")
    left = tmp_path / "byov" / "results" / "partial"
    mp.spawn(_together, (tmp_path, False), nprocs=2)
    (ours, _, found), (theirs, said, nothing) = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    assert said == "" and nothing is None
    assert (ours, theirs) == ([0, 2, 4], [1, 3])
    for name, value in _classes(byov.load(folder / "byov")).items():
        torch.testing.assert_close(found[name], value, rtol=1e-10, atol=1e-10)
    assert not left.exists()


def test_a_helper_that_finds_other_weights_says_so(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "byov", tmp_path / "byov")
    mp.spawn(_together, (tmp_path, True), nprocs=2)
    (_, lost, found), (taken, said, _) = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    assert "trained further meanwhile" in said and taken == []
    assert found is None and has_gone(RuntimeError(lost))  # no half of an answer


def test_of_errors_only_a_lost_process_is_passed_over() -> None:
    assert has_gone(RuntimeError("Connection closed by peer [127.0.0.1]:1"))
    assert not has_gone(RuntimeError("can't allocate memory"))


# ----------------------------------------------------------------------------------------------------- the command line


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
    assert "repeat the same command to continue" in err, err
    assert process.returncode != 0
