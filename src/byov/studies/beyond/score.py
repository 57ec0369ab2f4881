"""The label-free score: every candidate on error detection, other data sets and growing noise, with baselines.

The rule, fixed before the runs: on the data set where the score is chosen, a candidate's rank is averaged over error
detection, all out-of-distribution sources and noise of severities 3 and 5, and over seeds; the best average rank wins.
Other data sets only report. Baselines that use labels are shown for comparison and cannot win.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from statistics import mean
from typing import Any

import matplotlib as mpl
import torch
from matplotlib.figure import Figure
from torch import Tensor

from byov._core.callbacks import Progress
from byov.config import Config
from byov.data.shifts import SEVERITIES, shifted
from byov.data.sources import open_source
from byov.evaluation.evaluate import evaluate
from byov.evaluation.predictive import LABEL_FREE
from byov.inference.inputs import at_side, spread
from byov.inference.run import BATCH, ReferenceSet, Run
from byov.metrics import auroc
from byov.scoring.scores import AT_MEANS, BLOCK, CANDIDATES, check_candidate, score_block
from byov.studies.framework.claims import Rows, select
from byov.studies.framework.lab import Lab

TITLE = "the label-free score: candidates and baselines on errors, other data sets and growing noise"
NOISE = "gaussian_noise"
IMAGES = 1000  # of the test images: an AUROC of .8 then has an error of .01
RANKED = (3, 5)  # severities of noise that count


def runs(lab: Lab) -> list[Config]:
    return lab.configs("byov", "byol")


def results(lab: Lab) -> Rows:
    """A row for each method, seed, score and task: its AUROC."""
    return [row for config in runs(lab) for row in _rows(lab, config)]


def _rows(lab: Lab, config: Config) -> Rows:
    draws, others = lab.scale.draws, lab.ood_sources()
    settings = {"draws": draws, "ood": others}

    def measure(run: Run) -> dict[str, Any]:
        known = evaluate(run, draws=draws, ood=others, say=lab.say)
        noise = {f"noise.{score}.{key}": v for score, f in noise_measures(run, draws).items() for key, v in f.items()}
        return {**{key: value for key, value in known.items() if key.endswith("auroc")}, **noise}

    found = lab.measured("score", config, measure, settings)
    rows = []
    for key, value in found.items():
        task, score = _task(key)
        if task is not None and value is not None:  # undefined where no image is misclassified, for example
            rows.append({"method": config.method, "seed": config.seed, "task": task, "score": score, "auroc": value})
    return rows


def noise_measures(run: Run, draws: int) -> dict[str, dict[str, float]]:
    """Measure whether the label-free scores rise with the noise in the images, as they should.

    For each score and severity: the AUROC of noisy against clean images, and the mean score over the clean mean. Images
    come from the test split of the run's own source; the noise is the same for every run.
    """
    source = open_source(run.config.data, run.config.image_size)
    images = source.load(source.default).images
    ids = spread(len(images), IMAGES)
    clean = at_side(images[ids], run.image_shape[-1])
    before = candidate_scores(run, clean, draws)
    found: dict[str, dict[str, float]] = {name: {} for name in before}
    for severity in SEVERITIES:
        after = candidate_scores(run, shifted(clean, ids, NOISE, severity, seed=0), draws)
        for name, scores in after.items():
            both, noisy = torch.cat([before[name], scores]), torch.arange(2 * len(ids)) >= len(ids)
            found[name][f"auroc.{severity}"] = float(auroc(both, noisy))
            found[name][f"mean.{severity}"] = float(scores.mean() / before[name].mean())
    return found


def candidate_scores(
    run: Run,
    images: Tensor,
    draws: int = 20,
    names: Iterable[str] | None = None,
    *,
    batch_size: int = BATCH,
    progress: Progress = lambda what, done, total: None,
) -> dict[str, Tensor]:
    """Score images with several candidates in one pass over the draws; `names=None`: all that the run allows."""
    if names is None:
        names = AT_MEANS if run.deterministic else CANDIDATES
    for name in (names := list(names)):
        check_candidate(run, name, draws)
    run.check(images)
    reference = ReferenceSet(run)
    parts: list[dict[str, Tensor]] = []
    for i, block in enumerate(torch.split(images, BLOCK)):
        parts.append(score_block(reference, block, names, draws, batch_size)[0])
        progress(f"scoring {len(images):,} images", i * BLOCK + len(block), len(images))
    return {name: torch.cat([part[name] for part in parts]) for name in names}


def _task(key: str) -> tuple[str | None, str]:
    """The task and score that a key of the evaluation belongs to; None for other keys."""
    first, *rest = key.split(".")
    if first == "selective" and rest[-1] == "error_auroc":
        return "errors", rest[0]
    if first == "ood" and rest[-1] == "auroc":
        return rest[0], rest[1]
    if first == "noise" and rest[1] == "auroc" and int(rest[2]) in RANKED:
        return f"noise {rest[2]}", LABEL_FREE + rest[0]
    return None, ""


def ranking(rows: Rows, method: str = "byov") -> dict[str, float]:
    """Return the average rank of each label-free score over tasks and seeds (1 is best), best first."""
    mine = [row for row in select(rows, method=method) if row["score"].startswith(LABEL_FREE)]
    ranks: dict[str, list[int]] = {}
    for task, seed in sorted({(row["task"], row["seed"]) for row in mine}):
        here = select(mine, task=task, seed=seed)
        for rank, row in enumerate(sorted(here, key=lambda row: -row["auroc"]), 1):
            ranks.setdefault(row["score"], []).append(rank)
    averages = {score: mean(found) for score, found in ranks.items()}
    return dict(sorted(averages.items(), key=lambda item: item[1]))


def draw(rows: Rows, scale: str) -> Figure:
    """AUROC of every score on every task, averaged over seeds, as a coloured table."""
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
