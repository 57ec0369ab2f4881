"""Two processes with one thread each, compared with one process with two threads: the whole BYOV step, batch 128.

`torchrun` starts this file again; there it trains some steps and times itself, and what it spends in all-reduces: the
gradients (one per step) and the batch statistics of the heads. A rank that arrives early waits for the other: the
share is that of the rank that waited least, the closest to the exchange alone that can be measured outside gloo.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from conductor import ratios, summary

ALONE, THREADED, PROCESSES = "1 process x 1 thread", "1 process x 2 threads", "2 processes x 1 thread"
SETUPS = {ALONE: (1, 1), THREADED: (1, 2), PROCESSES: (2, 1)}
WARMUP = 3


def measure(quick: bool) -> dict[str, Any]:
    rounds, steps = (1, 8) if quick else (3, 20)
    times: dict[str, list[float]] = {name: [] for name in SETUPS}
    shares: list[float] = []
    for k in range(rounds):
        for name in (list(SETUPS) * 2)[k % 3 : k % 3 + 3]:
            ranks = _launch(*SETUPS[name], steps)
            times[name].append(max(rank["seconds"] for rank in ranks) / steps)
            if name == PROCESSES:
                shares.append(min(rank["communication"] / rank["seconds"] for rank in ranks))
    from models import BATCH

    return {
        "rounds": rounds,
        "steps": steps,
        "images_per_second": {name: BATCH / summary(t).median for name, t in times.items()},
        "processes_to_threads": ratios(times, THREADED, PROCESSES),
        "speedup_of_two_processes": ratios(times, ALONE, PROCESSES),
        "speedup_of_two_threads": ratios(times, ALONE, THREADED),
        "communication_share": summary(shares),
    }


def _launch(processes: int, threads: int, steps: int) -> list[dict[str, float]]:
    """What each rank reports."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    environment = os.environ | {"OMP_NUM_THREADS": str(threads)}  # or torchrun sets 1, with a warning
    run = subprocess.run(
        [*command, str(Path(__file__).resolve()), str(threads), str(steps)],
        env=environment, stdout=subprocess.PIPE, text=True, check=True,
    )  # fmt: skip
    return [json.loads(line) for line in run.stdout.splitlines() if line.startswith("{")]


def _timed(call: Callable[..., Any], seconds: list[float]) -> Callable[..., Any]:
    def timed(*args: Any, **kwargs: Any) -> Any:
        begun = time.perf_counter()
        result = call(*args, **kwargs)
        seconds.append(time.perf_counter() - begun)
        return result

    return timed


def train(threads: int, steps: int) -> None:
    """One rank."""
    import torch
    from torch import distributed

    from byol_step import STORED
    from byov.data.images import ImageSet
    from byov.training.distributed.processes import Processes
    from byov.training.distributed.sync_batchnorm import share_batch_norms
    from byov.training.learners import build_learner
    from byov.training.loop import Trainer
    from byov.training.step import training_step
    from models import SIDE, config, images

    torch.set_num_threads(threads)
    distributed.init_process_group("gloo")
    processes = Processes(distributed.get_rank(), distributed.get_world_size())
    settings = config("byov", STORED)
    share = (lambda network: share_batch_norms(network, print)) if processes.world > 1 else (lambda network: None)
    learner = build_learner(settings, (3, SIDE, SIDE), None, initialise=share)
    trainer = Trainer(settings, Path(), learner, ImageSet(images(STORED)), processes)
    exchanged: list[float] = []
    distributed.all_reduce = _timed(distributed.all_reduce, exchanged)
    for k in range(WARMUP + steps):
        if k == WARMUP:
            distributed.barrier()
            exchanged.clear()
            begun = time.perf_counter()
        training_step(learner, trainer.optimizer, trainer.batches(k), settings, k, trainer.total, processes)
    seconds = time.perf_counter() - begun
    line = json.dumps({"seconds": seconds, "communication": sum(exchanged)})
    sys.stdout.write(line + "\n")  # in one piece: the other rank writes too
    sys.stdout.flush()
    distributed.destroy_process_group()


if __name__ == "__main__":
    train(int(sys.argv[1]), int(sys.argv[2]))
