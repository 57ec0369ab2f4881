"""Commands in the tests' own process, and settings that make a run as small as it can be."""

from __future__ import annotations

import pytest

from byov.cli.main import main

SMALL = [
    *("--images", "48", "--optim.batch-size", "16", "--optim.epochs", "1", "--threads", "1"),
    *("--model.width", "16", "--model.depth", "1", "--model.heads", "2"),
    *("--model.head-hidden", "16", "--model.head-output", "8", "--monitor.no-tensorboard"),
]


def run(*arguments: object) -> int:
    """A command in this process; its exit code."""
    with pytest.raises(SystemExit) as stop:
        main([str(argument) for argument in arguments])
    assert isinstance(stop.value.code, int)
    return stop.value.code
