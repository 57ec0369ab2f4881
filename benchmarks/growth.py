"""How a BYOV step grows with one thing at a time: images stored, batch, parameters, tokens. Lines are fitted."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from byov.backbones.vit import Size
from conductor import Variant, interleave, summary
from models import BATCH, STUDENT


class Sweep(NamedTuple):
    unit: str
    points: dict[float, dict[str, Any]]
    """x -> arguments of byol_step.ours"""


# Sizes from 0.2M to 21M parameters, heads aside; a small batch keeps the largest below some seconds.
SIZES = (Size(128, 1, 4), Size(192, 3, 3), Size(256, 6, 4), Size(384, 6, 6), Size(384, 12, 6))


def sweeps() -> dict[str, Sweep]:
    models = [replace(STUDENT, width=s.width, depth=s.depth, heads=s.heads) for s in SIZES]
    return {
        "images stored": Sweep("10,000 images", {n / 10_000: {"count": n} for n in (1_000, 10_000, 40_000, 100_000)}),
        "batch": Sweep("image", {b: {"batch": b} for b in (32, 64, 128, 256)}),
        "parameters": Sweep("million parameters", {_millions(m): {"model": m, "batch": 32} for m in models}),
        "tokens": Sweep("token", {(s // 8) ** 2: {"side": s, "batch": 32} for s in (16, 24, 32, 48, 64)}),
    }


def _millions(model: Any) -> float:
    from byov.training.learners import build_learner
    from models import config

    settings = config("byov", 4 * BATCH, model)
    return build_learner(settings, (3, 32, 32), None).posterior.means.numel() / 1e6


def measure(quick: bool) -> dict[str, Any]:
    return {name: _measure(sweep, 2 if quick else 6) for name, sweep in sweeps().items()}


def _measure(sweep: Sweep, rounds: int) -> dict[str, Any]:
    variants = [
        Variant(str(x), "byol_step", "ours", {"method": "byov"} | arguments) for x, arguments in sweep.points.items()
    ]
    times = interleave(variants, rounds, warmup=2)
    x = np.array(list(sweep.points))
    y = np.array([1e3 * summary(times[variant.name]).median for variant in variants])
    return {"unit": sweep.unit, "x": x.tolist(), "milliseconds": y.tolist()} | line(x, y)


def line(x: np.ndarray, y: np.ndarray) -> dict[str, float]:
    """Least squares: y = intercept + slope * x, and how much of y's variance it explains."""
    slope, intercept = np.polyfit(x, y, 1)
    left = ((y - intercept - slope * x) ** 2).sum()
    return {"slope": float(slope), "intercept": float(intercept), "r2": float(1 - left / ((y - y.mean()) ** 2).sum())}
