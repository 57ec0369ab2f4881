"""The processes that train together: started by torchrun or SLURM, each with its share of every batch."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, distributed

from byov.errors import BadInput, SaidElsewhere


@dataclass(frozen=True)
class Processes:
    """This process among all of them, and what they do together. Alone, everything here costs nothing."""

    rank: int = 0
    world: int = 1

    @property
    def main(self) -> bool:
        return self.rank == 0

    def average_(self, tensors: Sequence[Tensor]) -> None:
        """Replaces tensors by their means over the processes: one all-reduce, however many they are."""
        if self.world > 1:
            flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
            distributed.all_reduce(flat)
            flat.div_(self.world)
            for tensor, part in zip(tensors, torch.split(flat, [tensor.numel() for tensor in tensors]), strict=True):
                tensor.copy_(part.view_as(tensor))

    def any(self, *flags: bool) -> tuple[bool, ...]:
        """Each flag: whether it is up in any process. All then do the same thing after the same step."""
        if self.world == 1:
            return flags
        device = "cuda" if distributed.get_backend() == "nccl" else "cpu"
        raised = torch.tensor([float(flag) for flag in flags], device=device)
        distributed.all_reduce(raised)
        return tuple(bool(flag) for flag in raised > 0)

    @contextmanager
    def one_voice(self) -> Iterator[None]:
        """Bad input that any process meets in the block stops them all; the first that met it tells of it.

        All wait for one another at its end. Nothing collective may happen within: who has met bad input is not there.
        """
        met: BadInput | None = None
        try:
            yield
        except BadInput as error:
            met = error
        if self.world > 1:
            sentences: list[Any] = [None] * self.world
            distributed.all_gather_object(sentences, None if met is None else str(met))
            speaker = next((rank for rank, sentence in enumerate(sentences) if sentence is not None), self.rank)
            if speaker != self.rank:
                raise SaidElsewhere(sentences[speaker])
        if met is not None:
            raise met

    def leave(self) -> None:
        """Ends the group: torch complains of one that is left standing."""
        if self.world > 1 and distributed.is_initialized():
            distributed.destroy_process_group()


def started() -> tuple[int, int]:
    """How many processes torchrun or SLURM's srun has started: on this node, and the number of nodes."""
    local = int(os.environ.get("LOCAL_WORLD_SIZE", 0))
    if local:
        return local, int(os.environ["WORLD_SIZE"]) // local
    if not os.environ.get("SLURM_STEP_ID", "").isdigit():  # in a batch script itself, or on no cluster at all
        return 1, 1
    tasks, nodes = int(os.environ["SLURM_STEP_NUM_TASKS"]), int(os.environ.get("SLURM_STEP_NUM_NODES", 1))
    return tasks // nodes, nodes
