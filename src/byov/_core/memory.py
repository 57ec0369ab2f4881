"""How much memory is free, and a budget that all threads of a process share."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Condition

from byov._core.errors import BadInput

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]

GIB = 2**30
_CGROUPS = (  # folder, limit and use, in versions 2 and 1
    (Path("/sys/fs/cgroup"), "memory.max", "memory.current"),
    (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes", "memory.usage_in_bytes"),
)


def available() -> int | None:
    """Return the bytes that this process may still take: of the machine, its container and `ulimit -v`; None: unknown.

    What the page cache holds counts as free.
    """
    found = []
    with suppress(OSError, ValueError, IndexError):
        lines = Path("/proc/meminfo").read_text().splitlines()
        found += [1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")]
    for folder, limit, used in _CGROUPS:
        with suppress(OSError, ValueError):  # "max" is no number: no limit
            most, now = int((folder / limit).read_text()), int((folder / used).read_text())
            stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            found.append(most - now + sum(int(stat.get(name, 0)) for name in ("inactive_file", "active_file")))
    with suppress(OSError, ValueError, AttributeError):
        limited = resource.getrlimit(resource.RLIMIT_AS)[0]
        if limited != resource.RLIM_INFINITY:
            pages = int(Path("/proc/self/statm").read_text().split()[0])
            found.append(limited - pages * os.sysconf("SC_PAGE_SIZE"))
    return max(0, min(found)) if found else None


def resident() -> int:
    """Return the bytes that this process has in memory now; 0 if unknown."""
    with suppress(OSError, ValueError):
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0


def in_gib(count: float) -> str:
    """Write a number of bytes in GiB, or in MiB below one."""
    return f"{count / GIB:,.1f} GiB" if count >= GIB else f"{count / 2**20:,.0f} MiB"


def require(count: float, what: str, advice: str) -> None:
    """Raise BadInput if `what` takes more memory than is free."""
    free = available()
    if free is not None and count > free:
        raise BadInput(f"{what} takes {in_gib(count)} of memory, of which {in_gib(free)} are free: {advice}.")


class Budget:
    """Bytes that threads may use at the same time; a thread that asks for more than are left waits for the others."""

    def __init__(self, total: int) -> None:
        self.total = total
        self._used = 0
        self._changed = Condition()

    @contextmanager
    def taken(self, count: int) -> Iterator[None]:
        """Take `count` bytes for a block; MemoryError if they exceed the whole budget."""
        if count > self.total:
            raise MemoryError(f"{in_gib(count)} are more than the budget of {in_gib(self.total)}")
        with self._changed:
            self._changed.wait_for(lambda: self._used + count <= self.total)
            self._used += count
        try:
            yield
        finally:
            with self._changed:
                self._used -= count
                self._changed.notify_all()
