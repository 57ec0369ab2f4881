"""Processes that work together, started by torchrun or SLURM: each has a share of every batch, or of the draws."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import Tensor, distributed

from byov._core.errors import BadInput, SaidElsewhere
from byov.training.resolve import cores

T = TypeVar("T")


@dataclass(frozen=True)
class Processes:
    """This process among all, and their collective operations. For a single process they cost nothing."""

    rank: int = 0
    world: int = 1

    @property
    def main(self) -> bool:
        return self.rank == 0

    def average_(self, tensors: Sequence[Tensor]) -> None:
        """Replace tensors by their means over the processes, with one all-reduce for all of them."""
        if self.world > 1:
            flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
            distributed.all_reduce(flat)
            flat.div_(self.world)
            for tensor, part in zip(tensors, torch.split(flat, [tensor.numel() for tensor in tensors]), strict=True):
                tensor.copy_(part.view_as(tensor))

    def any(self, *flags: bool) -> tuple[bool, ...]:
        """Return for each flag whether it is set in any process, so that all act alike after the same step."""
        if self.world == 1:
            return flags
        device = "cuda" if distributed.get_backend() == "nccl" else "cpu"
        raised = torch.tensor([float(flag) for flag in flags], device=device)
        distributed.all_reduce(raised)
        return tuple(bool(flag) for flag in raised > 0)

    @contextmanager
    def one_voice(self) -> Iterator[None]:
        """Stop all processes if any raises BadInput in the block; the first of these reports it.

        All wait for each other at the end. The block must not contain collective operations: a process that raised
        would be missing.
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

    def first_then_others(self, load: Callable[[], T]) -> T:
        """Call `load` in the first process, then in the others, which find what the first has cached.

        Bad input in any process stops them all, as in `one_voice`.
        """
        found: list[T] = []
        for turn in (True, False):
            with self.one_voice():
                if self.main is turn:
                    found.append(load())
        return found[0]

    def from_first(self, make: Callable[[], T]) -> T:
        """Return what `make` gives in the first process, the only one that calls it."""
        box: list[Any] = [make() if self.main else None]
        if self.world > 1:
            self._broadcast(box, 0)
        return box[0]  # type: ignore[no-any-return]

    def in_turn(self, mine: T) -> Iterator[T]:
        """Yield what each process has, in the order of ranks; one at a time, so that memory stays flat."""
        for rank in range(self.world):
            box: list[Any] = [mine if rank == self.rank else None]
            if self.world > 1:
                self._broadcast(box, rank)
            yield box[0]

    @staticmethod
    def _broadcast(box: list[Any], rank: int) -> None:
        try:
            distributed.broadcast_object_list(box, src=rank)
        except RuntimeError:  # another process has ended
            time.sleep(0)  # if Ctrl-C ended it, raises this process's own KeyboardInterrupt first
            raise

    def leave(self) -> None:
        """End the process group; torch warns if it is not."""
        if self.world > 1 and distributed.is_initialized():
            distributed.destroy_process_group()


def meet(device: str, local: int, nodes: int, precision: Any = "32-true", backend: str | None = None) -> Any:
    """Launch a Fabric for this process's device, with `local` processes on each of the nodes.

    `backend` is that of torch.distributed; None chooses by device.
    """
    from lightning_fabric import Fabric  # slow to import: only if it is needed
    from lightning_fabric.strategies.ddp import DDPStrategy

    # torch's timeout is 10 to 30 minutes; decoding a large folder, while the others wait, may take longer.
    many = local * nodes > 1
    strategy = DDPStrategy(process_group_backend=backend, timeout=timedelta(days=1)) if many else "auto"
    fabric = Fabric(accelerator=device, devices=local, num_nodes=nodes, strategy=strategy, precision=precision)
    fabric.launch()
    return fabric


@contextmanager
def joined(device: str, threads: int | None) -> Iterator[tuple[Processes, str]]:
    """Join the processes that torchrun or srun started, and leave them at the end; for work that shares results only.

    Yields this process and its device. Each has its share of the cores, unless `threads` were given. All run the same
    code, so all meet the same bad input: only the first reports it.
    """
    local, nodes = started()
    if local * nodes == 1:
        yield Processes(), device
        return
    if threads is None:
        torch.set_num_threads(max(1, cores() // local))
    fabric = meet(device, local, nodes, backend="gloo")  # results are in main memory
    processes = Processes(fabric.global_rank, fabric.world_size)
    try:
        yield processes, str(fabric.device)
    except BadInput as error:
        raise error if processes.main else SaidElsewhere(str(error)) from error
    processes.leave()  # not after an error: the others may wait for this process


def started() -> tuple[int, int]:
    """Return how many processes torchrun or SLURM's srun has started on this node, and the number of nodes."""
    local = int(os.environ.get("LOCAL_WORLD_SIZE", 0))
    if local:
        return local, int(os.environ["WORLD_SIZE"]) // local
    if not os.environ.get("SLURM_STEP_ID", "").isdigit():  # in a batch script itself, or not on a cluster
        return 1, 1
    tasks, nodes = int(os.environ["SLURM_STEP_NUM_TASKS"]), int(os.environ.get("SLURM_STEP_NUM_NODES", 1))
    return tasks // nodes, nodes
