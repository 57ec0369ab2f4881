"""Run commands in parallel worker processes, each on its share of the cores and with its output in a file."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from byov.training.resolve import cores


def cores_each(jobs: int) -> int:
    """Return how many cores each of so many processes gets."""
    return max(1, cores() // jobs)


class Task(NamedTuple):
    """A command to run, and the file for its output."""

    command: Sequence[str]
    log: Path


PR_SET_PDEATHSIG = 1  # linux/prctl.h
_c_library = ctypes.CDLL(None) if sys.platform == "linux" else None


def _end_with_parent() -> None:
    """Have the system end this process as Ctrl-C does if its parent is killed: it would hold its run for hours."""
    assert _c_library is not None
    _c_library.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


class Worker:
    """A process that runs a task."""

    def __init__(self, task: Task, threads: int) -> None:
        self.log = task.log
        self.log.parent.mkdir(parents=True, exist_ok=True)
        own = {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
        with self.log.open("ab") as log:
            self.begun = log.tell()
            # A separate process group: Ctrl-C reaches it once, by `stop`, and not from the terminal too.
            self.process = subprocess.Popen(
                task.command,
                stdout=log,
                stderr=log,
                env=os.environ | own,
                process_group=0,
                preexec_fn=_end_with_parent if sys.platform == "linux" else None,
            )

    @property
    def code(self) -> int | None:
        """The exit code; None while it runs."""
        return self.process.poll()

    @property
    def last_line(self) -> str:
        """The last line of its output, or the signal that ended it."""
        if (self.code or 0) < 0:
            return f"it was ended by signal {-(self.code or 0)}"
        lines = self.log.read_bytes()[self.begun :].decode("utf-8", "replace").strip().splitlines()
        return lines[-1].removeprefix("byov: ") if lines else "it printed nothing"


def stop(workers: Sequence[Worker]) -> None:
    """Terminate all, and wait until they have saved their state."""
    for worker in workers:
        worker.process.terminate()
    for worker in workers:
        worker.process.wait()


def run_in_parallel(tasks: Sequence[Task], jobs: int) -> Iterator[tuple[int, Worker]]:
    """Run all tasks, `jobs` at a time; yield each finished worker with the index of its task."""
    waiting, running = list(enumerate(tasks)), list[tuple[int, Worker]]()
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                index, task = waiting.pop(0)
                running.append((index, Worker(task, cores_each(jobs))))
            time.sleep(0.2)
            for ended in [each for each in running if each[1].code is not None]:
                running.remove(ended)
                yield ended
    finally:
        stop([worker for _, worker in running])
