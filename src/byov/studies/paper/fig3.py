"""Figure 3: sigma and SNR of every layer over training, by prior.

Which sigma a layer ends with depends much on the prior, says the paper; its SNR does not. Profiles of layers at the end
are compared by the mean over layers of |ln ratio| (`measurements.layer_profiles`), between priors with the same seed.
Such a distance is never negative: what another seed does, with one and the same prior, is its floor.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import combinations
from statistics import mean
from typing import Any

from matplotlib.figure import Figure

from byov.config import Config
from byov.report.plots.seed_plots import layer_figure
from byov.studies.framework.claims import Claim, Effect
from byov.studies.framework.lab import Lab
from byov.studies.measurements.layer_profiles import log_distance
from byov.studies.measurements.training_history import layer_history
from byov.studies.paper import fig2
from byov.studies.paper.fig2 import PRIORS

TITLE = "Figure 3: sigma and SNR of every layer over training, by prior"
Pair = tuple[Any, Any]
Rows = list[dict[str, Any]]


def runs(lab: Lab) -> list[Config]:
    arms = fig2.arms(lab)
    return [arms[fig2.name(prior, 1.0)](seed) for seed in range(lab.seeds) for prior in PRIORS]


def results(lab: Lab) -> Rows:
    """A row for each prior, seed, layer and epoch, from what the run wrote while it trained."""
    return [
        {"prior": config.posterior.prior, "seed": config.seed, **row}
        for config in runs(lab)
        for row in layer_history(lab.path(config))
    ]


def draw(rows: Rows, scale: str) -> Figure:
    """As the paper: sigma left, SNR right; the layers' means above, their maxima below; a column a prior."""
    return layer_figure(rows, "prior", PRIORS, ("sigma", "snr"))


# ----------------------------------------------------------------------------------------------------------- the claims


def profiles(rows: Rows, by: str, measure: str) -> dict[Pair, dict[str, float]]:
    """By (value of the column `by`, seed): the layers' values at the end of training."""
    last: dict[Pair, float] = {}
    for row in rows:
        last[row[by], row["seed"]] = max(row["epoch"], last.get((row[by], row["seed"]), 0))
    found: dict[Pair, dict[str, float]] = {}
    for row in rows:
        at = row[by], row["seed"]
        if row["epoch"] == last[at]:
            found.setdefault(at, {})[row["layer"]] = row[measure]
    return found


def distances(rows: Rows, by: str, pairs: Sequence[Pair], measure: str) -> dict[int, float]:
    """By seed: how far the profiles of layers lie apart, on average over the pairs of values of the column `by`."""
    ends = profiles(rows, by, measure)
    seeds = sorted(
        seed for seed in {row["seed"] for row in rows} if all((v, seed) in ends for pair in pairs for v in pair)
    )
    return {seed: mean(log_distance(ends[a, seed], ends[b, seed]) for a, b in pairs) for seed in seeds}


def less(a: dict[int, float], b: dict[int, float]) -> list[Effect]:
    """How much nearer b is than a, for each seed."""
    return [Effect(seed, value - b[seed]) for seed, value in a.items()]


def floor(rows: Rows, by: str, value: str, measure: str) -> dict[int, float]:
    """By seed: how far its profile lies from the next seed's (the last one's from the first), at one value of `by`.

    What chance alone does. Of one seed it is not known: empty.
    """
    ends = {seed: profile for (here, seed), profile in profiles(rows, by, measure).items() if here == value}
    seeds = sorted(ends)
    after = seeds[1:] + seeds[:1]
    return {s: log_distance(ends[s], ends[t]) for s, t in zip(seeds, after, strict=True)} if len(seeds) > 1 else {}


def beyond_seeds(rows: Rows, by: str, pairs: Sequence[Pair], value: str, measure: str) -> dict[int, float]:
    """By seed: the distance between the pairs beyond that between seeds, the floor at one value of `by`."""
    chance = floor(rows, by, value, measure)
    return {seed: d - chance[seed] for seed, d in distances(rows, by, pairs, measure).items() if seed in chance}


def _large(rows: Rows) -> list[Effect]:
    found = beyond_seeds(rows, "prior", PAIRS, "standard", "sigma_mean")
    return [Effect(seed, beyond) for seed, beyond in found.items()]


def _more_similar(rows: Rows, pairs: Sequence[Pair], statistic: str = "mean") -> list[Effect]:
    sigma, snr = (distances(rows, "prior", pairs, f"{measure}_{statistic}") for measure in ("sigma", "snr"))
    return less(sigma, snr)


def _most_similar(rows: Rows) -> list[Effect]:
    """SNR: how much farther teacher_moments is from the other two than these are from each other."""
    others = [pair for pair in PAIRS if pair != CLOSE]
    return less(distances(rows, "prior", others, "snr_mean"), distances(rows, "prior", [CLOSE], "snr_mean"))


PAIRS = list(combinations(PRIORS, 2))
CLOSE = ("standard", "teacher_mean")
# A factor of 1.5 a layer: on the figure's axes of several decades less would not be seen. It is the size alone: what
# must be surpassed is the distance between two seeds.
LARGE = math.log(1.5)
NOTICED = math.log(1.1)  # one distance beyond another: a tenth, the least that is worth a word
LN = "mean |ln ratio| of a layer"
CLAIMS = [
    Claim(
        "4.2, Figure 3",
        "The prior makes a large difference to the layers' sigma (at the end, beyond that between seeds of N(0, I))",
        "no number",
        LN,
        LARGE,
        _large,
    ),
    Claim(
        "4.2, Figure 3",
        "Between priors the layers' SNR is more similar than their sigma",
        "no number",
        LN,
        NOTICED,
        lambda rows: _more_similar(rows, PAIRS),
    ),
    Claim(
        "4.2, Figure 3",
        "So are the maxima over a layer's weights",
        "no number",
        LN,
        NOTICED,
        lambda rows: _more_similar(rows, PAIRS, "max"),
    ),
    Claim(
        "4.2, Figure 3",
        "Between N(0, I) and N(μ_T, I) the layers' SNR is more similar than their sigma",
        "no number",
        LN,
        NOTICED,
        lambda rows: _more_similar(rows, [CLOSE]),
    ),
    Claim(
        "4.2, Figure 3",
        "The layers' SNR is particularly similar between N(0, I) and N(μ_T, I)",
        "no number",
        LN,
        NOTICED,
        _most_similar,
    ),
]
