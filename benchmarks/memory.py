"""Peak resident memory of some training steps, each variant in a fresh process; the same steps as `byol_step`."""

from __future__ import annotations

import multiprocessing
from multiprocessing.connection import Connection
from typing import Any

from byol_step import BYOL, BYOV, PLAIN
from conductor import THREADS

STEPS = 12
VARIANTS: dict[str, tuple[str, dict[str, str]]] = {
    PLAIN: ("plain", {}),
    BYOL: ("ours", {"method": "byol"}),
    BYOV: ("ours", {"method": "byov"}),
}


def measure(quick: bool) -> dict[str, Any]:
    repeats = 1 if quick else 3
    peaks = {name: [_fresh(*variant) for _ in range(repeats)] for name, variant in VARIANTS.items()}
    least = {name: min(pairs, key=lambda pair: pair[1]) for name, pairs in peaks.items()}  # noise only ever adds
    return {
        "steps": STEPS,
        "peak_mib": {name: peak for name, (_, peak) in least.items()},
        "ratio": {name: peak / least[PLAIN][1] for name, (_, peak) in least.items()},
        "ratio_above_imports": {
            name: (peak - imports) / (least[PLAIN][1] - least[PLAIN][0]) for name, (imports, peak) in least.items()
        },
    }


def _fresh(factory: str, arguments: dict[str, str]) -> tuple[float, float]:
    """MiB after the imports, and at the peak."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_train, args=(there, factory, arguments))
    process.start()
    there.close()
    imports, peak = here.recv()
    process.join()
    return imports, peak


def _train(pipe: Connection, factory: str, arguments: dict[str, str]) -> None:
    import torch

    import byol_step
    from byov.training.monitors import peak_memory_mib

    torch.set_num_threads(THREADS)
    imports = peak_memory_mib(torch.device("cpu"))
    getattr(byol_step, factory)(**arguments)(STEPS)
    pipe.send((imports, peak_memory_mib(torch.device("cpu"))))
