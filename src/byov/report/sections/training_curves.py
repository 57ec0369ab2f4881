"""Curves over training: the loss and its terms, and the monitors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from byov.report.elements import Picture, Section
from byov.report.plots import svg_charts
from byov.report.plots.svg_charts import Line
from byov.report.run_data import Run, finite


@dataclass(frozen=True)
class Panel:
    """A curve over training and how to read it."""

    key: str
    title: str
    note: str
    more: tuple[str, ...] = ()
    """Further columns in the same panel, drawn thin."""


TRAINING = (
    Panel("loss", "Loss", "What is minimised: the data term plus the weighted KL."),
    Panel(
        "nll",
        "Data term",
        "Student against teacher, both directions: 0 is equal, 4 unrelated. Supervised: cross-entropy.",
    ),
    Panel("kl", "KL to the prior", "Summed over the random weights, before it is weighted."),
    Panel(
        "kl_in_loss",
        "KL's share of the loss",
        "Loss minus data term: what the KL weighs after β and temperature.",
    ),
    Panel("beta", "β", "Weight of the KL over training."),
    Panel("tau", "τ", "Decay of the teacher's moving average; at 1 the teacher stands still."),
    Panel("lr", "Learning rates", "Of the means; thin: of the log-variances.", ("log_variance_lr",)),
    Panel("grad_norm", "Gradient norm", "Of the means, before clipping. Spikes are unstable steps."),
)
MONITORS = (
    Panel(
        "feature_std",
        "Feature spread",
        "Of the directions of the encoder's features. 1: they fill the sphere; falling to 0: all images look alike.",
    ),
    Panel(
        "projection_std", "Projection spread", "The same after the projector. Near 1 is healthy; at 0 it has collapsed."
    ),
    Panel("effective_rank", "Effective rank", "Dimensions the features really use. Near 1: collapse to a line."),
    Panel("teacher_moved", "Teacher moved", "How far a step moves the teacher. It shrinks to 0 as τ goes to 1."),
    Panel(
        "knn",
        "Online kNN",
        "Accuracy of a nearest-neighbour vote, with no training. It should rise, and above the untrained.",
    ),
    Panel(
        "images_per_second",
        "Throughput",
        "Images a second. Dips are checkpoints, kNN checks, or another job on the machine.",
    ),
    Panel("memory_mib", "Memory", "MiB of the process. It should be flat; a slope is a leak."),
)


def training_section(runs: Sequence[Run]) -> Section:
    return Section(
        "Training",
        "training",
        "Faint: as logged. Strong: local mean.",
        [picture for panel in TRAINING if (picture := _curve_picture(runs, panel))],
        empty="No training curve has been logged yet.",
    )


def monitor_section(runs: Sequence[Run]) -> Section:
    return Section(
        "Monitors",
        "monitors",
        "What would show early that a run goes wrong.",
        [picture for panel in MONITORS if (picture := _curve_picture(runs, panel))],
        empty="No monitor has been logged yet.",
    )


def _curve_picture(runs: Sequence[Run], panel: Panel) -> Picture | None:
    """The panel's figure, or None where no run logged it."""
    lines = []
    for i, run in enumerate(runs):
        for key in (panel.key, *panel.more):
            x, y = _kl_in_loss(run) if key == "kl_in_loss" else run.curve(key)
            if x and any(y):  # a column of zeros (a KL without random weights) says nothing
                lines.append(Line(x, y, i, thin=key != panel.key))
    if not lines:
        return None
    return Picture(panel.title, panel.note, Markup(svg_charts.curves(lines, panel.key, marked=panel.key == "knn")))


def _kl_in_loss(run: Run) -> tuple[list[float], list[float]]:
    rows = [row for row in run.metrics if all(finite(row.get(key)) for key in ("epoch", "loss", "nll", "kl"))]
    return [row["epoch"] for row in rows], [row["loss"] - row["nll"] if row["kl"] else 0.0 for row in rows]
