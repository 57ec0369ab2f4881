"""Callbacks for progress and messages of long work."""

from __future__ import annotations

import sys
from collections.abc import Callable

Progress = Callable[[str, int, int], None]
"""Receives the name of a step, how much of it is done, and its total (bytes or images)."""

Say = Callable[[str], None]
"""Receives a sentence for the user, such as a warning."""


def say_on_stderr(text: str) -> None:
    print(text, file=sys.stderr)
