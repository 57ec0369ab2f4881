"""The Bayesian supervised step, forward, backward and KL, compared with the deterministic one and other libraries.

byov has two ways to add the KL, bayesian-torch two kinds of layers: a short run before chooses one of each, for every
size. byov's other way is timed too, for information.
"""

from __future__ import annotations

from typing import Any

from conductor import Variant, fastest, interleave, ratios, summary
from models import TASKS, classifier

DETERMINISTIC, KEPT = "deterministic", "deterministic, freed memory kept"
OURS = {"byov, priors.add_kl": "byov_add_kl", "byov, KL in the loss": "byov_kl_in_loss"}  # their factories
PEERS = ("bayesian-torch", "torch-uncertainty", "blitz")
IVON = "IVON, with its update"


def measure(quick: bool) -> dict[str, Any]:
    tasks = list(TASKS)[:1] if quick else list(TASKS)
    return {task: _measure(task, 3 if quick else 8, 1 if quick else 2) for task in tasks}


def _measure(task: str, rounds: int, steps: int) -> dict[str, Any]:
    def variant(name: str, factory: str, **arguments: str) -> Variant:
        return Variant(name, "peers", factory, {"task": task, **arguments})

    kinds = ("Reparameterization", "Flipout")
    best = fastest([variant(kind, "bayesian_torch", kind=kind) for kind in kinds], steps=steps)
    both = [variant(name, factory) for name, factory in OURS.items()]
    ours = fastest(both, steps=steps).name
    variants = [
        variant(DETERMINISTIC, "deterministic"),
        variant(KEPT, "deterministic_kept"),
        *both,
        variant(PEERS[0], "bayesian_torch", kind=best.name),
        variant(PEERS[1], "torch_uncertainty"),
        variant(PEERS[2], "blitz"),
        variant(IVON, "ivon"),
    ]
    times = interleave(variants, rounds, steps)
    return {
        "parameters": sum(p.numel() for p in classifier(task).parameters()),
        "batch": TASKS[task].batch,
        "rounds": rounds,
        "steps_a_turn": steps,
        "bayesian_torch": best.name,
        "ours": ours,
        "ours_chosen_before": True,
        "milliseconds": {name: 1e3 * summary(t).median for name, t in times.items()},
        "ratio": {name: ratios(times, name, DETERMINISTIC) for name in times},
        "to_kept": ratios(times, ours, KEPT),
        "speedup": {name: ratios(times, name, ours) for name in (*PEERS, IVON)},
    }
