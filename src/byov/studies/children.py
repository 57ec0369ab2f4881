"""Commands side by side, each in a process of its own on its share of the cores; what one says goes to a file."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple


def share(jobs: int) -> int:
    """The cores that each of so many processes has."""
    return max(1, (os.cpu_count() or 1) // jobs)


class Order(NamedTuple):
    """What is to be run, and where it writes what it says."""

    command: Sequence[str]
    log: Path


class Child:
    """A command under way."""

    def __init__(self, order: Order, threads: int) -> None:
        self.log = order.log
        self.log.parent.mkdir(parents=True, exist_ok=True)
        cores = {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
        with self.log.open("a", encoding="utf-8") as log:
            self.process = subprocess.Popen(order.command, stdout=log, stderr=log, env=os.environ | cores)

    @property
    def code(self) -> int | None:
        """What it ended with; None while it has not."""
        return self.process.poll()

    @property
    def last_words(self) -> str:
        said: Sequence[str] = self.log.read_text(encoding="utf-8").strip().splitlines() or ["it said nothing"]
        return said[-1].removeprefix("byov: ")

    def stop(self) -> None:
        if self.code is None:
            self.process.terminate()  # it saves
            self.process.wait()


def side_by_side(orders: Sequence[Order], jobs: int) -> Iterator[tuple[int, Child]]:
    """Runs all, `jobs` at a time; gives out each that has ended, with its place among the orders."""
    waiting, running = list(enumerate(orders)), list[tuple[int, Child]]()
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                place, order = waiting.pop(0)
                running.append((place, Child(order, share(jobs))))
            time.sleep(0.2)
            for ended in [each for each in running if each[1].code is not None]:
                running.remove(ended)
                yield ended
    finally:  # on Ctrl-C the children have had it too, and save
        for _, child in running:
            child.stop()
