"""Two gloo processes equal one, in float64: views are keyed by image, gradients averaged, batch statistics shared."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from PIL import Image
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import tiny
from byov._core.errors import BadInput, SaidElsewhere
from byov.config import Config, Posterior
from byov.runs import checkpoints
from byov.training.distributed.processes import Processes, started
from byov.training.distributed.sync_batchnorm import share_batch_norms
from byov.training.optimizers import build
from byov.training.optimizers.sharded_adamw import ShardedAdamW
from byov.training.step import training_step
from two_processes import spawned

# ------------------------------------------------------------------------------------------------- two processes = one


def settings(method: str, shared_noise: bool = False, norm: str = "batch", **optim: Any) -> Config:
    config = tiny.config(method, precision="64-true", posterior=Posterior(shared_noise=shared_noise))
    return replace(config, model=replace(tiny.MODEL, head_norm=norm), optim=replace(config.optim, **optim))


def train(folder: Path, config: Config, processes: Processes) -> dict[str, torch.Tensor]:
    trainer = tiny.trainer(folder, config, processes=processes)
    if processes.world > 1:
        share_batch_norms(trainer.learner.posterior, print)
        if trainer.learner.teacher is not None:
            share_batch_norms(trainer.learner.teacher, print)
    for k in range(3):
        training_step(
            trainer.learner,
            trainer.optimizer,
            trainer.batches(k),
            trainer.config,
            k + 1,
            6,
            processes,
            variances=trainer.variances,
        )
    return {k: v.clone() for k, v in trainer.tensors().items()}


def _train(rank: int, folder: Path, config: Config) -> dict[str, torch.Tensor]:
    return train(folder, config, Processes(rank, 2))


@pytest.mark.parametrize(
    "config",
    [
        settings("byol"),
        settings("byol", norm="layer"),
        settings("byov", shared_noise=True),
        settings("byov", shared_noise=True, shard=True),
        settings("byol", shard=True),
        settings("supervised"),
        settings("byov", shared_noise=True, optimizer="lars", lr=0.1),
        settings("byov", shared_noise=True, norm="layer", variances="newton", log_variance_lr=None),
    ],
    ids=["byol", "byol-layer", "byov", "byov-shard", "byol-shard", "supervised", "byov-lars", "byov-newton"],
)
def test_two_processes_equal_one(tmp_path: Path, config: Config) -> None:
    first, second = spawned(_train, tmp_path, config)
    one = train(tmp_path, config, Processes())
    assert set(first) == set(one)
    for name, value in one.items():
        torch.testing.assert_close(first[name], value, rtol=1e-6, atol=1e-9, msg=lambda m, n=name: f"{n}: {m}")
    for name, value in second.items():
        assert torch.equal(first[name], value), name
    alone = {name for name in first if config.optim.shard and name.startswith("optimizer.")}
    assert set(first) - set(second) == alone  # the whole state of a sharded optimizer is the first process's


def test_noise_differs_between_processes_unless_shared(tmp_path: Path) -> None:
    """By default each process has a separate draw, so two processes do not equal one."""
    config = settings("byov")
    first, second = spawned(_train, tmp_path, config)
    one = train(tmp_path, config, Processes())
    key = next(k for k in one if k.startswith("student.log_variance."))
    assert torch.equal(first[key], second[key])
    assert not torch.allclose(first[key], one[key], rtol=1e-6)


# ------------------------------------------------------------------------------------------------------------ the parts


def _norms(rank: int, folder: Path, x: torch.Tensor) -> dict[str, torch.Tensor]:
    norm = nn.Sequential(nn.BatchNorm2d(x.shape[1])).double()
    share_batch_norms(norm, print)
    part = x.chunk(2)[rank].clone().requires_grad_()
    (norm(part).sin().sum()).backward()
    return {"grad": part.grad, "weight": norm[0].weight.grad, **norm.state_dict()}


def test_shared_batch_norm_is_torchs_over_the_whole_batch(tmp_path: Path) -> None:
    x = 5 + 3 * torch.randn(8, 3, 2, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    halves = spawned(_norms, tmp_path, x)
    whole = nn.Sequential(nn.BatchNorm2d(3)).double()
    y = x.clone().requires_grad_()
    whole(y).sin().sum().backward()
    torch.testing.assert_close(torch.cat([h["grad"] for h in halves]), y.grad)
    torch.testing.assert_close(halves[0]["weight"] + halves[1]["weight"], whole[0].weight.grad)
    for name, value in whole.state_dict().items():
        for half in halves:
            torch.testing.assert_close(half[name], value)


def _shards(rank: int, folder: Path) -> tuple[int, dict[str, torch.Tensor], list[torch.Tensor]]:
    torch.manual_seed(0)
    whole = [nn.Parameter(torch.randn(size)) for size in ((7, 3), (1,), (5,))]
    optimizer = ShardedAdamW([{"params": whole}], Processes(rank, 2), lr=0.1, fused=True)
    for k in range(3):
        for p in whole:
            p.grad = torch.cos(p.detach() + k)
        optimizer.step()
    state = build.optimizer_tensors(optimizer)
    saved = [state]
    dist.broadcast_object_list(saved)  # as a checkpoint is: written by the first, read by all
    again = ShardedAdamW([{"params": whole}], Processes(rank, 2), lr=0.1, fused=True)
    build.load_optimizer_tensors(again, saved[0])
    loaded = build.optimizer_tensors(again)
    assert set(loaded) == set(state) and all(torch.equal(value, state[name]) for name, value in loaded.items())
    numbers = sum(s["exp_avg"].numel() for s in optimizer.state.values())
    return numbers, state, [p.detach() for p in whole]


def test_sharded_adamw_is_adamw_with_half_the_state(tmp_path: Path) -> None:
    (numbers, state, values), (others, _, _) = spawned(_shards, tmp_path)
    assert (numbers, others) == (11 + 1 + 3, 10 + 0 + 2)
    torch.manual_seed(0)
    whole = [nn.Parameter(torch.randn(size)) for size in ((7, 3), (1,), (5,))]
    plain = torch.optim.AdamW(whole, lr=0.1, fused=True)
    for k in range(3):
        for p in whole:
            p.grad = torch.cos(p.detach() + k)
        plain.step()
    for value, p in zip(values, whole, strict=True):
        torch.testing.assert_close(value, p.detach())
    for name, value in build.optimizer_tensors(plain).items():
        torch.testing.assert_close(state[name], value)


class Allocated(TorchDispatchMode):
    """Counts the bytes of all tensors that are made."""

    bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        out = func(*args, **(kwargs or {}))
        for t in tree_leaves(out):
            if isinstance(t, torch.Tensor) and t.untyped_storage().data_ptr() not in given:
                self.bytes += t.untyped_storage().nbytes()
        return out


def _copies(rank: int, folder: Path) -> tuple[int, int]:
    whole = [nn.Parameter(torch.ones(size)) for size in (10_001, 20_000)]
    optimizer = ShardedAdamW([{"params": whole}], Processes(rank, 2), lr=0.1, fused=True)
    for p in whole:
        p.grad = torch.ones_like(p)
    optimizer.step()  # makes the state
    with Allocated() as step:
        optimizer.step()
    assert all(shard.grad is None for shard in optimizer.shards)  # a view of the whole gradient
    with Allocated() as save:
        optimizer.gathered_state()
    return step.bytes, save.bytes


def test_a_sharded_step_makes_no_copy_and_the_state_is_put_together_once(tmp_path: Path) -> None:
    first, second = spawned(_copies, tmp_path)
    assert max(first[0], second[0], second[1]) < 1000
    assert first[1] == pytest.approx(2 * 4 * 30_001, abs=1000)


def _lonely(rank: int, folder: Path) -> list[int]:
    parameters = [nn.Parameter(torch.ones(4)) for _ in range(3)]
    optimizer = ShardedAdamW([{"params": parameters}], Processes(rank, 2), lr=0.1)
    parameters[1].grad = torch.ones(4)  # the others never have one
    optimizer.step()
    state = optimizer.gathered_state()
    return [len(state), *(s["exp_avg"].numel() for s in state.values())]


def test_sharded_state_of_parameters_without_gradient(tmp_path: Path) -> None:
    assert spawned(_lonely, tmp_path) == ([1, 4], [0])


def _voices(rank: int, folder: Path) -> str:
    try:
        with Processes(rank, 2).one_voice():
            if rank == 1:
                raise BadInput("no such folder.")
    except BadInput as error:
        return type(error).__name__ + str(error)
    return "nothing"


def test_the_number_of_processes_is_read_from_torchrun_or_srun(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LOCAL_WORLD_SIZE", "WORLD_SIZE", "SLURM_STEP_ID", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_NUM_NODES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SLURM_NTASKS", "16")  # in a batch script, without srun: one process
    assert started() == (1, 1)
    monkeypatch.setenv("SLURM_STEP_ID", "0")
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "16")
    monkeypatch.setenv("SLURM_STEP_NUM_NODES", "2")
    assert started() == (8, 2)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert started() == (4, 2)


def test_bad_input_in_one_process_stops_both_and_is_said_once(tmp_path: Path) -> None:
    assert spawned(_voices, tmp_path) == ("SaidElsewhereno such folder.", "BadInputno such folder.")
    assert issubclass(SaidElsewhere, BadInput)


# ----------------------------------------------------------------------------------------------------- the command line

TINY = "--model.width 16 --model.depth 1 --model.heads 2 --model.head-hidden 16 --model.head-output 8 --images 64"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "byov"]


def torchrun(*arguments: str) -> subprocess.Popen[str]:
    command = [*TORCHRUN, "train", "digits", *TINY.split(), "--optim.batch-size", "16", *arguments]
    env = {k: v for k, v in os.environ.items() if k not in ("OMP_NUM_THREADS",)}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)


def test_torchrun_trains_and_one_process_goes_on(tmp_path: Path) -> None:
    run = tmp_path / "run"
    process = torchrun("--out", str(run), "--optim.epochs", "2", "--optim.shard")
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    assert out.count("images_per_second") == 1  # reported once
    assert json.loads((run / "summary.json").read_text())["steps"] == 8
    assert "threads: 1" in (run / "config.yaml").read_text()
    extend = [sys.executable, "-m", "byov", "train", "--out", str(run), "--extend", "1"]
    assert subprocess.run(extend, capture_output=True, timeout=300).returncode == 0
    assert json.loads((run / "summary.json").read_text())["steps"] == 12


def test_torchrun_says_a_mistake_once(tmp_path: Path) -> None:
    process = torchrun("--out", str(tmp_path / "run"), "--optim.batch-size", "15")
    _, err = process.communicate(timeout=300)
    assert process.returncode != 0
    assert err.count("byov: ") == 1 and "must divide optim.batch_size" in err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("mistake", ["a run is there", "one has no folder"])
def test_torchrun_stops_where_one_process_alone_meets_a_mistake(tmp_path: Path, mistake: str) -> None:
    run = tmp_path / "run"
    run.mkdir()
    if mistake == "a run is there":
        (run / "config.yaml").write_text("seed: 1")
        process = torchrun("--out", str(run))
    else:  # rank 1's working folder is another, as on a node with its own disks
        code = (
            "import os, sys; os.chdir(sys.argv.pop(1 + int(os.environ['RANK']))); sys.argv.pop(1); import byov.__main__"
        )
        (tmp_path / "entry.py").write_text(code)
        (run / "photos").mkdir()
        Image.new("RGB", (8, 8)).save(run / "photos" / "a.png")
        command = [*TORCHRUN[:-2], str(tmp_path / "entry.py"), str(run), str(tmp_path), "train"]
        command += ["--data", "folder:photos", "--out", str(tmp_path / "out")]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    _, err = process.communicate(timeout=120)
    assert process.returncode != 0
    assert err.count("byov: ") == 1 and ("exists already" in err or "there is no folder" in err), err


def test_torchrun_saves_when_interrupted(tmp_path: Path) -> None:
    run = tmp_path / "run"
    process = torchrun("--out", str(run), "--optim.epochs", "100000", "--monitor.log-every", "1")
    lines = run / "metrics.jsonl"
    for _ in range(600):
        if (lines.exists() and lines.read_text().count("\n") > 3) or process.poll() is not None:
            break
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=120)
    assert "saved at step" in err, err
    _, state = checkpoints.load(run / "checkpoints" / "last.safetensors")
    assert state["step"] >= 3


def test_the_loss_of_a_process_is_said(tmp_path: Path) -> None:
    """Without torchrun, which would end the other process."""
    run, port = tmp_path / "run", str(free_port())
    command = [sys.executable, "-m", "byov", "train", "digits", *TINY.split(), "--optim.batch-size", "16"]
    command += ["--out", str(run), "--optim.epochs", "100000", "--monitor.log-every", "1", "--threads", "1"]
    env = os.environ | {"LOCAL_WORLD_SIZE": "2", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    first, second = (
        subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=env | {"RANK": r, "LOCAL_RANK": r})
        for r in ("0", "1")
    )
    for _ in range(600):
        lines = run / "metrics.jsonl"
        if (lines.exists() and lines.read_text().count("\n") > 3) or first.poll() is not None:
            break
        time.sleep(0.1)
    second.kill()
    _, err = first.communicate(timeout=120)
    assert first.returncode == 1 and "Traceback" not in err, err
    assert err.splitlines()[-1].startswith("byov: another process of this run has ended, so this one stops")


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])
