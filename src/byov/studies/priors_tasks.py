"""Each prior's encoder on other tasks: a probe on sources that it never saw, at the means and over draws.

The first open question of the reader's summary: what the prior means for uncertainty on downstream tasks.
"""

from __future__ import annotations

import math
from functools import partial
from statistics import mean
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

from byov.config import Config
from byov.evaluation.downstream import downstream, sources_there, task_measures
from byov.evaluation.outcomes import Outcomes, read_outcomes, write_outcomes
from byov.evaluation.outside import plain_name
from byov.report.dots import STYLE, dots
from byov.studies.claims import Claim, Effect
from byov.studies.compare import Arms
from byov.studies.lab import Lab

TITLE = "each prior on downstream tasks: accuracy, calibration and error detection of a probe"
PRIORS = {"standard": "N(0, I)", "teacher_mean": "N(μ_T, I)", "teacher_moments": "N(μ_T, Σ_T)"}
REFERENCE, BYOL = PRIORS["standard"], "BYOL"
TASKS = ("mnist", "fashion_mnist", "cifar10", "digits")
MEASURES = {"top1": "top-1 (%)", "ece": "ECE (points)", "errors": "AUROC of finding errors (%)"}
PLACES = {"means": "at the means", "draws": "over draws"}
Rows = list[dict[str, Any]]


def arms(lab: Lab) -> Arms:
    """The config of each arm, by seed."""
    byov = {name: partial(lab.config, "byov", changes={"posterior.prior": prior}) for prior, name in PRIORS.items()}
    return byov | {BYOL: partial(lab.config, "byol")}


def runs(lab: Lab) -> list[Config]:
    return [make(seed) for seed in range(lab.seeds) for make in arms(lab).values()]


def results(lab: Lab) -> Rows:
    """A row for each seed, task, arm and place; differences are to the standard prior at the same place."""
    rows = []
    for task in sources_there((name for name in TASKS if name != lab.scale.data), lab.say):
        for seed in range(lab.seeds):
            found = {arm: _outcomes(lab, make(seed), task) for arm, make in arms(lab).items()}
            for arm, mine in found.items():
                for at in (place for place in PLACES if place in mine.probabilities):
                    measures = task_measures(mine, found[REFERENCE], at)
                    rows.append({"task": task, "arm": arm, "seed": seed, "at": at, **measures})
    return rows


def _outcomes(lab: Lab, config: Config, task: str) -> Outcomes:
    """Kept in the run's folder."""
    path, draws = lab.path(config) / "results" / f"downstream-{plain_name(task)}.safetensors", lab.scale.draws
    found = read_outcomes(path, draws)
    if found is None:
        found = downstream(lab.run(config), task, draws, lab.say)
        write_outcomes(path, found, draws)
    return found


def task_effects(rows: Rows, arm: str, sign: int = +1) -> list[Effect]:
    """Points of top-1 between a prior and the standard one, averaged over tasks, whose images are independent."""
    mine = [row for row in rows if (row["arm"], row["at"]) == (arm, "means")]
    found = []
    for seed in sorted({row["seed"] for row in mine}):
        here = [row for row in mine if row["seed"] == seed]
        error = math.sqrt(sum(row["top1.error"] ** 2 for row in here)) / len(here)
        found.append(Effect(seed, 100 * sign * mean(row["top1.difference"] for row in here), 100 * error))
    return found


CLAIMS = [
    Claim(
        where="4.1; reader's summary, open question 1",
        says="There is little difference between the priors N(0, I) and N(teacher, I), here on other tasks.",
        paper="73.68 against 73.97 top-1 (all but the convolution random)",
        unit="points of top-1",
        size=1.0,  # three times the paper's own difference
        effects=lambda rows: task_effects(rows, PRIORS["teacher_mean"]),
        equal=True,
    ),
    Claim(
        where="4.1; G, Table 1",
        says="The prior N(teacher, running variance) is notably worse than N(0, I), here on other tasks.",
        paper="69.73 against 73.68 top-1 (all but the convolution random)",
        unit="points of top-1",
        size=3.95,
        effects=lambda rows: task_effects(rows, PRIORS["teacher_moments"], sign=-1),
    ),
]


def draw(rows: Rows, scale: str) -> Figure:
    """A row of panels a measure, a panel a task: priors beside BYOL, at the means and over draws."""
    labels = list(dict.fromkeys(row["arm"] for row in rows))
    columns = list(dict.fromkeys(row["task"] for row in rows))
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(1.5 + 2.6 * len(columns), 5.2), layout="constrained")
        panels = figure.subplots(len(MEASURES), max(len(columns), 1), sharey=True, squeeze=False)
        for axes_row, (measure, label) in zip(panels, MEASURES.items(), strict=True):
            for axes, task in zip(axes_row, columns, strict=False):
                series = {name: _values(rows, task, at, measure, labels) for at, name in PLACES.items()}
                dots(axes, series, labels)
                axes.set_xlabel(label)
        for axes, task in zip(panels[0], columns, strict=False):
            axes.set_title(f"probed on {task}", fontsize=8)
        handles, texts = panels[0][0].get_legend_handles_labels()
        figure.legend(handles, texts, loc="outside lower center", ncols=2, fontsize=7)
        figure.suptitle(f"Priors on other tasks ({scale}): dots are seeds")
        return figure


def _values(rows: Rows, task: str, at: str, measure: str, labels: list[str]) -> dict[str, list[float]]:
    here = [row for row in rows if (row["task"], row["at"]) == (task, at) and row[measure] is not None]
    return {label: [100 * row[measure] for row in here if row["arm"] == label] for label in labels}
