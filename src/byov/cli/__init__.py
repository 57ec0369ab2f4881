"""The command line: one file per command in `commands`, what they share next to it."""

import os
import signal
from contextlib import suppress
from types import FrameType

INTERRUPTED = 130


def interrupted(number: int, frame: FrameType | None) -> None:
    """Handle Ctrl-C: raise KeyboardInterrupt, but during an import, end at once.

    Nothing is begun then, and the C++ code of a library that is being loaded may end the process with an abort.
    """
    at = frame
    while at is not None:
        if at.f_code.co_filename.startswith("<frozen importlib"):
            if not int(os.environ.get("RANK") or os.environ.get("SLURM_PROCID") or 0):
                os.write(2, b"byov: interrupted.\n")
            os._exit(INTERRUPTED)
        at = at.f_back
    raise KeyboardInterrupt


with suppress(ValueError):  # not the main thread
    signal.signal(signal.SIGINT, interrupted)  # here, before anything else is imported
