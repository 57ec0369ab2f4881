"""A run that was stopped in any way ends bit-equal to one that was not."""

from __future__ import annotations

import dataclasses
import gc
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import byov
from byov._core import lock as locks
from byov._core.errors import BadInput
from byov.config import Config, merge, read_config, read_recipe
from byov.runs import checkpoints
from byov.training.loop import Trainer
from byov.training.prepare import prepare

KILLS = int(os.environ.get("BYOV_KILLS", "4"))  # BYOV_KILLS=20 pytest tests/training/test_resume.py -k kill
SMALL: dict[str, Any] = {
    "images": 64,
    "threads": 1,
    "model": {"width": 32, "depth": 1, "heads": 2, "head_hidden": 32, "head_output": 16},
    "optim": {"epochs": 2, "batch_size": 16},
    "monitor": {"tensorboard": False, "log_every": 3, "knn_every": 1, "checkpoint_steps": 3},
}


def small(changes: dict[str, Any] | None = None, epochs: int = 2) -> Config:
    config = merge(merge(read_recipe("digits"), SMALL, "test"), changes or {}, "test")
    return dataclasses.replace(config, optim=dataclasses.replace(config.optim, epochs=epochs))


def finish(trainer: Trainer) -> Trainer:
    trainer.say = lambda text: None
    trainer.run()
    assert trainer.step == trainer.total
    return trainer


class PlugPulled(Exception):
    pass


def stop_at(trainer: Trainer, step: int) -> None:
    """Trains until just before the state of `step` could be saved, then stops without saving, as kill -9 does."""

    def pull(at: int, row: dict[str, Any]) -> None:
        if at == step:
            raise PlugPulled

    trainer.on_step = pull
    with pytest.raises(PlugPulled):
        trainer.run()


def last(folder: Path) -> Path:
    return folder / "checkpoints" / "last.safetensors"


def rows(folder: Path, name: str = "metrics") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]


def assert_same_end(one: Path, other: Path) -> None:
    """Every tensor of both last checkpoints is bit-equal, and both logs hold the same rows, each step once."""
    a, b = load_file(last(one)), load_file(last(other))
    assert a.keys() == b.keys() and any(name.startswith("optimizer.") for name in a)
    different = [name for name in a if a[name].numpy().tobytes() != b[name].numpy().tobytes()]
    assert not different
    states = [checkpoints.load(last(folder))[1] for folder in (one, other)]
    assert states[0]["step"] == states[1]["step"] == states[0]["total"]
    for name in ("metrics", "posterior"):
        told = [[{k: v for k, v in row.items() if k not in CLOCK} for row in rows(f, name)] for f in (one, other)]
        assert told[0] == told[1]
    steps = [row["step"] for row in rows(other)]
    assert steps == sorted(set(steps)) and steps[-1] == states[1]["total"]


CLOCK = ("images_per_second", "memory_mib")


# ------------------------------------------------------------------------------------------------------------- kill -9


def command(folder: Path, *more: str) -> list[str]:
    return [str(Path(sys.executable).parent / "byov"), "train", "--out", str(folder), "--resume", *more]


def start(folder: Path) -> subprocess.Popen[bytes]:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    quiet = subprocess.DEVNULL
    return subprocess.Popen(command(folder), stdin=quiet, stdout=quiet, stderr=quiet, env=environment)


