"""Each prior's encoder on other tasks: a probe on sources that it never saw, at the means and over draws.

The first open question in the reader's summary: what the prior means for uncertainty on downstream tasks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from statistics import mean

import matplotlib as mpl
from matplotlib.figure import Figure

from byov._core.callbacks import Say
from byov._core.errors import BadInput
from byov.config import Config
from byov.evaluation.measures import errors_of, strict
from byov.evaluation.probe import plain_name, subject_of
from byov.inference.run import Run
from byov.metrics import auroc, max_softmax
from byov.report.plots.seed_plots import STYLE, dots
from byov.studies.framework.claims import Claim, Effect, Row, Rows, differences, rooms, select
from byov.studies.framework.compare import (
    PRIORS,
    Arms,
    Predictions,
    cached_predictions,
    check_same_images,
    configs_of,
    measures_of,
    predict,
)
from byov.studies.framework.lab import Lab
from byov.studies.measurements.pruned import top1_difference
from byov.training.loop import subset

TITLE = "each prior on downstream tasks: accuracy, calibration and error detection of a probe"
REFERENCE, BYOL = PRIORS["standard"], "BYOL"
TASKS = ("mnist", "fashion_mnist", "cifar10", "digits")
FEWEST = 2  # tasks: an average needs more than one
TRAIN, TEST = 2000, 1000  # images at most: fixed random ones, the same for every run
MEASURES = {"top1": "top-1 (%)", "ece": "ECE (points)", "errors": "AUROC of error detection (%)"}
PLACES = {"means": "at the means", "draws": "over draws"}


def arms(lab: Lab) -> Arms:
    """The config of each arm, by seed."""
    byov = {name: partial(lab.config, "byov", changes={"posterior.prior": prior}) for prior, name in PRIORS.items()}
    return byov | {BYOL: partial(lab.config, "byol")}


def runs(lab: Lab) -> list[Config]:
    _tasks(lab)  # fails before anything is trained
    return configs_of(lab, arms(lab))


def results(lab: Lab) -> Rows:
    """A row for each seed, task, arm and place; differences are to the standard prior at the same place."""
    tasks = _tasks(lab)
    known = {"tasks": ", ".join(tasks)}  # effects are averages over these
    return [row | known for task in tasks for seed in range(lab.seeds) for row in _rows(lab, task, seed)]


def _rows(lab: Lab, task: str, seed: int) -> Iterator[Row]:
    found = {arm: _predictions(lab, make(seed), task) for arm, make in arms(lab).items()}
    for arm, mine in found.items():
        for at in (place for place in PLACES if place in mine.probabilities):
            measures = task_measures(mine, found[REFERENCE], at, TASKS.index(task))
            yield {"task": task, "arm": arm, "seed": seed, "at": at, **measures}


def _tasks(lab: Lab) -> list[str]:
    """All available TASKS that are not the run's own source."""
    wanted = [name for name in TASKS if name != lab.scale.data]
    here = lab.available(wanted)
    if len(here) < FEWEST:
        missing = ", ".join(f"`byov data get {name}`" for name in wanted if name not in here)
        raise BadInput(f"priors-tasks needs at least {FEWEST} tasks and finds {len(here)}: fetch more with {missing}.")
    return here


# --------------------------------------------------------------------------------------------------------- measurement


def _predictions(lab: Lab, config: Config, task: str) -> Predictions:
    draws = lab.scale.draws
    settings = {"draws": draws, "train": TRAIN, "test": TEST, "task": task}
    make = partial(transferred, source=task, draws=draws, say=lab.say)
    return cached_predictions(lab, f"downstream-{plain_name(task)}", config, make, settings)


def transferred(run: Run, source: str, draws: int, say: Say) -> Predictions:
    """Fit a probe to some images of another source and predict its test images, at the means and over draws."""
    whole = subject_of(run, say=say, source=source)
    data = replace(whole.data, train=subset(whole.data.train, TRAIN), test=subset(whole.data.test, TEST))
    return predict(replace(whole, data=data), draws)


def task_measures(mine: Predictions, other: Predictions, at: str, resamples_seed: int = 0) -> Row:
    """Measure a run; `errors` is the AUROC of detecting its errors by the top probability.

    `top1.difference` is to the other run at the same place, or at its means; `top1.error` is its error over images.
    Tasks resample their images with other seeds: their images are independent.
    """
    check_same_images(mine, other)
    p, labels = mine.probabilities[at], mine.labels
    q = other.probabilities.get(at, other.probabilities["means"])
    found: Row = measures_of(p, labels) | {"errors": auroc(max_softmax(p), errors_of(p, labels))}
    return strict(found | top1_difference("top1", p, q, labels, resamples_seed))


# -------------------------------------------------------------------------------------------------------------- claims


def task_effects(rows: Rows, arm: str, sign: int = +1) -> list[Effect]:
    """Points of top-1 between a prior and the standard one, averaged over tasks, whose images are independent."""
    mine = select(rows, arm=arm, at="means")
    found = []
    for seed in sorted({row["seed"] for row in mine}):
        here = differences(mine, "top1", sign, seed=seed)
        error = math.sqrt(sum(effect.error**2 for effect in here)) / len(here)
        known = [effect.replicates for effect in here if effect.replicates is not None]
        together = tuple(map(mean, zip(*known, strict=True))) if len(known) == len(here) else None
        found.append(Effect(seed, mean(effect.value for effect in here), error, together))
    return found


def task_room(rows: Rows, arm: str) -> list[Effect]:
    """By how much the prior could be worse than the standard one: down to no image right, averaged over tasks."""
    found = rooms(select(rows, arm=arm, at="means"), "top1", -1)
    seeds = sorted({effect.seed for effect in found})
    return [Effect(seed, mean(effect.value for effect in found if effect.seed == seed)) for seed in seeds]


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
        room=lambda rows: task_room(rows, PRIORS["teacher_moments"]),
    ),
]


# -------------------------------------------------------------------------------------------------------------- figure


def draw(rows: Rows, scale: str) -> Figure:
    """One row of panels per measure, one panel per task: priors and BYOL, at the means and over draws."""
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
    here = [row for row in select(rows, task=task, at=at) if row[measure] is not None]
    return {label: [100 * row[measure] for row in select(here, arm=label)] for label in labels}
