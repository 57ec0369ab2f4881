"""Processes that work together, started by torchrun or SLURM: each has a share of every batch, or of the draws."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, distributed

from byov._core.errors import BadInput, SaidElsewhere


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

    def call(self, work: Any, images: Tensor) -> None:
        """Asks the others to take part in some work on images. Here all come to it by themselves; see `Led`."""

    def in_turn(self, mine: Any) -> Iterator[Any]:
        """What each process has, one after the other, so that memory stays flat."""
        for rank in range(self.world):
            box = [mine if rank == self.rank else None]
            if self.world > 1:
                distributed.broadcast_object_list(box, src=rank)
            yield box[0]

    def leave(self) -> None:
        """End the process group; torch warns if it is not."""
        if self.world > 1 and distributed.is_initialized():
            distributed.destroy_process_group()


@dataclass(frozen=True)
class Led(Processes):
    """Processes of which the first alone knows what there is to do: it calls, and the others wait to be called.

    They do their part of the work and send it back; only the first has the whole.
    """

    def call(self, work: Any, images: Tensor) -> None:
        """Sends work and its images to the others. Images go as they are: pickled, they take four times as much."""
        if self.main and self.world > 1:
            distributed.broadcast_object_list([(work, images.shape, images.dtype)], src=0)
            distributed.broadcast(images.contiguous(), src=0)

    def called(self) -> Iterator[tuple[Any, Tensor]]:
        """The work that the first sends, with its images, one after the other, until it sends no more."""
        while True:
            box: list[Any] = [None]
            with _ended_at_once():
                distributed.broadcast_object_list(box, src=0)
                if box[0] is None:
                    return
                work, shape, dtype = box[0]
                images = torch.empty(shape, dtype=dtype)
                distributed.broadcast(images, src=0)
            yield work, images
            del images  # before the next ones come

    def in_turn(self, mine: Any) -> Iterator[Any]:
        """What each process has, one after the other, for the first alone."""
        if not self.main:
            distributed.send_object_list([mine], dst=0)
            return
        yield mine
        for rank in range(1, self.world):
            box: list[Any] = [None]
            distributed.recv_object_list(box, src=rank)
            yield box[0]

    def part(self) -> None:
        """There is no more work: all may go."""
        if self.main and self.world > 1:
            with suppress(RuntimeError):  # who is not there any more needs no goodbye
                distributed.broadcast_object_list([None], src=0)
        self.leave()


@contextmanager
def _ended_at_once() -> Iterator[None]:
    """Ctrl-C ends the process within: Python's own way would wait for the end of what torch waits for."""
    before = signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def has_gone(error: RuntimeError) -> bool:
    """Whether torch.distributed failed because another process has ended."""
    return any(word in str(error) for word in ("closed by peer", "reset by peer", "Broken pipe"))


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


def started() -> tuple[int, int]:
    """Return how many processes torchrun or SLURM's srun has started on this node, and the number of nodes."""
    local = int(os.environ.get("LOCAL_WORLD_SIZE", 0))
    if local:
        return local, int(os.environ["WORLD_SIZE"]) // local
    if not os.environ.get("SLURM_STEP_ID", "").isdigit():  # in a batch script itself, or not on a cluster
        return 1, 1
    tasks, nodes = int(os.environ["SLURM_STEP_NUM_TASKS"]), int(os.environ.get("SLURM_STEP_NUM_NODES", 1))
    return tasks // nodes, nodes
