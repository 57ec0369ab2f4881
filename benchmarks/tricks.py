"""Measure what each trick gains by switching it off, one at a time. A trick that gains nothing is removed.

A trick is switched off by replacing one name of a module with the plain way, before the variant is built. A name that
no longer exists fails: then its line here is to be removed too.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from conductor import Turn, Variant, interleave, ratios


class Trick(NamedTuple):
    module: str
    name: str
    plain: Any
    on: tuple[str, str, dict[str, Any]]
    """Module, factory and arguments of what it is measured on."""


def one_by_one(work: Callable[[Any], object], items: Iterable[Any], threads: int | None = None) -> None:
    """Instead of threads of our own: torch's, inside each operation."""
    import torch

    with torch.no_grad():
        for item in items:
            work(item)


def by_tensors(out: Any, images: Any, parameters: Any) -> None:
    """Instead of compiled loops over pixels: what GPUs run. (On a CPU, `interpolate` for each image would take half the
    time of that at 224 px: there the loops gain less against what one would write.)"""
    from byov.data.views import fill_by_tensors

    fill_by_tensors(out, images, parameters)


STEP = ("peers", "byov_add_kl", {"task": "2.7M"})
LARGE = ("peers", "byov_add_kl", {"task": "21M"})
VIEWS = ("views", "byov", {"side": 32})
LARGE_VIEWS = ("views", "byov", {"side": 224})
FORWARD = ("predictive", "forward", {"task": "0.8M", "count": 1024})
TRICKS = {
    "compiled loops, Bayesian step 2.7M": Trick("byov._compiled.fused", "fits", lambda *tensors: False, STEP),
    "compiled loops, Bayesian step 21M": Trick("byov._compiled.fused", "fits", lambda *tensors: False, LARGE),
    "compiled loops, views at 32 px": Trick("byov.data.views", "fill_by_loops", by_tensors, VIEWS),
    "compiled loops, views at 224 px": Trick("byov.data.views", "fill_by_loops", by_tensors, LARGE_VIEWS),
    "own threads, Bayesian step 21M": Trick("byov._compiled.fused", "for_each", one_by_one, LARGE),
    "one thread alone, views at 32 px": Trick("byov.data.views", "ALONE", 0, VIEWS),
    "own threads, views at 224 px": Trick("byov.data.views", "for_each", one_by_one, LARGE_VIEWS),
    "own threads, forward of 1,024 images": Trick("byov.inference.run", "FEW", 0, FORWARD),
    "keeping freed memory, Bayesian step 2.7M": Trick(
        "byov.posterior.posterior", "keep_freed_memory", lambda: None, STEP
    ),
}


def measure(quick: bool) -> dict[str, Any]:
    tricks = list(TRICKS)[:: 2 if quick else 1]
    return {name: {"gain": _gain(name, quick)} for name in tricks}


def _gain(name: str, quick: bool) -> Any:
    variants = [Variant(str(on), "tricks", "variant", {"trick": name, "on": on}) for on in (True, False)]
    if TRICKS[name].on == LARGE_VIEWS:  # a step of it is long
        rounds, steps = (2, 1) if quick else (6, 1)
    else:
        rounds, steps = (3, 4) if quick else (8, 4)
    return ratios(interleave(variants, rounds, steps), "False", "True")


def variant(trick: str, on: bool) -> Turn:
    it = TRICKS[trick]
    if not on:
        module = importlib.import_module(it.module)
        getattr(module, it.name)  # it must be there
        setattr(module, it.name, it.plain)
    module, factory, arguments = it.on
    turn: Turn = getattr(importlib.import_module(module), factory)(**arguments)
    return turn