def wait_for(condition: Callable[[], bool], process: subprocess.Popen[bytes], seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while not condition() and process.poll() is None:
        assert time.monotonic() < end, "the process does not get on"
        time.sleep(0.005)


def at_work(folder: Path) -> Callable[[], bool]:
    """Whether a process started from now on has begun to train: it then reopens the log."""
    log = folder / "metrics.jsonl"
    before = log.stat().st_ino if log.exists() else None
    return lambda: log.exists() and log.stat().st_ino != before and log.stat().st_size > 0


def test_kill_at_random_moments_changes_nothing(tmp_path: Path) -> None:
    config = small({"monitor": {"checkpoint_steps": 4, "knn_every": 10}}, epochs=30 * KILLS)
    reference, killed = tmp_path / "reference", tmp_path / "killed"
    prepare(config, killed)
    chance = random.Random(KILLS)
    codes = []
    for _ in range(KILLS):
        ready = at_work(killed)
        process = start(killed)
        if chance.random() < 0.8:  # else at any moment, also before the first step
            wait_for(ready, process)
            time.sleep(chance.uniform(0, 1))
        else:
            time.sleep(chance.uniform(0, 6))
        process.kill()
        codes.append(process.wait())
        if last(killed).exists():
            checkpoints.load(last(killed))  # always whole
    assert codes.count(-signal.SIGKILL) > KILLS // 2, f"most runs ended before they were killed: {codes}"
    finish(prepare(config, reference))
    finish(prepare(read_config(killed / "config.yaml"), killed, resume=True))
    assert_same_end(reference, killed)
    assert not list(killed.rglob("*.tmp")), "a checkpoint that was never finished is still there"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_save_first(tmp_path: Path, number: signal.Signals) -> None:
    config = small({"monitor": {"checkpoint_steps": 1000, "knn_every": 10}}, epochs=100)
    reference, stopped = tmp_path / "reference", tmp_path / "stopped"
    prepare(config, stopped)
    ready = at_work(stopped)
    process = start(stopped)
    wait_for(ready, process)
    process.send_signal(number)
    assert process.wait() == 130
    _, state = checkpoints.load(last(stopped))
    assert 0 < state["step"] < state["total"]
    assert rows(stopped)[-1]["step"] <= state["step"], "saved later than logged"
    finish(prepare(config, reference))
    finish(prepare(read_config(stopped / "config.yaml"), stopped, resume=True))
    assert_same_end(reference, stopped)


# ---------------------------------------------------------------------------------------------------- within a process

METHODS: dict[str, dict[str, Any]] = {
    "byov, teacher moments, accumulated": {
        "posterior": {"prior": "teacher_moments"},
        "optim": {"accumulate": 2},
    },
    "byov, teacher mean, a draw a view": {"posterior": {"prior": "teacher_mean", "draw": "view"}},
    "byov, newton": {"optim": {"variances": "newton"}},
    "byov, newton, teacher moments": {"optim": {"variances": "newton"}, "posterior": {"prior": "teacher_moments"}},
    "byov, flipout": {"posterior": {"draw": "flipout"}},
    "byov, linear only, conv stem": {"posterior": {"where": "linear"}, "model": {"stem": "conv"}},
    "byov, float64, class token": {"precision": "64-true", "model": {"pool": "cls", "positions": "learned"}},
    "byol": {"method": "byol"},
    "byol, accumulated": {"method": "byol", "optim": {"accumulate": 2}},
    "supervised": {"method": "supervised"},
    "supervised-bbb": {"method": "supervised-bbb", "posterior": {"draw": "flipout"}},
}


@pytest.mark.parametrize("changes", METHODS.values(), ids=METHODS)
def test_every_method_goes_on_exactly(tmp_path: Path, changes: dict[str, Any]) -> None:
    config = small(changes)
    finish(prepare(config, tmp_path / "whole"))
    stop_at(prepare(config, tmp_path / "cut"), 5)  # the checkpoint is of step 3
    again = prepare(config, tmp_path / "cut", resume=True)
    assert again.step == 3
    stop_at(again, 7)
    again = prepare(config, tmp_path / "cut", resume=True)
    assert again.step == 6
    finish(again)
    assert_same_end(tmp_path / "whole", tmp_path / "cut")


def test_stopped_before_the_first_checkpoint(tmp_path: Path) -> None:
    config = small()
    finish(prepare(config, tmp_path / "whole"))
    stop_at(prepare(config, tmp_path / "cut"), 2)
    again = prepare(config, tmp_path / "cut", resume=True)
    assert again.step == 0
    finish(again)
    assert_same_end(tmp_path / "whole", tmp_path / "cut")


def test_a_run_folder_appears_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(trainer: Trainer) -> None:
        assert not (tmp_path / "cut").exists()  # what kill -9 would leave here blocks nothing
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Trainer, "save", killed)
        prepare(small(), tmp_path / "cut")
    assert list(tmp_path.iterdir()) == []
    prepare(small(), tmp_path / "cut")
    assert last(tmp_path / "cut").is_file() and (tmp_path / "cut" / "config.yaml").is_file()


def test_a_checkpoint_cut_short_leaves_the_one_before(tmp_path: Path) -> None:
    config = small()
    finish(prepare(config, tmp_path / "whole"))
    prepare(config, tmp_path / "cut")
    last(tmp_path / "cut").with_name(".last.safetensors.1.tmp").write_bytes(b"half")
    finish(prepare(config, tmp_path / "cut", resume=True))
    assert_same_end(tmp_path / "whole", tmp_path / "cut")
    assert not list(tmp_path.rglob("*.tmp"))


