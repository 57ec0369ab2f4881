"""Where the time of a BYOV step goes, by torch's profiler; and its floor, the time of its matrix products alone.

    make profile                   (or: profiled.py [--steps 12] [--threads N])

The step of `byol_step`: a student of 1.08M weights, batch 128. Not a part of `make bench`: it has no
peers. The profiler slows a step down, so it gives the shares only; the milliseconds are those of steps without it. The
floor is what would be left if all but the network's matrix products were free: those of one step, called again with the
same tensors. (Not `profile.py`: a script's folder comes first for imports, and torch imports Python's own `profile`.)
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils._python_dispatch import TorchDispatchMode

import byov.posterior.posterior
import byov.training.step
from byol_step import STORED, trainer_of
from byov.training import learners
from byov.training.loop import Trainer
from conductor import THREADS
from models import BATCH, SIDE, STUDENT

STEP, WARMUP = "a step", 4
GEMM, ATTENTION, ELEMENTWISE = "GEMM", "attention", "elementwise, norms, copies"
VIEWS, OPTIMIZER, DRAW, OTHER = "views", "optimizer, clipping, teacher", "draw and KL", "other (Python, autograd)"
SHARES = (GEMM, ATTENTION, ELEMENTWISE, VIEWS, OPTIMIZER, DRAW, OTHER)
PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "convolution", "mkldnn_convolution", "convolution_backward")


def phases(trainer: Trainer) -> dict[str, list[tuple[Any, str]]]:
    """Functions whose whole time belongs to one share, whatever they call: some wait there for their threads."""
    step, learner = byov.training.step, trainer.learner
    return {
        VIEWS: [(trainer, "batches"), (learners, "two_views")],
        OPTIMIZER: [
            (learner.posterior, "reuse_gradients"),
            (step, "clip_gradients"),
            (trainer.optimizer, "step"),
            (step, "decay_means"),
            (learner.teacher, "update"),
        ],
        DRAW: [
            (byov.posterior.posterior, "draw_"),
            (learner.posterior.segments, "gather"),
            (byov.posterior.posterior, "_to_log_variances"),
            (step, "add_kl"),
        ],
    }


@contextmanager
def labelled(trainer: Trainer) -> Iterator[None]:
    """The phases are named in what the profiler sees."""
    with ExitStack() as stack:
        for label, functions in phases(trainer).items():
            for owner, name in functions:
                stack.enter_context(patch.object(owner, name, record_function(label)(getattr(owner, name))))
        yield


def step_of(trainer: Trainer) -> Callable[[int], object]:
    def step(k: int) -> object:
        batches = trainer.batches(k)
        return byov.training.step.training_step(
            trainer.learner, trainer.optimizer, batches, trainer.config, k, trainer.total
        )

    return step


def shares(trainer: Trainer, steps: int) -> dict[str, float]:
    """Shares of the time of some steps, all in the main thread."""
    with labelled(trainer), profile(activities=[ProfilerActivity.CPU]) as profiler:
        step = step_of(trainer)
        for k in range(steps):
            with record_function(STEP):
                step(k)
    events = profiler.events()
    main = next(event.thread for event in events if event.name == STEP)
    return shares_of(event for event in events if event.thread == main)


def shares_of(events: Iterable[Any]) -> dict[str, float]:
    """Add the time of every event, without that of the events within it."""
    times: Counter[str] = Counter()
    for event in events:
        names = list(_names(event))
        if STEP in names:
            times[share_of(names)] += event.self_cpu_time_total
    return {share: times[share] / times.total() for share in SHARES}


def _names(event: Any) -> Iterator[str]:
    """Its name, and those of all its callers."""
    while event is not None:
        yield event.name
        event = event.cpu_parent


def share_of(names: list[str]) -> str:
    """The phase it is in; or else its kind, where what a product or attention calls belongs to these."""
    kinds = [_kind(name) for name in names]
    phase = [name for name in names if name in (VIEWS, OPTIMIZER, DRAW)]
    return [*phase, *(kind for kind in kinds if kind in (GEMM, ATTENTION)), kinds[0]][0]


def _kind(name: str) -> str:
    operation = name.removeprefix("aten::")
    if operation == name:
        return OTHER
    if operation in PRODUCTS:
        return GEMM
    return ATTENTION if "attention" in operation else ELEMENTWISE


class Products(TorchDispatchMode):
    """Record every matrix product that is called within it, to call it again."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ in PRODUCTS:
            self.calls.append((func, args, kwargs or {}))
        return func(*args, **(kwargs or {}))


def products_of(trainer: Trainer) -> Callable[[int], object]:
    """The network's matrix products of one step."""
    products, two_views = Products(), learners.two_views

    def views_not_counted(*args: Any) -> Any:
        pair = two_views(*args)
        products.calls.clear()
        return pair

    with patch.object(learners, "two_views", views_not_counted), products:
        step_of(trainer)(0)

    @torch.no_grad()
    def again(_: int) -> None:
        for function, args, kwargs in products.calls:
            function(*args, **kwargs)

    return again


def median_ms(step: Callable[[int], object], steps: int) -> float:
    times = []
    for k in range(WARMUP + steps):
        begun = time.perf_counter()
        step(k)
        times.append(time.perf_counter() - begun)
    return 1e3 * statistics.median(times[WARMUP:])


def render(milliseconds: float, found: dict[str, float], floor: float) -> str:
    lines = ["| of a step | ms | share |", "|---|---|---|"]
    lines += [f"| {name} | {share * milliseconds:.1f} | {share:.1%} |" for name, share in found.items()]
    lines += [
        f"| all | {milliseconds:.1f} | |",
        f"| floor: its GEMMs alone | {floor:.1f} | {floor / milliseconds:.1%} |",
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--threads", type=int, default=THREADS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    trainer = trainer_of("byov", STUDENT, BATCH, SIDE, STORED)
    milliseconds = median_ms(step_of(trainer), options.steps)
    found = shares(trainer, options.steps)
    floor = median_ms(products_of(trainer), options.steps)
    weights = trainer.learner.posterior.means.numel()
    print(f"BYOV, {weights:,} weights, batch {BATCH}, {options.threads} threads, {options.steps} steps\n")
    print(render(milliseconds, found, floor))


if __name__ == "__main__":
    main()
