"""Sigma and SNR of every layer over training, as a run logged them, and how far two such profiles differ.

Profiles of layers are compared at the end of training by the mean over layers of |ln ratio|, which is free of scale.
Such a distance is never negative: the distance between two seeds of one setting is its floor.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from byov.runs.folder import RunFolder, read_log
from byov.studies.framework.claims import Effect, Rows

LAYER_MEASURES = ("sigma_mean", "sigma_max", "snr_mean", "snr_max")
LN = "mean |ln ratio| of a layer"
# A factor of 1.5 per layer: less would not be visible on the figures' axes, which span several decades. This is only
# the size; the distance must exceed that between two seeds.
LARGE = math.log(1.5)
NOTICED = math.log(1.1)  # one distance beyond another: a tenth, the smallest difference worth mentioning

Pair = tuple[Any, Any]
Profile = Mapping[str, float]
"""A positive value for each layer."""


def layer_history(folder: Path, epochs: int = 24) -> Rows:
    """Read sigma and SNR of every layer's weights at about that many evenly spaced epochs, with the first and last.

    Biases are left out: those before a normalisation and those of attention keys do not change the function. They stay
    at the prior, and would only show which prior it is.
    """
    rows = [row for row in read_log(RunFolder(folder).posterior).rows if not row["layer"].endswith("bias")]
    seen = sorted({row["epoch"] for row in rows})
    every = max(1, round((len(seen) - 1) / epochs))
    shown = {*seen[::every], *seen[-1:]}
    return [
        {"layer": row["layer"], "epoch": row["epoch"], **{key: row[key] for key in LAYER_MEASURES}}
        for row in rows
        if row["epoch"] in shown
    ]


def profiles(rows: Rows, by: str, measure: str) -> dict[Pair, dict[str, float]]:
    """Return the layers' values at the end of training, by (value of the column `by`, seed)."""
    last: dict[Pair, float] = {}
    for row in rows:
        last[row[by], row["seed"]] = max(row["epoch"], last.get((row[by], row["seed"]), 0))
    found: dict[Pair, dict[str, float]] = {}
    for row in rows:
        at = row[by], row["seed"]
        if row["epoch"] == last[at]:
            found.setdefault(at, {})[row["layer"]] = row[measure]
    return found


def log_ratios(a: Profile, b: Profile) -> dict[str, float]:
    """Return ln(a / b) of each layer that both have."""
    both = [layer for layer in a if layer in b]
    if not both:
        raise ValueError("the two profiles have no layer in common.")
    if not all(a[layer] > 0 and b[layer] > 0 for layer in both):
        raise ValueError("a profile must be positive: its ratios are compared.")
    return {layer: math.log(a[layer] / b[layer]) for layer in both}


def log_distance(a: Profile, b: Profile) -> float:
    """Average |ln(a / b)| over the layers: ln 2 where each layer differs by a factor of two, up or down."""
    return mean(abs(ratio) for ratio in log_ratios(a, b).values())


def distances(rows: Rows, by: str, pairs: Sequence[Pair], measure: str) -> dict[int, float]:
    """Return by seed the distance of the layers' profiles, averaged over the pairs of values of the column `by`."""
    ends = profiles(rows, by, measure)
    seeds = sorted(
        seed for seed in {row["seed"] for row in rows} if all((v, seed) in ends for pair in pairs for v in pair)
    )
    return {seed: mean(log_distance(ends[a, seed], ends[b, seed]) for a, b in pairs) for seed in seeds}


def seed_distances(rows: Rows, by: str, value: str, measure: str) -> dict[int, float]:
    """Return by seed the distance to the next seed (the last one's to the first), at one value of `by`.

    This is what chance alone does. It is not known from one seed: empty.
    """
    ends = {seed: profile for (here, seed), profile in profiles(rows, by, measure).items() if here == value}
    seeds = sorted(ends)
    after = seeds[1:] + seeds[:1]
    return {s: log_distance(ends[s], ends[t]) for s, t in zip(seeds, after, strict=True)} if len(seeds) > 1 else {}


def beyond_seeds(rows: Rows, by: str, pairs: Sequence[Pair], value: str, measure: str) -> dict[int, float]:
    """Return by seed how far the distance of the pairs exceeds that between seeds at one value of `by`."""
    chance = seed_distances(rows, by, value, measure)
    return {seed: d - chance[seed] for seed, d in distances(rows, by, pairs, measure).items() if seed in chance}


def reductions(a: dict[int, float], b: dict[int, float]) -> list[Effect]:
    """Return for each seed how much smaller b is than a."""
    return [Effect(seed, value - b[seed]) for seed, value in a.items()]
