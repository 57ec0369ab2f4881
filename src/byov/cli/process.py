"""What every command needs to know of its process: exit codes, ranks, threads, the console."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from byov._core.errors import BadInput
from byov.cli import INTERRUPTED as INTERRUPTED
from byov.config import LARGEST

if TYPE_CHECKING:
    from rich.console import Console

DONE, FAILED, BAD_INPUT = 0, 1, 2


def one_of_many() -> bool:
    """Return whether torchrun or SLURM started several processes."""
    return int(os.environ.get("WORLD_SIZE") or os.environ.get("SLURM_STEP_NUM_TASKS") or 1) > 1


def rank() -> int:
    """Return the rank of this process, as torchrun or SLURM sets it."""
    return int(os.environ.get("RANK") or os.environ.get("SLURM_PROCID") or 0)


def use_threads(count: int | None) -> None:
    """Apply --threads; unset, torch chooses."""
    if count is not None and not 1 <= count <= LARGEST["threads"]:
        raise BadInput(f"--threads must be from 1 to {LARGEST['threads']:,}.")
    if count is not None:
        import torch

        torch.set_num_threads(count)


def console() -> Console:
    """Return the console for progress and messages: stderr, silent on all ranks but the first."""
    from rich.console import Console

    return Console(stderr=True, highlight=False, emoji=False, quiet=rank() > 0)
