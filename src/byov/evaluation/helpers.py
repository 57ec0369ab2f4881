"""`byov evaluate` in many processes: the first evaluates, the others take their part of every pass over draws.

    torchrun --nproc-per-node 8 -m byov evaluate runs/mine --draws 50

Draws are what an evaluation spends its time on, and each can be passed anywhere. All else is done by the first alone,
so that the others need no data: the images come with the work.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from byov.evaluation.predictive import over_draws
from byov.evaluation.reference import Bank
from byov.evaluation.run import load
from byov.training.processes import Led, Processes, meet, started


@contextmanager
def gathered(device: str) -> Iterator[tuple[Led, str]]:
    """All processes of this command, and the device of this one. At the end the helpers are sent home.

    After an error they are not: they may be amid their work. torchrun ends them, or they find that the first has gone.
    """
    local, nodes = started()
    if local * nodes == 1:
        yield Led(), device
        return
    fabric = meet(device, local, nodes, backend="gloo")  # what is sent lies in main memory
    processes = Led(fabric.global_rank, fabric.world_size)
    yield processes, str(fabric.device)
    processes.part()


def help_draws(processes: Led, device: str) -> None:
    """Passes this process's draws of all that the first asks about, until it is done."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Python's own waits for the end of what torch waits for
    banks: dict[Path, Bank] = {}
    for folder, draws, asked, work in processes.called():
        if folder not in banks:
            banks[folder] = Bank(load(folder, device, Processes(processes.rank, processes.world)))
        over_draws(banks[folder], draws, asked, work, lambda what, done, total: None)
