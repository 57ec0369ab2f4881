"""Threads of our own, for work in chunks: they meet once a chunk, where torch's own threads meet once an operation."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from threading import Barrier
from typing import TypeVar

import torch

T = TypeVar("T")
R = TypeVar("R")

AHEAD = 4  # results a thread that may wait to be taken


def for_each(work: Callable[[T], object], items: Iterable[T]) -> None:
    """Calls work(item) for all items over torch's number of threads, each on one core, without autograd."""

    waiting = iter(items)

    @torch.no_grad()  # torch's gradient mode is a thread's own
    def take_turns(_: int) -> None:
        for item in waiting:  # Python hands each item to one thread: one call a thread, where one an item costs more
            work(item)

    threads = torch.get_num_threads()
    list(map(take_turns, [0]) if threads == 1 else _workers(threads).map(take_turns, range(threads)))


def in_order(work: Callable[[T], R], items: Iterable[T]) -> Iterator[R]:
    """work(item) of all items, in their order, over torch's number of threads; only a few results wait at a time."""
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


@cache
def _workers(count: int) -> ThreadPoolExecutor:
    """Threads in which torch's operations use one core."""
    started = Barrier(count)

    def one_core() -> None:
        torch.get_num_threads()  # first, or torch later sets this thread to the process's number after all
        torch.set_num_threads(1)

    pool = ThreadPoolExecutor(count, "byov", initializer=one_core)
    list(pool.map(lambda _: started.wait(), range(count)))
    torch.set_num_threads(count)  # the workers' calls also changed it here, but this one does not change it there
    return pool


if hasattr(os, "register_at_fork"):  # not on Windows, which has no fork
    os.register_at_fork(after_in_child=_workers.cache_clear)  # threads do not survive one
