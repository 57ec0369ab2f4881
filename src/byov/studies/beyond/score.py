"""The label-free score: every candidate against error detection, other data sets and growing noise, beside baselines.

The rule, fixed before the runs: on the data set where the score is chosen, a candidate's rank is averaged over error
detection, all out-of-distribution sources and noise of severities 3 and 5, and over seeds; the best average rank wins.
Other data sets only report. Baselines that know labels stand beside and cannot win.
"""

from __future__ import annotations

import math
from statistics import mean
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

from byov.config import Config
from byov.evaluation.evaluate import evaluate
from byov.evaluation.per_image_uncertainty import LABEL_FREE
from byov.inference.load import Run
from byov.studies.framework.lab import Lab
from byov.studies.measurements.score_under_noise import noise_measures
from byov.studies.measurements.transfer import sources_there

TITLE = "the label-free score: candidates and baselines on errors, other data sets and growing noise"
OTHERS = {  # what is out of distribution, by the data set trained on; all can be had without a network
    "digits": ("fashion_mnist", "cifar10"),
    "cifar10": ("fashion_mnist", "mnist", "digits"),
    "fashion_mnist": ("mnist", "digits", "cifar10"),
}
SEVERITIES = (3, 5)


def runs(lab: Lab) -> list[Config]:
    return lab.configs("byov", "byol")


def results(lab: Lab) -> list[dict[str, Any]]:
    """A row for each method, seed, score and task: its AUROC."""
    return [row for config in runs(lab) for row in _rows(lab, config)]


def _rows(lab: Lab, config: Config) -> list[dict[str, Any]]:
    draws, others = lab.scale.draws, sources_there(OTHERS.get(lab.scale.data, ()), lab.say)
    settings = {"draws": draws, "ood": others}

    def measure(run: Run) -> dict[str, Any]:
        known = evaluate(run, draws=draws, ood=others, say=lab.say)
        noise = {f"noise.{score}.{key}": v for score, f in noise_measures(run, draws).items() for key, v in f.items()}
        return {**{key: value for key, value in known.items() if key.endswith("auroc")}, **noise}

    found = lab.measured("score", config, measure, settings)
    rows = []
    for key, value in found.items():
        task, score = _task(key)
        if task is not None and value is not None:  # undefined where nothing is wrong, say
            rows.append({"method": config.method, "seed": config.seed, "task": task, "score": score, "auroc": value})
    return rows


def _task(key: str) -> tuple[str | None, str]:
    """The task and the score that a key of the evaluation is about; None for other keys."""
    first, *rest = key.split(".")
    if first == "selective" and rest[-1] == "error_auroc":
        return "errors", rest[0]
    if first == "ood" and rest[-1] == "auroc":
        return rest[0], rest[1]
    if first == "noise" and rest[1] == "auroc" and int(rest[2]) in SEVERITIES:
        return f"noise {rest[2]}", LABEL_FREE + rest[0]
    return None, ""


def ranking(rows: list[dict[str, Any]], method: str = "byov") -> dict[str, float]:
    """The average rank of each label-free score over tasks and seeds (1 is best), best first."""
    mine = [row for row in rows if row["method"] == method and row["score"].startswith(LABEL_FREE)]
    ranks: dict[str, list[int]] = {}
    for task, seed in sorted({(row["task"], row["seed"]) for row in mine}):
        here = [row for row in mine if (row["task"], row["seed"]) == (task, seed)]
        for rank, row in enumerate(sorted(here, key=lambda row: -row["auroc"]), 1):
            ranks.setdefault(row["score"], []).append(rank)
    averages = {score: mean(found) for score, found in ranks.items()}
    return dict(sorted(averages.items(), key=lambda item: item[1]))


def draw(rows: list[dict[str, Any]], scale: str) -> Figure:
    """AUROC of every score on every task, averaged over seeds: a table in colours."""
    tasks = list(dict.fromkeys(row["task"] for row in rows))
    labels = list(dict.fromkeys((row["method"], row["score"]) for row in rows))
    values = [
        [_mean([r["auroc"] for r in rows if (r["method"], r["score"], r["task"]) == (*label, task)]) for task in tasks]
        for label in labels
    ]
    with mpl.rc_context({"font.size": 8}):
        figure = Figure(figsize=(3.5 + 0.8 * len(tasks), 1 + 0.22 * len(labels)), layout="constrained")
        axes = figure.subplots()
        image = axes.imshow(values, vmin=0.2, vmax=1, cmap="cividis", aspect="auto")
        for y, line in enumerate(values):
            for x, value in enumerate(line):
                text, colour = (
                    ("–", "black") if math.isnan(value) else (f"{value:.2f}", "white" if value < 0.65 else "black")
                )
                axes.text(x, y, text, ha="center", va="center", color=colour)
        axes.set_xticks(range(len(tasks)), tasks, rotation=30, ha="right")
        axes.set_yticks(range(len(labels)), [_label(*label) for label in labels])
        figure.colorbar(image, label="AUROC")
        return figure


def _label(method: str, score: str) -> str:
    if score.startswith(LABEL_FREE):
        return f"{method.upper()}, label-free: {score.removeprefix(LABEL_FREE)}"
    return f"{method.upper()}, probe: {score}"


def _mean(values: list[float]) -> float:
    return mean(values) if values else float("nan")
