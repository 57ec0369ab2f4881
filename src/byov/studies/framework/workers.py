"""Commands side by side, each in a process of its own on its share of the cores; what one says goes to a file."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from byov.training.resolve import cores


def share(jobs: int) -> int:
    """The cores that each of so many processes has."""
    return max(1, cores() // jobs)


class Order(NamedTuple):
    """What is to be run, and where it writes what it says."""

    command: Sequence[str]
    log: Path


class Child:
    """A command under way."""

    def __init__(self, order: Order, threads: int) -> None:
        self.log = order.log
        self.log.parent.mkdir(parents=True, exist_ok=True)
        own = {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
        with self.log.open("ab") as log:
            self.begun = log.tell()
            # A group of its own: Ctrl-C reaches it once, by `end`, and not from the terminal too.
            self.process = subprocess.Popen(
                order.command, stdout=log, stderr=log, env=os.environ | own, process_group=0
            )

    @property
    def code(self) -> int | None:
        """What it ended with; None while it has not."""
        return self.process.poll()

    @property
    def last_words(self) -> str:
        if (self.code or 0) < 0:
            return f"it was ended by signal {-(self.code or 0)}"
        said = self.log.read_bytes()[self.begun :].decode("utf-8", "replace").strip().splitlines()
        return said[-1].removeprefix("byov: ") if said else "it said nothing"


def end(children: Sequence[Child]) -> None:
    """Ends all, and waits until they have saved what they have."""
    for child in children:
        child.process.terminate()
    for child in children:
        child.process.wait()


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
    finally:
        end([child for _, child in running])
