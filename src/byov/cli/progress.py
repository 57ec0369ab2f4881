"""Show the progress of long work: a bar with speed and time left on a terminal, an occasional line elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Protocol, Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Column

QUIET_SECONDS = 20  # between two lines where there is no terminal
NOTE = len("loss 0.123  kl 0.123  1234 images/s")
SPEED = len("1,234 images/s")


class Position(Protocol):
    """The position of a training run."""

    @property
    def step(self) -> int: ...

    @property
    def total(self) -> int: ...


class _Bar:
    """A bar for the duration of a block, one line of the console wide; without a terminal it draws nothing."""

    def __init__(self, console: Console, count: str, count_width: int, note_width: int = 0) -> None:
        """Make the columns fit one line: `count` is how much is done, `note_width` what the longest note takes."""
        self.console = console
        bar = max(8, min(40, console.width - 80))
        taken = bar + count_width + len("0:00:00 left") + 5  # with the spaces between columns
        free = max(8, console.width - taken - (note_width and note_width + 1))

        def text(template: str, width: int | None = None) -> TextColumn:
            column = Column(no_wrap=True, overflow="ellipsis", max_width=width)
            return TextColumn(template, markup=False, table_column=column)

        note = max(1, console.width - taken - free)
        self.bar = Progress(
            text("{task.description}", free),
            BarColumn(bar),
            text(count),
            TimeRemainingColumn(table_column=Column(no_wrap=True)),
            text("left"),
            text("{task.fields[note]}", note),
            console=console,
            disable=not self.shown,
        )
        self.told = time.monotonic()

    @property
    def shown(self) -> bool:
        return self.console.is_terminal

    def __enter__(self) -> Self:
        self.bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.bar.stop()

    def say(self, text: str) -> None:
        self.console.print(text, soft_wrap=True, markup=False)

    def quiet(self) -> bool:
        """Return whether a line is due: there is no bar, and the last line was a while ago."""
        due = not self.shown and time.monotonic() - self.told > QUIET_SECONDS
        self.told = time.monotonic() if due else self.told
        return due


class StepProgress(_Bar):
    """Show the steps of a training run."""

    def __init__(self, console: Console, position: Position) -> None:
        super().__init__(console, "{task.completed}/{task.total}", 2 * len(str(position.total)) + 1, NOTE)
        self.position = position
        self.task = self.bar.add_task("training", total=position.total, completed=position.step, note="")
        self.note = ""
        self.begun, self.first = time.monotonic(), position.step

    def on_step(self, step: int, row: dict[str, Any]) -> None:
        if row:
            # The weight of the KL rises while training: shown apart, or the loss would seem to get worse.
            kl = "" if row["kl"] is None else f"  kl {row['loss'] - row['nll']:.3f}"
            self.note = f"loss {row['nll']:.3f}{kl}  {row['images_per_second']:.0f} images/s"
        self.bar.update(self.task, completed=step, note=self.note)
        if self.quiet():
            left = (time.monotonic() - self.begun) / max(step - self.first, 1) * (self.position.total - step)
            self.say(f"step {step}/{self.position.total}  {self.note}  {left:.0f} s left")


class StageProgress(_Bar):
    """Show work in stages (fetching, decoding, probing): one bar, or one line, per stage.

    A total of 0 means that it is not known yet.
    """

    def __init__(self, console: Console, note_width: int = 0) -> None:
        super().__init__(console, "{task.percentage:>3.0f}%", 4, note_width)
        self.tasks: dict[str, TaskID] = {}

    def __call__(self, what: str, done: int, total: int) -> None:
        if what not in self.tasks:
            self.tasks[what] = self.bar.add_task(what, total=total or None, note="")
            if not self.shown:
                self.say(what)
        self.bar.update(self.tasks[what], completed=done, total=total or None)
        if self.quiet():
            self.say(f"{what}: {done / total:.0%}" if total else f"{what}: {done:,}")


def with_speed(stages: StageProgress) -> Callable[[str, int, int], None]:
    """The same progress, with images per second next to the bar of scoring."""
    begun: dict[str, tuple[float, int]] = {}

    def progress(what: str, done: int, total: int) -> None:
        stages(what, done, total)
        start, first = begun.setdefault(what, (time.monotonic(), done))
        if what.startswith("scoring ") and done > first:
            speed = (done - first) / (time.monotonic() - start)
            stages.bar.update(stages.tasks[what], note=f"{speed:,.0f} images/s")

    return progress
