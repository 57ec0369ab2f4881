"""Figure 6: SNR of every layer over training, by schedule of beta (standard prior), with a constant beta to compare."""

from __future__ import annotations

from statistics import mean

from matplotlib.figure import Figure

from byov.config import Config
from byov.report.plots.seed_plots import HEADS, layer_figure
from byov.studies.framework.claims import NO_NUMBER, Claim, Effect, Rows
from byov.studies.framework.lab import Lab
from byov.studies.measurements.layer_history import (
    LARGE,
    LN,
    NOTICED,
    beyond_seeds,
    distances,
    layer_history,
    log_ratios,
    profiles,
    reductions,
)

TITLE = "Figure 6: SNR of every layer over training, by schedule of beta"
SCHEDULES = {"0->0.1": (0.0, 0.1), "0->0.3": (0.0, 0.3), "0->1": (0.0, 1.0), "1->1": (1.0, 1.0)}
LOW, HIGH = "0->0.1", "0->1"


def _config(lab: Lab, schedule: str, seed: int) -> Config:
    start, end = SCHEDULES[schedule]
    return lab.config("byov", seed, {"posterior.beta_start": start, "posterior.beta_end": end})


def runs(lab: Lab) -> list[Config]:
    return [_config(lab, schedule, seed) for seed in range(lab.seeds) for schedule in SCHEDULES]


def results(lab: Lab) -> Rows:
    """A row for each schedule, seed, layer and epoch, from the run's log of its training."""
    return [
        {"schedule": schedule, "seed": seed, **row}
        for seed in range(lab.seeds)
        for schedule in SCHEDULES
        for row in layer_history(lab.path(_config(lab, schedule, seed)))
    ]


def draw(rows: Rows, scale: str) -> Figure:
    """The layers' mean SNR above, their maximum below; one column per schedule."""
    titles = {name: f"β {start:g} → {end:g}" for name, (start, end) in SCHEDULES.items()}
    return layer_figure(rows, "schedule", titles, ("snr",))


# -------------------------------------------------------------------------------------------------------------- claims


def _small(rows: Rows) -> list[Effect]:
    """Chance is not subtracted: it can only widen the distance, so it never makes beta's impact look small."""
    return [Effect(seed, found) for seed, found in distances(rows, "schedule", [(LOW, HIGH)], "snr_mean").items()]


def _maximum_varies_more(rows: Rows) -> list[Effect]:
    """Each beyond the distance between seeds: by chance alone, a maximum differs more than a mean."""
    maximum, average = (beyond_seeds(rows, "schedule", [(LOW, HIGH)], HIGH, f"snr_{s}") for s in ("max", "mean"))
    return reductions(maximum, average)


def _fall(rows: Rows, heads: bool) -> dict[int, float]:
    """By seed: mean ln(SNR at the lowest beta / at the highest) of the projector and predictor, or of the encoder."""
    ends = profiles(rows, "schedule", "snr_mean")
    found = {}
    for seed in sorted(seed for name, seed in ends if name == LOW and (HIGH, seed) in ends):
        ratios = log_ratios(ends[LOW, seed], ends[HIGH, seed])
        found[seed] = mean(ratio for layer, ratio in ratios.items() if (layer.split(".")[0] in HEADS) == heads)
    return found


def _heads_fall(rows: Rows) -> list[Effect]:
    return [Effect(seed, found) for seed, found in _fall(rows, heads=True).items()]


# Where a layer's loss has curvature h, its sigma settles at sigma^2 = b / (h + b), with b the weight of its KL. A
# tenfold beta then divides SNR by sqrt(10) = 3.2. Small is about a third of that in logarithms: LARGE of Figure 3.
CLAIMS = [
    Claim(
        "4.2; E, Figure 6",
        "Beta has a fairly small impact on the layers' SNR (0 -> 0.1 against 0 -> 1: within a factor of 1.5 per layer)",
        NO_NUMBER,
        LN,
        LARGE,
        _small,
        equal=True,
    ),
    Claim(
        "E, Figure 6",
        "The maximum of a layer's SNR varies more with beta than its mean",
        NO_NUMBER,
        LN,
        NOTICED,
        _maximum_varies_more,
    ),
    Claim(
        "E, Figure 6",
        "Projector and predictor reach a smaller SNR as beta grows (0 -> 0.1 against 0 -> 1)",
        NO_NUMBER,
        "mean ln ratio of a layer",
        NOTICED,
        _heads_fall,
    ),
    Claim(
        "E, Figure 6",
        "These lines are the projector's and predictor's: the encoder's SNR falls less",
        NO_NUMBER,
        "mean ln ratio of a layer",
        NOTICED,
        lambda rows: reductions(_fall(rows, heads=True), _fall(rows, heads=False)),
    ),
]
