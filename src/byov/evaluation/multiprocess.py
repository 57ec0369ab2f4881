"""`byov evaluate` in many processes: the first evaluates, the others take their part of every pass over draws.

    torchrun --nproc-per-node 8 -m byov evaluate runs/mine --draws 50

Draws are what an evaluation spends its time on, and each can be passed anywhere. All else is done by the first alone:
the others read the run's folder, and get the images with the work.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch

from byov._core.errors import BadInput
from byov.evaluation.predictive import over_draws
from byov.inference.load import load
from byov.inference.reference import ReferenceSet
from byov.training.distributed.processes import Led, has_gone, meet, started
from byov.training.resolve import cores


@contextmanager
def gathered(device: str, threads: int | None) -> Iterator[tuple[Led, str]]:
    """All processes of this command, and the device of this one. At the end the helpers are sent home.

    After an error they are not: they may be amid their work. torchrun ends them, or they find that the first has gone.
    threads: unset, where there are several processes, each has its share of the cores, as in training.
    """
    local, nodes = started()
    if local * nodes == 1:
        yield Led(), device
        return
    if threads is None:
        torch.set_num_threads(max(1, cores() // local))
    fabric = meet(device, local, nodes, backend="gloo")  # what is sent lies in main memory
    processes = Led(fabric.global_rank, fabric.world_size)
    yield processes, str(fabric.device)
    processes.part()


def help_draws(processes: Led, device: str) -> None:
    """Passes this process's draws of all that the first asks about, until it is done, or gone."""
    banks: dict[Path, ReferenceSet] = {}
    try:
        for (folder, weights, draws, asked, work), images in processes.called():
            if folder not in banks or banks[folder].folder.name != weights:
                banks[folder] = _opened(folder, weights, processes, device)
            over_draws(banks[folder], draws, replace(asked, images=images), work, lambda what, done, total: None)
            del images  # before the next ones come
    except RuntimeError as error:
        if not has_gone(error):
            raise


def _opened(folder: Path, weights: str, processes: Led, device: str) -> ReferenceSet:
    """The bank of a run; that the first has opened the same weights is told by a digest of them."""
    bank = ReferenceSet(load(folder, device, processes))
    if bank.folder.name != weights:
        raise BadInput(f"{folder} has been trained further meanwhile, or is another run here: repeat the command.")
    return bank
