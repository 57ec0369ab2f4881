"""Peak resident memory of some training steps, each variant in a fresh process; the same steps as `byol_step`.

At 1M weights most of the peak is activations and libraries, so that a posterior hardly shows. At 21M it does: there
BYOV is compared with our own BYOL, with a small and a large batch.
"""

from __future__ import annotations

import multiprocessing
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

from byol_step import BYOL, BYOV, PLAIN
from conductor import THREADS
from models import STUDENT

LARGE = replace(STUDENT, width=384, depth=12, heads=6)  # 21M weights
BATCHES = (16, 128)  # of the large one
STEPS, LARGE_STEPS = 12, 2  # from the second step on all of the state is there

Variants = dict[str, tuple[str, dict[str, Any]]]
VARIANTS: Variants = {
    PLAIN: ("plain", {}),
    BYOL: ("ours", {"method": "byol"}),
    BYOV: ("ours", {"method": "byov"}),
}


def measure(quick: bool) -> dict[str, Any]:
    small = _compared(VARIANTS, PLAIN, STEPS, 1 if quick else 3)
    batches = BATCHES[:1] if quick else BATCHES
    return small | {"large": {str(batch): _large(batch, 1 if quick else 2) for batch in batches}}


def _large(batch: int, repeats: int) -> dict[str, Any]:
    size = {"model": LARGE, "batch": batch}
    variants = {name: (VARIANTS[name][0], VARIANTS[name][1] | size) for name in (BYOL, BYOV)}
    return _compared(variants, BYOL, LARGE_STEPS, repeats)


def _compared(variants: Variants, baseline: str, steps: int, repeats: int) -> dict[str, Any]:
    runs = {name: [_fresh(*variant, steps) for _ in range(repeats)] for name, variant in variants.items()}
    return {"steps": steps, "runs": repeats} | compare(runs, baseline)


def compare(runs: dict[str, list[tuple[float, float]]], baseline: str) -> dict[str, Any]:
    """The ratios of the lowest peaks, with the lowest and highest of all runs; MiB after imports and at the peak."""
    least = {name: min(pairs, key=lambda pair: pair[1]) for name, pairs in runs.items()}  # noise only ever adds
    most = {name: max(peak for _, peak in pairs) for name, pairs in runs.items()}
    imports, peak = least[baseline]
    return {
        "peak_mib": {name: own for name, (_, own) in least.items()},
        "ratio": {name: own / peak for name, (_, own) in least.items()},
        "spread": {name: (own / most[baseline], most[name] / peak) for name, (_, own) in least.items()},
        "ratio_above_imports": {name: (own - before) / (peak - imports) for name, (before, own) in least.items()},
    }


def _fresh(factory: str, arguments: dict[str, Any], steps: int) -> tuple[float, float]:
    """MiB after the imports, and at the peak."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_train, args=(there, factory, arguments, steps))
    process.start()
    there.close()
    imports, peak = here.recv()
    process.join()
    return imports, peak


def _train(pipe: Connection, factory: str, arguments: dict[str, Any], steps: int) -> None:
    import torch

    import byol_step
    from byov.training.monitors import peak_memory_mib

    torch.set_num_threads(THREADS)
    imports = peak_memory_mib(torch.device("cpu"))
    getattr(byol_step, factory)(**arguments)(steps)
    pipe.send((imports, peak_memory_mib(torch.device("cpu"))))
