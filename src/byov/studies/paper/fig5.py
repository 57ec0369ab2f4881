"""Figure 5: the posterior predictive against the number of weight draws, on clean and on shifted test images.

An image's predictive with K draws is their mean probability of the class that they predict; it is averaged over images.
Its mean and standard deviation are over 50 bootstraps, each of which takes K of the 50 draws, with replacement.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import mean
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

from byov.config import Config
from byov.evaluation.named_metrics import strict
from byov.inference.load import Run
from byov.report.plots.seed_plots import LOOKS, draw_band
from byov.studies.framework.claims import Claim, Effect
from byov.studies.framework.lab import Lab
from byov.studies.measurements.draws_needed import CLEAN, convergence

TITLE = "Figure 5: mean and standard deviation of the predictive against the number of draws"
SHIFTS = ("salt_pepper", "shear", "gaussian_noise", "blur")
SEVERITY = 3
DRAWS, BOOTSTRAPS, IMAGES = 50, 50, 300
USUAL = 30  # draws that previous work takes (D)


def runs(lab: Lab) -> list[Config]:
    return lab.configs("byov")


def results(lab: Lab) -> list[dict[str, Any]]:
    """A row for each seed, shift and number of draws."""
    return [row for config in runs(lab) for row in _rows(lab, config)]


def _rows(lab: Lab, config: Config) -> list[dict[str, Any]]:
    def measure(run: Run) -> dict[str, Any]:
        found = convergence(run, SHIFTS, SEVERITY, DRAWS, IMAGES, BOOTSTRAPS)
        return {"rows": [strict(row) for row in found]}

    settings = {
        "shifts": SHIFTS,
        "severity": SEVERITY,
        "draws": DRAWS,
        "images": IMAGES,
        "bootstraps": BOOTSTRAPS,
    }
    found = lab.measured("fig5", config, measure, settings)
    return [{"seed": config.seed, **row} for row in found["rows"]]


# -------------------------------------------------------------------------------------------------------------- claims

# How the standard deviation falls with the draws is not judged: of bootstraps of K fixed draws it is 1 / sqrt(K), by
# arithmetic. How much of it is left is a matter of the model.
# In points of probability. The effects on calibration that the paper prints are 1 to 3 points, and a predictive that is
# off by d moves the ECE by d at most. A bias of half a point does not blur them; nor does chance of one point.
MARGIN, CHANCE = 0.5, 1.0


def _by_seed(
    of_shift: Callable[[dict[int, dict[str, Any]]], float], together: Callable[[list[float]], float]
) -> Callable[[list[dict[str, Any]]], list[Effect]]:
    """An effect a seed: a number for each shift (of its rows by number of draws), and what they come to together.

    The images are given, and it is about draws: no error over images.
    """

    def effects(rows: list[dict[str, Any]]) -> list[Effect]:
        tables: dict[int, dict[str, dict[int, dict[str, Any]]]] = {}
        for row in rows:
            tables.setdefault(row["seed"], {}).setdefault(row["shift"], {})[row["draws"]] = row
        return [Effect(seed, together([of_shift(t) for t in shifts.values()])) for seed, shifts in tables.items()]

    return effects


def _left(table: dict[int, dict[str, Any]]) -> float:
    return float(CHANCE - 100 * table[DRAWS]["std"])


def _drift(table: dict[int, dict[str, Any]]) -> float:
    return float(100 * (table[DRAWS]["mean"] - table[USUAL]["mean"]))


def _furthest(values: list[float]) -> float:
    """Without its sign: over seeds that move to either side it would cancel."""
    return max(abs(value) for value in values)


WHERE = "D, Figure 5"

CLAIMS = [
    Claim(
        WHERE,
        "The standard deviation of the expectation converges to 0: with 50 draws it is below one point (mean over "
        "shifts).",
        "no number",
        "points of probability, below 1",
        CHANCE,
        _by_seed(_left, mean),
    ),
    Claim(
        WHERE,
        "The expectation is stable: with 50 draws it is that with 30 (mean over shifts).",
        "no number",
        "points of probability",
        MARGIN,
        _by_seed(_drift, mean),
        equal=True,
    ),
    Claim(
        WHERE,
        "It is the same under all shifts: where the expectation moves most from 30 to 50 draws, it is stable too.",
        "no number",
        "points of probability",
        MARGIN,
        _by_seed(_drift, _furthest),
        equal=True,
    ),
]


# -------------------------------------------------------------------------------------------------------------- figure


def draw(rows: list[dict[str, Any]], scale: str) -> Figure:
    """Mean, standard deviation of the average over images, and of single images; bands: range over seeds."""
    panels = {
        "mean": "expectation (%)",
        "std": "std of the expectation (points)",
        "image_std": "the same, of single images (points)",
    }
    with mpl.rc_context({"font.size": 9, "axes.grid": True, "grid.alpha": 0.4}):
        figure = Figure(figsize=(9.5, 3.2), layout="constrained")
        for axes, (key, label) in zip(figure.subplots(1, 3), panels.items(), strict=True):
            for shift, look in zip((CLEAN, *SHIFTS), LOOKS, strict=True):
                mine = [row for row in rows if row["shift"] == shift]
                draw_band(axes, mine, "draws", key, 100, label=shift.replace("_", " "), **{**look, "marker": None})
            axes.set(xlabel="weight draws", ylabel=label)
        for axes in figure.axes[1:]:
            axes.set_ylim(bottom=0)
        lines, names = figure.axes[0].get_legend_handles_labels()
        figure.legend(lines, names, loc="outside lower center", ncols=len(names), frameon=False, fontsize=7)
        return figure
