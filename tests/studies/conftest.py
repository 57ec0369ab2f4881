"""A lab whose runs take a second each, trained in the test's own process and shared by all tests of a session."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from byov.config import Config
from byov.studies.framework import lab as labs
from byov.studies.framework.lab import Lab, Scale, identity
from byov.training.prepare import prepare

TINY = {
    "optim.epochs": 1,
    "optim.batch_size": 32,  # two steps: the first has learning rate 0
    "model.width": 16,
    "model.depth": 1,
    "model.heads": 2,
    "model.head_hidden": 16,
    "model.head_output": 8,
    "monitor.tensorboard": False,
}


class TinyLab(Lab):
    """Every run is of a tiny network, for one epoch; what a study changes goes on top."""

    def config(self, method: str, seed: int = 0, changes: dict[str, Any] | None = None) -> Config:
        return super().config(method, seed, TINY | (changes or {}))

    def train(self, configs: Iterable[Config]) -> None:
        for config in {identity(c): c for c in configs}.values():
            if not self.is_trained(config):
                prepare(config, self.path(config), say=lambda text: None).run()


@pytest.fixture(scope="session")
def lab_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("studies")


@pytest.fixture
def lab(lab_folder: Path, monkeypatch: pytest.MonkeyPatch) -> TinyLab:
    """Two seeds (set `lab.seeds` for more or fewer), 96 images of digits, 2 draws."""
    monkeypatch.setitem(labs.SCALES, "tiny", Scale("digits", "digits", 96, 2, 2, "seconds"))
    return TinyLab(lab_folder, "tiny", say=lambda text: None)
