"""The progress display: what it shows of training, and that it fits the console."""

from io import StringIO
from types import SimpleNamespace

import pytest
from rich.console import Console

from byov.cli.progress import SPEED, StageProgress, StepProgress, with_speed


@pytest.mark.parametrize(("kl", "shown"), [(50.0, "loss 1.500  kl 0.250"), (None, "loss 1.500  200 images/s")])
def test_loss_is_shown_without_the_kl(kl: float | None, shown: str) -> None:
    progress = StepProgress(Console(file=StringIO()), SimpleNamespace(step=0, total=10))
    progress.on_step(1, {"loss": 1.75, "nll": 1.5, "kl": kl, "images_per_second": 200.0})
    progress.on_step(2, {})  # nothing logged at this step: the note stays
    assert progress.note.startswith(shown)


@pytest.mark.parametrize("width", [60, 80, 120])
def test_every_bar_takes_one_line_of_the_console(width: int) -> None:
    def lines(bar: StepProgress | StageProgress) -> list[str]:
        console = Console(file=StringIO(), width=width)
        console.print(bar.bar.get_renderable())
        return console.file.getvalue().splitlines()

    console = Console(file=StringIO(), width=width, force_terminal=True)
    stages = StageProgress(console, SPEED)
    names = ["decoding " + "a long folder/" * 9, "passing 10,000 images through 100 draws", "scoring photos"]
    for name in names:
        with_speed(stages)(name, 1, 2)
    stages.bar.update(stages.tasks["scoring photos"], note="1,234 images/s")
    shown = lines(stages)
    assert len(shown) == 3 and all(len(line) <= width and "50%" in line and " left" in line for line in shown)
    assert "1,234 images/s" in shown[2] and (width == 60 or "passing 10,000 images" in shown[1])
    steps = StepProgress(console, SimpleNamespace(step=0, total=15000))
    steps.on_step(700, {"loss": 1.75, "nll": 1.5, "kl": 2.0, "images_per_second": 2000.0})
    (line,) = lines(steps)
    assert "700/15000" in line and (width == 60 or "images/s" in line)