def test_a_second_process_does_not_touch_a_live_run(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    config = small({"monitor": {"checkpoint_steps": 1000, "knn_every": 1000}}, epochs=2000)
    run = tmp_path / "run"
    prepare(config, run)
    del config
    gc.collect()  # the lock of this process's trainer goes with it
    ready = at_work(run)
    process = start(run)
    try:
        wait_for(ready, process)
        temporary = last(run).with_name(
            f".last.safetensors.{'-'.join(map(str, locks._owner(run / '.lock')))}-0a0a0a0a.tmp"
        )
        temporary.touch()
        begun = rows(run)[0]
        second = subprocess.run(command(run), capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
        assert second.returncode == 2 and second.stderr.splitlines()[-1].startswith(f"byov: {run} is in use by another")
        assert f"process {process.pid} on" in second.stderr and "Traceback" not in second.stderr
        assert temporary.exists() and rows(run)[0] == begun and process.poll() is None
    finally:
        process.kill()
        process.wait()
    prepare(read_config(run / "config.yaml"), run, resume=True)
    assert not temporary.exists() and not list(run.rglob("*.tmp"))


def test_a_checkpoint_of_another_run_is_refused(tmp_path: Path) -> None:
    prepare(small(), tmp_path / "one")
    prepare(dataclasses.replace(small(), seed=5), tmp_path / "two")
    last(tmp_path / "two").replace(last(tmp_path / "one"))
    with pytest.raises(BadInput, match="another seed"):
        prepare(small(), tmp_path / "one", resume=True)


def test_a_line_cut_short_is_written_anew(tmp_path: Path) -> None:
    config = small()
    finish(prepare(config, tmp_path / "whole"))
    stop_at(prepare(config, tmp_path / "cut"), 7)
    log = tmp_path / "cut" / "metrics.jsonl"
    with log.open("a") as file:
        file.write('{"step": 7, "epo')
    finish(prepare(config, tmp_path / "cut", resume=True))
    assert_same_end(tmp_path / "whole", tmp_path / "cut")


def test_resuming_a_finished_run_changes_nothing(tmp_path: Path) -> None:
    config = small()
    finish(prepare(config, tmp_path / "run"))
    before = load_file(last(tmp_path / "run"))
    finish(prepare(config, tmp_path / "run", resume=True))
    after = load_file(last(tmp_path / "run"))
    assert all(torch.equal(before[name], after[name]) for name in before)


# ------------------------------------------------------------------------------------------------ longer, from weights


def test_extend(tmp_path: Path) -> None:
    config = small()
    for name in ("whole", "cut"):
        run = tmp_path / name
        finish(prepare(config, run))
        longer = prepare(read_config(run / "config.yaml"), run, extend=2)
        assert (longer.step, longer.total) == (8, 16)
        assert read_config(run / "config.yaml").optim.epochs == 4
        if name == "whole":
            finish(longer)
            continue
        stop_at(longer, 13)
        with pytest.raises(BadInput, match="not finished"):
            prepare(read_config(run / "config.yaml"), run, extend=2)
        finish(prepare(read_config(run / "config.yaml"), run, resume=True))
    assert_same_end(tmp_path / "whole", tmp_path / "cut")


def test_extend_with_a_pretrained_prior(tmp_path: Path) -> None:
    finish(prepare(small(), tmp_path / "first"))
    config = small({"posterior": {"prior": "pretrained"}}, epochs=1)
    finish(prepare(dataclasses.replace(config, init=str(tmp_path / "first")), tmp_path / "second"))
    prior = load_file(last(tmp_path / "second"))["prior.mean"]
    longer = prepare(read_config(tmp_path / "second" / "config.yaml"), tmp_path / "second", extend=1)
    finish(longer)
    assert torch.equal(load_file(last(tmp_path / "second"))["prior.mean"], prior)


def encoder_weights(folder: Path) -> dict[str, torch.Tensor]:
    return byov.load(folder).encoder.unwrapped().state_dict()


def test_init_from_a_run_and_from_a_file(tmp_path: Path) -> None:
    finish(prepare(small(), tmp_path / "first"))
    weights = encoder_weights(tmp_path / "first")
    save_file({name: tensor.contiguous() for name, tensor in weights.items()}, tmp_path / "encoder.safetensors")
    for name, init in {"run": tmp_path / "first", "file": tmp_path / "encoder.safetensors"}.items():
        for method in ("byov", "byol", "supervised"):
            out = tmp_path / f"{name}-{method}"
            prepare(small({"method": method, "seed": 1, "init": str(init)}), out)
            started = encoder_weights(out)
            assert all(torch.equal(started[key], weights[key]) for key in weights)
            finish(prepare(small({"method": method, "seed": 1, "init": str(init)}), out, resume=True))
            assert not all(torch.equal(encoder_weights(out)[key], weights[key]) for key in weights)
    fresh = tmp_path / "fresh"
    prepare(small({"seed": 1}), fresh)
    assert not all(torch.equal(encoder_weights(fresh)[key], weights[key]) for key in weights)
