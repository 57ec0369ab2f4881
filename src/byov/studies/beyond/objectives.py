"""Does the uncertainty hang on the objective? BYOV, with negatives added, with weak views, and with labels instead.

The second of the reader's next checks. Weak views leave the task almost trivial: crops of at least 90% and no jitter.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

from byov.config import Config
from byov.inference.load import Run
from byov.report.plots.seed_plots import STYLE, dots
from byov.studies.beyond.score import OTHERS
from byov.studies.framework.claims import Claim
from byov.studies.framework.compare import Arms, compare, effects
from byov.studies.framework.lab import Lab
from byov.studies.measurements.transfer import sources_there
from byov.studies.measurements.uncertainty_quality import SCORES, trust_measures, trust_settings

TITLE = "uncertainty when the objective changes: negatives, weak views, labels"
BYOV, NEGATIVES, WEAK, LABELS = "BYOV", "with negatives", "weak views", "supervised BBB"
WEAK_VIEWS = {
    f"views.{view}.{key}": value
    for view in ("first", "second")
    for key, value in (("crop_area", [0.9, 1.0]), ("jitter", 0.0))
}


def arms(lab: Lab) -> Arms:
    """The config of each arm, by seed."""
    return {
        BYOV: partial(lab.config, "byov"),
        NEGATIVES: partial(lab.config, "byov", changes={"objective.name": "byol_negatives"}),
        WEAK: partial(lab.config, "byov", changes=WEAK_VIEWS),
        LABELS: partial(lab.config, "supervised-bbb"),
    }


def runs(lab: Lab) -> list[Config]:
    return [make(seed) for seed in range(lab.seeds) for make in arms(lab).values()]


def results(lab: Lab) -> list[dict[str, Any]]:
    """Rows of `compare`, with the AUROCs of finding errors and images of another kind."""
    known, draws = arms(lab), lab.scale.draws
    sources = sources_there(OTHERS.get(lab.scale.data, ()), lab.say)

    def measure(run: Run) -> dict[str, Any]:
        return trust_measures(run, draws, sources, lab.say)

    rows = []
    for row in compare(lab, known, BYOV):
        found = lab.measured("trust", known[row["arm"]](row["seed"]), measure, trust_settings(draws, sources))
        rows.append(row | {key: value for key, value in found.items() if key != "settings"})
    return rows


CLAIMS = [
    Claim(
        where="BYOL talk, what prevents collapse",
        says="Explicit negatives, here untuned, hardly change the accuracy (said of BYOL; here of BYOV).",
        paper="72.7 against 72.5 top-1",
        unit="points of top-1",
        size=1.0,  # five times the talk's difference: what is smaller no one would choose an objective for
        effects=lambda rows: effects(rows, NEGATIVES, "top1"),
        equal=True,
    ),
]


def draw(rows: list[dict[str, Any]], scale: str) -> Figure:
    """Errors found, other images found, ECE and sigma, an arm a row."""
    drawn = [row for row in rows if row["at"] == "draws"]
    labels = list(dict.fromkeys(row["arm"] for row in drawn))

    def values(key: str, factor: float = 1) -> dict[str, list[float]]:
        found = {arm: [row.get(key) for row in drawn if row["arm"] == arm] for arm in labels}
        return {arm: [factor * value for value in each if value is not None] for arm, each in found.items()}

    sources = list(dict.fromkeys(key.split(".")[1] for row in drawn for key in row if key.startswith("ood.")))
    names = {"label_free": "label-free score", "probe": "probe over draws"}
    panels: list[tuple[str, dict[str, dict[str, list[float]]]]] = [
        ("top-1 over draws (%)", {"": values("top1", 100)}),
        ("AUROC, errors", {names[score]: values(f"errors.{score}") for score in SCORES}),
        *((f"AUROC, {source}", {names[s]: values(f"ood.{source}.{s}") for s in SCORES}) for source in sources),
        ("ECE over draws (points)", {"": values("ece", 100)}),
        ("median sigma", {"": values("median_sigma")}),
    ]
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(2 + 1.8 * len(panels), 2.4), layout="constrained")
        all_axes = figure.subplots(1, len(panels), sharey=True)
        for axes, (label, series) in zip(all_axes, panels, strict=True):
            dots(axes, series, labels)
            axes.set_xlabel(label)
        handles, texts = all_axes[1].get_legend_handles_labels()
        figure.legend(handles, texts, loc="outside upper right", ncols=2, fontsize=7)
        figure.suptitle(f"Uncertainty when the objective changes ({scale}): dots are seeds", x=0.02, ha="left")
        return figure
