"""Our own threads for work that torch does on one core: compiled loops, noise, decoding.

Our threads hold Python's lock between operations, and torch's threads spin for a while after their last operation. So
our own pay off from about 10 ms of work, not below.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import cache
from threading import Barrier
from typing import TypeVar

import torch

T = TypeVar("T")
R = TypeVar("R")

AHEAD = 4  # finished results per thread that may wait


def for_each(work: Callable[[T], object], items: Iterable[T], threads: int | None = None) -> None:
    """Call work(item) for all items over threads (by default torch's number), each on one core, without autograd."""

    waiting, inference = iter(items), torch.is_inference_mode_enabled()

    def take_turns(_: int) -> None:
        # torch's modes are per thread; in this order, since inference_mode(False) enables autograd
        with torch.inference_mode(inference), torch.no_grad():
            for item in waiting:  # Python gives each item to one thread; one call per item would cost more
                work(item)

    threads = threads or torch.get_num_threads()
    list(map(take_turns, [0]) if threads == 1 else _workers(threads).map(take_turns, range(threads)))


def in_order(work: Callable[[T], R], items: Iterable[T]) -> Iterator[R]:
    """Yield work(item) of all items in order, over torch's number of threads; only a few results wait at a time."""
    threads = torch.get_num_threads()
    if threads == 1:
        yield from map(work, items)
        return
    waiting: deque[Future[R]] = deque()
    try:
        for item in items:
            waiting.append(_workers(threads).submit(work, item))
            if len(waiting) == AHEAD * threads:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        for future in waiting:
            future.cancel()
        wait(waiting)  # running work reads what the caller may change next


@cache
def keep_freed_memory() -> None:
    """Make glibc reuse freed temporaries, instead of returning them to the system and faulting them in again.

    Its threshold follows the largest freed block, up to 32 MiB; so free one such block, once per process. This makes a
    training step faster (see `make bench`). It has no effect on other allocators.
    """
    torch.empty(31 << 20, dtype=torch.uint8)


@cache
def _workers(count: int) -> ThreadPoolExecutor:
    """Start threads in which torch's operations use one core."""
    started = Barrier(count)

    def one_core() -> None:
        torch.get_num_threads()  # first, or torch later sets this thread to the process's number
        torch.set_num_threads(1)

    pool = ThreadPoolExecutor(count, "byov", initializer=one_core)
    list(pool.map(lambda _: started.wait(), range(count)))
    torch.set_num_threads(count)  # the workers' calls also changed it here, but this one does not change it there
    return pool


if hasattr(os, "register_at_fork"):  # not on Windows, which has no fork
    os.register_at_fork(after_in_child=_workers.cache_clear)  # threads do not survive one
