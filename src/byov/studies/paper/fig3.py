"""Figure 3: sigma and SNR of every layer over training, by prior.

According to the paper, the sigma that a layer ends with depends strongly on the prior, but its SNR does not. Priors are
compared with the same seed.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

from matplotlib.figure import Figure

from byov.config import Config
from byov.report.plots.seed_plots import layer_figure
from byov.studies.framework.claims import NO_NUMBER, Claim, Effect, Rows
from byov.studies.framework.compare import PRIORS
from byov.studies.framework.lab import Lab
from byov.studies.measurements.layer_history import (
    LARGE,
    LN,
    NOTICED,
    Pair,
    beyond_seeds,
    distances,
    layer_history,
    reductions,
)

TITLE = "Figure 3: sigma and SNR of every layer over training, by prior"


def runs(lab: Lab) -> list[Config]:
    beta = {"posterior.beta_start": 0.0, "posterior.beta_end": 1.0}
    return [
        lab.config("byov", seed, {"posterior.prior": prior, **beta}) for seed in range(lab.seeds) for prior in PRIORS
    ]


def results(lab: Lab) -> Rows:
    """A row for each prior, seed, layer and epoch, from the run's log of its training."""
    return [
        {"prior": config.posterior.prior, "seed": config.seed, **row}
        for config in runs(lab)
        for row in layer_history(lab.path(config))
    ]


def draw(rows: Rows, scale: str) -> Figure:
    """As in the paper: sigma left, SNR right; layer means above, layer maxima below; one column per prior."""
    return layer_figure(rows, "prior", PRIORS, ("sigma", "snr"))


# -------------------------------------------------------------------------------------------------------------- claims


def _large(rows: Rows) -> list[Effect]:
    found = beyond_seeds(rows, "prior", PAIRS, "standard", "sigma_mean")
    return [Effect(seed, beyond) for seed, beyond in found.items()]


def _more_similar(rows: Rows, pairs: Sequence[Pair], statistic: str = "mean") -> list[Effect]:
    sigma, snr = (distances(rows, "prior", pairs, f"{measure}_{statistic}") for measure in ("sigma", "snr"))
    return reductions(sigma, snr)


def _most_similar(rows: Rows) -> list[Effect]:
    """SNR: how much farther teacher_moments is from the other two than these are from each other."""
    others = [pair for pair in PAIRS if pair != CLOSE]
    return reductions(distances(rows, "prior", others, "snr_mean"), distances(rows, "prior", [CLOSE], "snr_mean"))


PAIRS = list(combinations(PRIORS, 2))
CLOSE = ("standard", "teacher_mean")
CLAIMS = [
    Claim("4.2, Figure 3", says, NO_NUMBER, LN, size, effects)
    for says, size, effects in (
        (
            "The prior makes a large difference to the layers' sigma (at the end, beyond that between seeds of "
            "N(0, I))",
            LARGE,
            _large,
        ),
        (
            "Between priors the layers' SNR is more similar than their sigma",
            NOTICED,
            lambda rows: _more_similar(rows, PAIRS),
        ),
        ("So are the maxima over a layer's weights", NOTICED, lambda rows: _more_similar(rows, PAIRS, "max")),
        (
            "Between N(0, I) and N(μ_T, I) the layers' SNR is more similar than their sigma",
            NOTICED,
            lambda rows: _more_similar(rows, [CLOSE]),
        ),
        ("The layers' SNR is particularly similar between N(0, I) and N(μ_T, I)", NOTICED, _most_similar),
    )
]
