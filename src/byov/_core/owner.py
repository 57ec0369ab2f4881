"""Which process made a file, in a form that survives a reused process id, and whether that process has ended."""

from __future__ import annotations

import hashlib
import os
import platform
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import NamedTuple


class Owner(NamedTuple):
    """A process, on any machine."""

    machine: str
    """8 hex digits of the host's name, its boot and the container's process ids."""
    pid: int
    started: int
    """Start time of the process in the machine's clock ticks; 0 where it is not known."""


def this_process() -> Owner:
    """Describe the current process."""
    return _described(os.getpid())


@cache
def _described(pid: int) -> Owner:
    return Owner(_machine(), pid, _start_time(pid) or 0)


def is_gone(owner: Owner) -> bool | None:
    """Return whether a process has ended; None for one of another machine, where nothing is known of it."""
    if owner.machine != _machine():
        return None
    if Path("/proc/self/stat").is_file():
        return _start_time(owner.pid) != owner.started
    try:
        os.kill(owner.pid, 0)
    except ProcessLookupError:
        return True
    except OSError:  # it belongs to another user
        return False
    return False


@cache
def _machine() -> str:
    known = [platform.node()]
    with suppress(OSError):  # only Linux has them
        known.append(Path("/proc/sys/kernel/random/boot_id").read_text())
        known.append(str(Path("/proc/self/ns/pid").readlink()))
    return hashlib.sha256("\n".join(known).encode()).hexdigest()[:8]


def _start_time(pid: int) -> int | None:
    """Read when a process started; None if there is no such process, or it has ended and waits for its parent."""
    try:
        text = Path(f"/proc/{pid}/stat").read_bytes().decode("utf-8", "replace")
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()  # the command's name may hold anything
    return None if fields[0] in "ZX" else int(fields[19])
