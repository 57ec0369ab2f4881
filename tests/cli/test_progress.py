from io import StringIO
from types import SimpleNamespace

import pytest
from rich.console import Console

from byov.cli.progress import StepProgress


@pytest.mark.parametrize(("kl", "shown"), [(50.0, "loss 1.500  kl 0.250"), (None, "loss 1.500  200 images/s")])
def test_loss_is_shown_without_the_kl(kl: float | None, shown: str) -> None:
    progress = StepProgress(Console(file=StringIO()), SimpleNamespace(step=0, total=10))
    progress.on_step(1, {"loss": 1.75, "nll": 1.5, "kl": kl, "images_per_second": 200.0})
    progress.on_step(2, {})  # nothing logged at this step: the note stays
    assert progress.note.startswith(shown)
