"""A lock on what a command writes: a second process gets one sentence; the lock of a killed process is taken over.

The lock is a small JSON file that names its owner. On the same machine, the owner is alive if its process id still
belongs to a process that started when the owner did. Of a process on another machine, which may share the disk, only
the age of the file is known: its owner touches it every few seconds.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import platform
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from byov._core.errors import BadInput
from byov._core.files import write_text
from byov._core.owner import Owner, is_gone, this_process

BEAT_SECONDS = 15.0  # between two touches
ABANDONED_SECONDS = 120.0  # without a touch: longer than a network disk keeps old file times

_held: dict[Path, int] = {}  # by this process: how many `Lock` objects share each file
_guard = threading.RLock()


class _Record(NamedTuple):
    machine: str
    pid: int
    started: int
    host: str


class Lock:
    """A lock held by this process, until `release`, or until the object or the process ends.

    Args:
        path: The lock's file; its folder is created with it.
        what: What is locked, as the user knows it.

    Raises:
        BadInput: If another process has it.
    """

    def __init__(self, path: Path, what: object) -> None:
        self.path = path.resolve()
        with _guard:
            if self.path not in _held or not self.is_ours():
                _take(self.path, what)
                _held.setdefault(self.path, 0)
            _held[self.path] += 1
        self.release = weakref.finalize(self, _release, self.path, os.getpid())
        _start_beating(os.getpid())

    def is_ours(self) -> bool:
        """Return whether the file is still there and names this process."""
        return _owner(self.path) == this_process()


def put(path: Path) -> None:
    """Write a lock of this process into a folder that has yet to appear; `Lock` then takes it there."""
    write_text(path, json.dumps(_Record(*this_process(), platform.node())._asdict()) + "\n")


def beside(path: Path) -> Path:
    """Return the lock's file for a file: next to it, hidden."""
    return path.with_name(f".{path.name}.lock")


def release_all() -> None:
    """Release every lock of this process, before it ends without Python's own cleaning up."""
    for path in list(_held):
        _held[path] = 1
        _release(path, os.getpid())


def _take(path: Path, what: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with _one_at_a_time(path.parent):
        owner = _owner(path)
        gone = True if owner is None else is_gone(owner)
        if gone is None:  # on another machine
            gone = _age(path) > ABANDONED_SECONDS
        if not gone and owner != this_process():
            record = _read(path)
            assert record is not None
            raise BadInput(
                f"{what} is in use by another byov (process {record.pid} on {record.host}): wait for it, or stop it "
                f"first; if it has been killed on another machine, try again in {ABANDONED_SECONDS:.0f} seconds."
            )
        put(path)


def _release(path: Path, pid: int) -> None:
    if pid != os.getpid():  # a fork of the owner
        return
    with _guard:
        if _held.get(path, 0) > 1:
            _held[path] -= 1
            return
        _held.pop(path, None)
        with contextlib.suppress(OSError):  # the folder may be gone
            if _owner(path) == this_process():
                path.unlink()


def _read(path: Path) -> _Record | None:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        return _Record(str(found["machine"]), int(found["pid"]), int(found["started"]), str(found["host"]))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError):  # damaged: its age decides
        return _Record("", 0, 0, "an unknown machine")


def _owner(path: Path) -> Owner | None:
    record = _read(path)
    return None if record is None else Owner(*record[:3])


def _age(path: Path) -> float:
    """Return the seconds since the last touch, by the clock of the disk."""
    probe = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        probe.touch()
        return probe.stat().st_mtime - path.stat().st_mtime
    finally:
        probe.unlink(missing_ok=True)


@contextlib.contextmanager
def _one_at_a_time(folder: Path) -> Iterator[None]:
    """Keep other processes out while a lock is read and written, where the system can."""
    opened = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # some network disks cannot
            fcntl.flock(opened, fcntl.LOCK_EX)
        yield
    finally:
        os.close(opened)


_beating: set[int] = set()  # the process with a thread that beats; a fork has none


def _start_beating(pid: int) -> None:
    with _guard:
        if pid not in _beating:
            _beating.clear()
            _beating.add(pid)
            threading.Thread(target=_beat, name="byov-locks", daemon=True).start()


def _beat() -> None:
    while True:
        time.sleep(BEAT_SECONDS)
        for path in list(_held):
            with contextlib.suppress(OSError):
                if _owner(path) == this_process():
                    os.utime(path)
