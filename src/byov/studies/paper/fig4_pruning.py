"""Figure 4, left: pruning by signal-to-noise ratio against pruning by magnitude, without retraining.

All scores are compared at the same sparsities and on the same test images, through the probe of the unpruned encoder.
"byol" is the deterministic baseline, which can be pruned by magnitude only. Scores rank weights by their means, so each
row also has the correlation of these with where they started.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import matplotlib as mpl
from matplotlib.figure import Figure
from torch import Tensor

from byov.config import Config
from byov.evaluation.probe import Subject, subject_of
from byov.inference.run import Run
from byov.metrics.resampling import RESAMPLES
from byov.pruning.criteria import By, Pruning, choose_masks
from byov.pruning.prune import pruned_subject, top1_and_ece
from byov.report.plots.seed_plots import LOOKS, draw_band
from byov.studies.framework.claims import (
    NO_NUMBER,
    Claim,
    Effect,
    Effects,
    Rows,
    best_of_other_seeds,
    differences,
    select,
)
from byov.studies.framework.lab import Lab
from byov.studies.measurements.pruned import room_above, start_caveats, start_of, top1_difference

TITLE = "Figure 4, left: pruning by SNR and by magnitude, layer by layer, without retraining"
SPARSITIES = (0.0, 0.25, 0.5, 0.6, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95)  # four have a counterpart that is .25 higher
HALF = 0.5  # the sparsity to judge at, fixed beforehand: SNR was ahead there in a first trial on Fashion-MNIST
SPARSER = 0.25  # "with a 25% sparser model" (1.1)
SCORES: tuple[By, ...] = ("snr", "magnitude", "variance", "random")
REFITTED = ("snr", "magnitude", "byol")  # the others only show what each part of SNR contributes
ARMS = {
    "snr": "BYOV, by SNR",
    "magnitude": "BYOV, by magnitude",
    "byol": "BYOL, by magnitude",
    "variance": "BYOV, by variance alone",
    "random": "BYOV, at random",
}


def runs(lab: Lab) -> list[Config]:
    return lab.configs("byov", "byol")


def results(lab: Lab) -> Rows:
    """A row for each seed, arm and sparsity; differences are SNR's accuracy minus the arm's."""
    measure = partial(compare_pruning, sparsities=SPARSITIES)
    settings = {"sparsities": SPARSITIES, "resamples": RESAMPLES}
    return [
        row
        for config in lab.configs("byov")
        for row in lab.measured_rows("fig4-pruning", config, measure, settings, lab.config("byol", config.seed))
    ]


# --------------------------------------------------------------------------------------------------------- measurement


class Pruned(NamedTuple):
    """Class probabilities (images, classes) of a pruned encoder."""

    kept: Tensor
    """Through the probe of the unpruned encoder."""
    refitted: Tensor | None
    """Through a refitted probe."""


Curve = dict[float, Pruned]
"""By sparsity."""


def compare_pruning(run: Run, baseline: Run, sparsities: Sequence[float]) -> Rows:
    """Return a row for each arm (a score, or "byol") and sparsity.

    `top1.difference`: SNR's accuracy at this sparsity minus this arm's; `sparser.difference`: SNR's at a sparsity that
    is .25 higher minus this arm's (None where that is not measured). `.error`: standard error over images.
    `start_correlation`: of the arm's weights with their start.
    """
    subject = subject_of(run)
    labels = subject.data.test_labels
    arms: dict[str, Curve] = {by: pruning_curve(subject, by, sparsities, by in REFITTED) for by in SCORES}
    arms["byol"] = pruning_curve(subject_of(baseline), "magnitude", sparsities, "byol" in REFITTED)
    starts, rows = {arm: start_of(baseline if arm == "byol" else run) for arm in ("byol", "snr")}, []
    for arm, curve in arms.items():
        for sparsity, pruned in curve.items():
            row = {"arm": arm, "sparsity": sparsity, **top1_and_ece(pruned.kept, labels)}
            none = {"refitted.top1": None, "refitted.ece": None}
            row |= none if pruned.refitted is None else top1_and_ece(pruned.refitted, labels, "refitted.")
            row |= starts["byol" if arm == "byol" else "snr"]
            sparser = arms["snr"].get(round(sparsity + SPARSER, 6))
            row |= top1_difference("top1", arms["snr"][sparsity].kept, pruned.kept, labels)
            row |= top1_difference("sparser", sparser and sparser.kept, pruned.kept, labels)
            rows.append(row)
    return rows


def pruning_curve(subject: Subject, by: By, sparsities: Sequence[float], refit: bool = False) -> Curve:
    """Predict the test images without the weights of each layer that score lowest."""
    run, found = subject.run, {}
    for sparsity in sparsities:
        pruned = subject
        if sparsity > 0:
            how = Pruning(by, sparsity, seed=run.config.seed)
            pruned = pruned_subject(subject, choose_masks(run.learner.posterior, how, sparsity, {}))
        refitted = pruned.probe.probabilities(pruned.test_features) if refit else None
        found[sparsity] = Pruned(subject.probe.probabilities(pruned.test_features), refitted)
    return found


# -------------------------------------------------------------------------------------------------------------- claims


def _at_half(rows: Rows, arm: str) -> list[Effect]:
    """SNR minus an arm with half of the weights, in points."""
    return differences(rows, "top1", arm=arm, sparsity=HALF)


def largest(rows: Rows, which: str = "top1") -> list[Effect]:
    """SNR minus magnitude where it is largest: for each seed at the sparsity where it is for the other seeds."""
    known = [row for row in rows if row["sparsity"] > 0 and row[f"{which}.difference"] is not None]
    pruned = select(known, arm="magnitude")
    sparsities = dict.fromkeys(row["sparsity"] for row in pruned)
    return best_of_other_seeds(differences(pruned, which, sparsity=sparsity) for sparsity in sparsities)


def _room(arm: str, which: str = "top1", sparsity: float | None = None) -> Effects:
    """Make the rule for the room above an arm at a sparsity, or where it is largest: SNR pruning is no gain itself."""

    def rule(rows: Rows) -> list[Effect]:
        known = select([row for row in rows if row[f"{which}.difference"] is not None], arm=arm)
        pruned = [row for row in known if (row["sparsity"] > 0 if sparsity is None else row["sparsity"] == sparsity)]
        return room_above(pruned, select(rows, arm="snr", sparsity=0.0))

    return rule


CLAIMS = [
    Claim(where, says, paper, "points of top-1", size, effects, room=room, caveats=start_caveats)
    for where, says, paper, size, effects, room in (
        (
            "1.1, 4.4, Figure 4",
            "Pruning by SNR is up to 12 points more accurate than by magnitude (at the sparsity where the other seeds "
            "have the largest difference).",
            "up to 12",
            12.0,
            largest,
            _room("magnitude"),
        ),
        (
            "1.1, 4.4, Figure 4",
            "Up to 12 points better with a model that is 25% sparser: SNR at sparsity s + 0.25 against magnitude at s "
            "(at the s where the other seeds have the largest difference).",
            "12 with 25% sparser",
            12.0,
            partial(largest, which="sparser"),
            _room("magnitude", "sparser"),
        ),
        (
            "4.4, Figure 4",
            "At half of the weights, pruning by SNR keeps more accuracy than by magnitude.",
            NO_NUMBER,
            1.0,  # less would not justify storing variances; a fair baseline differs by about as much over seeds
            partial(_at_half, arm="magnitude"),
            _room("magnitude", sparsity=HALF),
        ),
        (
            "4.4, Figure 4 (read as: against the deterministic model)",
            "At half of the weights, BYOV pruned by SNR is more accurate than BYOL pruned by magnitude.",
            NO_NUMBER,
            1.0,
            partial(_at_half, arm="byol"),
            _room("byol", sparsity=HALF),
        ),
        (
            "4.4: SNR because performance may not depend on a weight's scale",
            "At half of the weights, pruning by SNR keeps more accuracy than by the variance alone.",
            NO_NUMBER,
            1.0,
            partial(_at_half, arm="variance"),
            _room("variance", sparsity=HALF),
        ),
    )
]


# -------------------------------------------------------------------------------------------------------------- figure


def draw(rows: Rows, scale: str) -> Figure:
    """Accuracy over sparsity, by the probe of the unpruned encoder and by a refitted one; bands: range over seeds."""
    with mpl.rc_context({"font.size": 9, "axes.grid": True, "grid.alpha": 0.4}):
        figure = Figure(figsize=(8, 3.6), layout="constrained")
        kept, refitted = figure.subplots(1, 2)
        for (arm, label), look in zip(ARMS.items(), LOOKS, strict=True):
            mine = select(rows, arm=arm)
            draw_band(kept, mine, "sparsity", "top1", 100, label=label, **look)
            draw_band(refitted, mine, "sparsity", "refitted.top1", 100, **look)
        kept.set(title="probe of the unpruned encoder", xlabel="sparsity", ylabel="top-1 (%)")
        refitted.set(title="probe refitted", xlabel="sparsity", ylabel="top-1 (%)")
        figure.legend(loc="outside lower center", ncols=len(ARMS), frameon=False, fontsize=7)
        figure.suptitle("; ".join(start_caveats(select(rows, arm="snr"))), fontsize=8)
        return figure
