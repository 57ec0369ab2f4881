"""Does the uncertainty depend on the objective? BYOV as it is, with negatives, with weak views, and with labels.

The second of the next checks in the reader's summary. Weak views make the task almost trivial: crops of at least 90% of
the image and no colour jitter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import matplotlib as mpl
from matplotlib.figure import Figure

from byov._core.callbacks import Say
from byov.config import Config
from byov.evaluation.measures import OOD_IMAGES, errors_of, ood_images
from byov.evaluation.predictive import LABEL_FREE, Drawn, Scores, pass_draws
from byov.evaluation.probe import plain_name, subject_of
from byov.inference.run import ReferenceSet, Run
from byov.metrics import auroc, ood_detection
from byov.report.plots.seed_plots import STYLE, dots
from byov.scoring.scores import DEFAULT
from byov.studies.framework.claims import Claim, Row, Rows, select
from byov.studies.framework.compare import Arms, compare, configs_of, effects
from byov.studies.framework.lab import Lab

TITLE = "uncertainty when the objective changes: negatives, weak views, labels"
SCORES = {"label_free": "label-free score", "probe": "probe over draws"}
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
    return configs_of(lab, arms(lab))


def results(lab: Lab) -> Rows:
    """Rows of `compare`, with the AUROCs of misclassification and OOD detection."""
    known, draws, sources = arms(lab), lab.scale.draws, lab.ood_sources()
    settings = {"draws": draws, "score": DEFAULT, "ood": sources, "ood_images": OOD_IMAGES}
    measure = partial(detection_measures, draws=draws, ood=sources, say=lab.say)
    rows = []
    for row in compare(lab, known, BYOV):
        found = lab.measured("trust", known[row["arm"]](row["seed"]), measure, settings)
        rows.append(row | {key: value for key, value in found.items() if key != "settings"})
    return rows


def detection_measures(run: Run, draws: int, ood: Sequence[str], say: Say) -> Row:
    """Measure how well the uncertainty over draws detects errors and OOD images.

    `errors.SCORE` and `ood.SOURCE.SCORE` are AUROCs. Scores are the run's own, without labels, and one minus the top
    probability over draws.
    """
    subject = replace(subject_of(run, say=say), reference=ReferenceSet(run))
    inside = pass_draws(subject, subject.test_images, draws, "draws")
    scores, wrong = _scores(inside), errors_of(inside.aligned.mean, subject.data.test_labels)
    found: Row = {f"errors.{name}": auroc(score, wrong) for name, score in scores.items()}
    for spec in ood:
        outside = _scores(pass_draws(subject, ood_images(subject, spec, say), draws, spec))
        for name, score in outside.items():
            found[f"ood.{plain_name(spec)}.{name}"] = ood_detection(scores[name], score).auroc
    return found


def _scores(drawn: Drawn) -> Scores:
    scores = drawn.scores()
    return dict(zip(SCORES, (scores[LABEL_FREE + DEFAULT], scores["draws_max_softmax"]), strict=True))


# -------------------------------------------------------------------------------------------------------------- claims

CLAIMS = [
    Claim(
        where="BYOL talk, what prevents collapse",
        says="Explicit negatives, here untuned, hardly change the accuracy (said of BYOL; here of BYOV).",
        paper="72.7 against 72.5 top-1",
        unit="points of top-1",
        size=1.0,  # five times the talk's difference: a smaller one would not decide the choice of an objective
        effects=lambda rows: effects(rows, NEGATIVES, "top1"),
        equal=True,
    ),
]


# -------------------------------------------------------------------------------------------------------------- figure


def draw(rows: Rows, scale: str) -> Figure:
    """Misclassification detection, OOD detection, ECE and sigma, one row per arm."""
    drawn = select(rows, at="draws")
    labels = list(dict.fromkeys(row["arm"] for row in drawn))

    def values(key: str, factor: float = 1) -> dict[str, list[float]]:
        found = {arm: [row.get(key) for row in select(drawn, arm=arm)] for arm in labels}
        return {arm: [factor * value for value in each if value is not None] for arm, each in found.items()}

    sources = list(dict.fromkeys(key.split(".")[1] for row in drawn for key in row if key.startswith("ood.")))
    panels: list[tuple[str, dict[str, dict[str, list[float]]]]] = [
        ("top-1 over draws (%)", {"": values("top1", 100)}),
        ("AUROC, errors", {label: values(f"errors.{score}") for score, label in SCORES.items()}),
        *(
            (f"AUROC, {source}", {label: values(f"ood.{source}.{score}") for score, label in SCORES.items()})
            for source in sources
        ),
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
