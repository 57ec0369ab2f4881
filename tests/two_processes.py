"""Two real processes that meet with gloo."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def spawned(work: Callable[..., Any], folder: Path, *arguments: Any) -> tuple[Any, Any]:
    """What work(rank, folder, *arguments) returns in each of two processes."""
    mp.spawn(_worker, (work, folder, arguments), nprocs=2)
    first, second = (torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(2))
    return first, second


def _worker(rank: int, work: Callable[..., Any], folder: Path, arguments: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    torch.save(work(rank, folder, *arguments), folder / f"{rank}.pt")
    dist.destroy_process_group()
    os._exit(0)  # as the command does: a thread of gloo may still hold a tensor, and a Python closing down then aborts
