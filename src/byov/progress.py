"""Progress of long work: a bar with speed and ETA on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import time
from typing import Any, Protocol

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

QUIET_SECONDS = 20  # between two lines where there is no terminal


class Position(Protocol):
    """Where a training run is."""

    step: int
    total: int


class StepProgress:
    """Shows the steps of a training run."""

    def __init__(self, console: Console, position: Any) -> None:
        self.console = console
        self.position = position
        columns = (
            TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed}/{task.total}"),
            TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn(), TextColumn("{task.fields[note]}"),
        )
        self.bar = Progress(*columns, console=console, disable=not console.is_terminal)
        self.note = ""
        self.told = time.monotonic()
        self.begun = time.monotonic()
        self.first = position.step

    def __enter__(self) -> StepProgress:
        self.bar.start()
        self.task = self.bar.add_task("training", total=self.position.total, completed=self.position.step, note="")
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.stop()

    def say(self, text: str) -> None:
        self.console.print(text, soft_wrap=True)

    def on_step(self, step: int, row: dict[str, Any]) -> None:
        if "loss" in row:
            self.note = f"loss {row['loss']:.3f}  {row['images_per_second']:.0f} images/s"
        self.bar.update(self.task, completed=step, note=self.note)
        now = time.monotonic()
        if not self.console.is_terminal and (now - self.told > QUIET_SECONDS or step == self.position.total):
            self.told = now
            left = (now - self.begun) / max(step - self.first, 1) * (self.position.total - step)
            self.say(f"step {step}/{self.position.total}  {self.note}  {left:.0f} s left")
