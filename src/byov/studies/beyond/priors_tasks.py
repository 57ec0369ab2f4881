"""Each prior's encoder on other tasks: a probe on sources that it never saw, at the means and over draws.

The first open question of the reader's summary: what the prior means for uncertainty on downstream tasks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from statistics import mean
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

from byov._core.errors import BadInput
from byov.config import Config
from byov.evaluation.ood import plain_name
from byov.report.plots.seed_plots import STYLE, dots
from byov.studies.framework.claims import Claim, Effect
from byov.studies.framework.compare import Arms
from byov.studies.framework.lab import Lab
from byov.studies.measurements.predictions import Outcomes
from byov.studies.measurements.transfer import downstream, downstream_settings, sources_there, task_measures
from byov.studies.paper.fig2 import PRIORS

TITLE = "each prior on downstream tasks: accuracy, calibration and error detection of a probe"
REFERENCE, BYOL = PRIORS["standard"], "BYOL"
TASKS = ("mnist", "fashion_mnist", "cifar10", "digits")
FEWEST = 2  # tasks: an average over one would be about that one
MEASURES = {"top1": "top-1 (%)", "ece": "ECE (points)", "errors": "AUROC of finding errors (%)"}
PLACES = {"means": "at the means", "draws": "over draws"}
Rows = list[dict[str, Any]]


def arms(lab: Lab) -> Arms:
    """The config of each arm, by seed."""
    byov = {name: partial(lab.config, "byov", changes={"posterior.prior": prior}) for prior, name in PRIORS.items()}
    return byov | {BYOL: partial(lab.config, "byol")}


def runs(lab: Lab) -> list[Config]:
    _tasks(lab)  # there must be some: known before anything is trained
    return [make(seed) for seed in range(lab.seeds) for make in arms(lab).values()]


def results(lab: Lab) -> Rows:
    """A row for each seed, task, arm and place; differences are to the standard prior at the same place."""
    tasks = _tasks(lab)
    known = {"tasks": ", ".join(tasks)}  # effects are averages over these
    return [row | known for task in tasks for seed in range(lab.seeds) for row in _rows(lab, task, seed)]


def _rows(lab: Lab, task: str, seed: int) -> Iterator[dict[str, Any]]:
    found = {arm: _outcomes(lab, make(seed), task) for arm, make in arms(lab).items()}
    for arm, mine in found.items():
        for at in (place for place in PLACES if place in mine.probabilities):
            measures = task_measures(mine, found[REFERENCE], at)
            yield {"task": task, "arm": arm, "seed": seed, "at": at, **measures}


def _tasks(lab: Lab) -> list[str]:
    """All of TASKS that are here and not the run's own source."""
    wanted = [name for name in TASKS if name != lab.scale.data]
    there = sources_there(wanted, lab.say)
    if len(there) < FEWEST:
        missing = ", ".join(f"`byov data get {name}`" for name in wanted if name not in there)
        raise BadInput(f"priors-tasks needs at least {FEWEST} tasks, here is {len(there)}: fetch more with {missing}.")
    return there


def _outcomes(lab: Lab, config: Config, task: str) -> Outcomes:
    draws = lab.scale.draws
    settings = downstream_settings(draws) | {"task": task}
    what = f"downstream-{plain_name(task)}"
    return lab.kept_outcomes(what, config, lambda run: downstream(run, task, draws, lab.say), settings)


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
        where="reader's summary, open question 1",
        says="There is little difference between the priors N(0, I) and N(teacher, I), here on other tasks.",
        paper="73.68 against 73.97 top-1 (all but the convolution random)",
        unit="points of top-1",
        size=1.0,  # three times the paper's own difference
        effects=lambda rows: task_effects(rows, PRIORS["teacher_mean"]),
        equal=True,
    ),
    Claim(
        where="reader's summary, open question 1",
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
