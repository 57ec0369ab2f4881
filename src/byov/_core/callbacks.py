"""Callbacks that long work reports to."""

from __future__ import annotations

import sys
from collections.abc import Callable

Progress = Callable[[str, int, int], None]
"""Told the step, how much of it is done, and its total (bytes or images)."""

Say = Callable[[str], None]
"""Told a sentence for the user, such as a warning."""


def say_on_stderr(text: str) -> None:
    print(text, file=sys.stderr)
