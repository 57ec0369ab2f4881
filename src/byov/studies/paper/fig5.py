"""Figure 5: the posterior predictive against the number of weight draws, on clean and on shifted test images.

An image's predictive with K draws is their mean probability of the class that they predict; it is averaged over images.
Its mean and standard deviation are over 50 bootstraps, each of which takes K of the 50 draws, with replacement.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import mean

import matplotlib as mpl
import torch
from matplotlib.figure import Figure
from torch import Tensor

from byov.config import Config
from byov.data.shifts import shifted
from byov.evaluation.probe import Probe, subject_of
from byov.inference.inputs import spread
from byov.inference.run import ReferenceSet, Run, at_draw, features_of
from byov.metrics.over_draws import predictive_over_draws
from byov.report.plots.seed_plots import LOOKS, draw_band
from byov.studies.framework.claims import NO_NUMBER, Claim, Effect, Effects, Row, Rows, at_most, select
from byov.studies.framework.lab import Lab

TITLE = "Figure 5: mean and standard deviation of the predictive against the number of draws"
CLEAN = "clean"
SHIFTS = ("salt_pepper", "shear", "gaussian_noise", "blur")
SEVERITY = 3
SHIFT_SEED = 0
DRAWS, BOOTSTRAPS, IMAGES = 50, 50, 300
USUAL = 30  # draws in previous work (D)


def runs(lab: Lab) -> list[Config]:
    return lab.configs("byov")


def results(lab: Lab) -> Rows:
    """A row for each seed, shift and number of draws."""
    settings = {
        "shifts": SHIFTS,
        "severity": SEVERITY,
        "draws": DRAWS,
        "images": IMAGES,
        "bootstraps": BOOTSTRAPS,
    }
    return [row for config in runs(lab) for row in lab.measured_rows("fig5", config, predictive_rows, settings)]


# --------------------------------------------------------------------------------------------------------- measurement


def predictive_rows(run: Run) -> Rows:
    """Return a row for each shift (clean images first) and each number of draws from 1 on; draws are aligned."""
    subject = subject_of(run)
    chosen = spread(len(subject.data.test), IMAGES)
    clean = subject.test_images[chosen]
    seen = [clean, *(shifted(clean, chosen, name, SEVERITY, SHIFT_SEED) for name in SHIFTS)]
    probabilities = probabilities_of_draws(ReferenceSet(run), subject.probe, torch.cat(seen), DRAWS)
    parts = torch.split(probabilities, len(chosen), dim=1)
    return [
        {"shift": name, **row._asdict()}
        for name, part in zip((CLEAN, *SHIFTS), parts, strict=True)
        for row in predictive_over_draws(part, range(1, DRAWS + 1), BOOTSTRAPS, run.config.seed)
    ]


def probabilities_of_draws(reference: ReferenceSet, probe: Probe, images: Tensor, draws: int) -> Tensor:
    """Apply the probe to each aligned draw: (draws, images, classes), all in memory, so only for few images."""
    run, found = reference.run, []
    for k in range(draws):
        with at_draw(run.encoder, run.config.seed, k):
            features = features_of(run.encoder, images)
        found.append(probe.probabilities(reference.aligned(features, k)))
    return torch.stack(found)


# -------------------------------------------------------------------------------------------------------------- claims

# How the standard deviation falls with the draws is not judged: for bootstraps of K fixed draws it is 1 / sqrt(K) by
# arithmetic. How much of it remains depends on the model.
# In points of probability: the paper prints effects on calibration of 1 to 3 points, and a predictive that is off by d
# moves the ECE by at most d. Neither a bias of half a point nor a standard deviation of one point would hide them.
MARGIN, CHANCE = 0.5, 1.0


def _by_seed(of_shift: Callable[[dict[int, Row]], float], together: Callable[[list[float]], float]) -> Effects:
    """Make the rule for one effect per seed: a number for each shift, from its rows by number of draws, then combined.

    The images are fixed and only the draws vary: there is no error over images.
    """

    def effects(rows: Rows) -> list[Effect]:
        tables: dict[int, dict[str, dict[int, Row]]] = {}
        for row in rows:
            tables.setdefault(row["seed"], {}).setdefault(row["shift"], {})[row["draws"]] = row
        return [Effect(seed, together([of_shift(t) for t in shifts.values()])) for seed, shifts in tables.items()]

    return effects


def _left(table: dict[int, Row]) -> float:
    return float(CHANCE - 100 * table[DRAWS]["std"])


def _drift(table: dict[int, Row]) -> float:
    return float(100 * (table[DRAWS]["mean"] - table[USUAL]["mean"]))


def _furthest(values: list[float]) -> float:
    """Without its sign: seeds that move in opposite directions would cancel."""
    return max(abs(value) for value in values)


WHERE = "D, Figure 5"

CLAIMS = [
    Claim(
        WHERE,
        "The standard deviation of the expectation converges to 0: with 50 draws it is below one point (mean over "
        "shifts).",
        NO_NUMBER,
        "points of probability, below 1",
        CHANCE,
        _by_seed(_left, mean),
        room=at_most(CHANCE),
    ),
    Claim(
        WHERE,
        "The expectation is stable: with 50 draws it is the same as with 30 (mean over shifts).",
        NO_NUMBER,
        "points of probability",
        MARGIN,
        _by_seed(_drift, mean),
        equal=True,
    ),
    Claim(
        WHERE,
        "This holds under all shifts: where the expectation moves most from 30 to 50 draws, it is stable too.",
        NO_NUMBER,
        "points of probability",
        MARGIN,
        _by_seed(_drift, _furthest),
        equal=True,
    ),
]


# -------------------------------------------------------------------------------------------------------------- figure


def draw(rows: Rows, scale: str) -> Figure:
    """Mean, standard deviation of the average over images and of single images; bands: range over seeds."""
    panels = {
        "mean": "expectation (%)",
        "std": "std of the expectation (points)",
        "image_std": "the same, of single images (points)",
    }
    with mpl.rc_context({"font.size": 9, "axes.grid": True, "grid.alpha": 0.4}):
        figure = Figure(figsize=(9.5, 3.2), layout="constrained")
        for axes, (key, label) in zip(figure.subplots(1, 3), panels.items(), strict=True):
            for shift, look in zip((CLEAN, *SHIFTS), LOOKS, strict=True):
                mine = select(rows, shift=shift)
                draw_band(axes, mine, "draws", key, 100, label=shift.replace("_", " "), **{**look, "marker": None})
            axes.set(xlabel="weight draws", ylabel=label)
        for axes in figure.axes[1:]:
            axes.set_ylim(bottom=0)
        lines, names = figure.axes[0].get_legend_handles_labels()
        figure.legend(lines, names, loc="outside lower center", ncols=len(names), frameon=False, fontsize=7)
        return figure
