"""torch.compile, which needs a C++ compiler, compared with eager torch: is it worth offering?"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from conductor import Turn, Variant, interleave, ratios, steps_of, summary
from models import classifier, labelled_batch

TASKS = ("2.7M", "0.8M")


def measure(quick: bool) -> dict[str, Any]:
    """Nothing in a quick run: compiling alone takes a minute."""
    return {} if quick else {task: _measured(task) for task in TASKS}


def _measured(task: str) -> dict[str, Any]:
    arguments = {"eager": False, "compiled": True}
    variants = [Variant(name, "compiled", "step", {"task": task, "compile": on}) for name, on in arguments.items()]
    times = interleave(variants, rounds=8, steps=4)
    return {
        "milliseconds": {name: 1e3 * summary(t).median for name, t in times.items()},
        "gain": ratios(times, "eager", "compiled"),
    }


def step(task: str, compile: bool) -> Turn:
    """The deterministic step of `bayesian_step`."""
    network = classifier(task)
    inputs, labels = labelled_batch(task)
    forward = torch.compile(network) if compile else network

    def once(_: int) -> None:
        network.zero_grad()
        F.cross_entropy(forward(inputs), labels).backward()

    once(0)  # compiles
    return steps_of(once)
