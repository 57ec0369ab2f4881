"""Time variants of the same work: each in a separate process, in turns, one at a time.

Allocators, thread pools and imported libraries of one variant cannot disturb another. In every round each variant has
one turn of a few steps, in an order that rotates; a ratio is taken within a round, in which both saw the same machine.
Between turns a worker waits on its pipe and uses no CPU (torch's OpenMP threads stop spinning after some milliseconds).
"""

from __future__ import annotations

import gc
import importlib
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

THREADS = int(os.environ.get("BENCH_THREADS") or len(os.sched_getaffinity(0)))  # `run.py --threads` sets it

Turn = Callable[[int], object]


class Variant(NamedTuple):
    """`module.factory(**arguments)`, called in the worker, returns turn(n): do n steps."""

    name: str
    module: str
    factory: str
    arguments: dict[str, Any] = {}  # noqa: RUF012 (never changed)
    threads: int = THREADS


class Summary(NamedTuple):
    """Median and quartiles."""

    median: float
    low: float
    high: float


class Player:
    """A variant in its worker process."""

    def __init__(self, variant: Variant) -> None:
        self.name = variant.name
        context = multiprocessing.get_context("spawn")
        self.pipe, end = context.Pipe()
        self.process = context.Process(target=_serve, args=(end, variant))
        self.process.start()
        end.close()

    def answer(self) -> Any:
        try:
            answer = self.pipe.recv()
        except EOFError:
            raise RuntimeError(f"the worker of {self.name!r} has ended; its error stands above.") from None
        return answer

    def turn(self, steps: int) -> float:
        """Seconds of one step, over a turn of `steps`."""
        self.pipe.send(steps)
        seconds: float = self.answer()
        return seconds / steps

    def leave(self) -> None:
        self.pipe.close()
        self.process.join(timeout=20)
        if self.process.is_alive():
            self.process.terminate()


def steps_of(step: Callable[[int], object]) -> Turn:
    """A turn made of single steps; k is the number of steps before."""
    done = 0

    def turn(count: int) -> None:
        nonlocal done
        for _ in range(count):
            step(done)
            done += 1

    return turn


def _serve(pipe: Connection, variant: Variant) -> None:
    """The worker: builds the variant, then does turns until the pipe closes."""
    import torch

    torch.set_num_threads(variant.threads)
    torch.manual_seed(0)
    turn: Turn = getattr(importlib.import_module(variant.module), variant.factory)(**variant.arguments)
    pipe.send("ready")
    while True:
        try:
            steps = pipe.recv()
        except (EOFError, ConnectionError):
            return
        gc.collect()  # what an earlier turn left over is not paid for in this one
        begun = time.perf_counter()
        turn(steps)
        pipe.send(time.perf_counter() - begun)


def interleave(variants: Sequence[Variant], rounds: int, steps: int = 1, warmup: int = 1) -> dict[str, list[float]]:
    """Seconds per step of each variant, one number per round; the first `warmup` rounds are dropped."""
    players: list[Player] = []
    try:
        for variant in variants:  # all start at once: imports are the slow part
            players.append(Player(variant))
        for player in players:
            player.answer()
        times: dict[str, list[float]] = {player.name: [] for player in players}
        for k in range(warmup + rounds):
            first = k % len(players)
            for player in players[first:] + players[:first]:
                seconds = player.turn(steps)
                if k >= warmup:
                    times[player.name].append(seconds)
        return times
    finally:
        for player in players:
            player.leave()


def fastest(candidates: Sequence[Variant], rounds: int = 2, steps: int = 1) -> Variant:
    """The candidate with the least time in a short run: byov and its peers use their best settings."""
    if len(candidates) == 1:
        return candidates[0]
    times = interleave(candidates, rounds, steps)
    return min(candidates, key=lambda variant: min(times[variant.name]))


def summary(values: Sequence[float]) -> Summary:
    if len(values) < 2:
        return Summary(values[0], values[0], values[0])
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return Summary(middle, low, high)


def ratios(times: dict[str, list[float]], name: str, baseline: str) -> Summary:
    """Of the times of `name` to those of `baseline`, round by round."""
    return summary([own / other for own, other in zip(times[name], times[baseline], strict=True)])
