"""Sections about training: the loss and its terms, the monitors, and sigma and SNR of the weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from markupsafe import Markup

from byov.report.elements import Picture, Section
from byov.report.plots import svg_charts
from byov.report.plots.svg_charts import Line
from byov.report.run_data import Run, finite

# ---------------------------------------------------------------------------------------------------- loss and monitors


@dataclass(frozen=True)
class Panel:
    """A curve over training, and how to read it."""

    key: str
    title: str
    note: str
    more: tuple[str, ...] = ()
    """More columns in the same panel, drawn thin."""


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
    Panel("tau", "τ", "Decay of the teacher's moving average; at 1 the teacher does not move."),
    Panel("lr", "Learning rates", "Of the means; thin: of the log-variances.", ("log_variance_lr",)),
    Panel("grad_norm", "Gradient norm", "Of the means, before clipping. Spikes are unstable steps."),
)
MONITORS = (
    Panel(
        "feature_std",
        "Feature spread",
        "Of the directions of the encoder's features. 1: they fill the sphere; falling to 0: all images are the same.",
    ),
    Panel(
        "projection_std", "Projection spread", "The same after the projector. Near 1 is healthy; at 0 it has collapsed."
    ),
    Panel("effective_rank", "Effective rank", "Dimensions that the features actually use. Near 1: collapse to a line."),
    Panel("teacher_moved", "Teacher moved", "How far a step moves the teacher. It shrinks to 0 as τ goes to 1."),
    Panel(
        "knn",
        "Online kNN",
        "Accuracy of a nearest-neighbour vote, without a probe. It should rise above that of the untrained encoder.",
    ),
    Panel(
        "images_per_second",
        "Throughput",
        "Images per second. Dips are checkpoints, kNN checks, or another job on the machine.",
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
        "Early signs of a run that goes wrong.",
        [picture for panel in MONITORS if (picture := _curve_picture(runs, panel))],
        empty="No monitor has been logged yet.",
    )


def _curve_picture(runs: Sequence[Run], panel: Panel) -> Picture | None:
    """The panel's figure, or None if no run logged it."""
    lines = []
    for i, run in enumerate(runs):
        for key in (panel.key, *panel.more):
            x, y = _kl_in_loss(run) if key == "kl_in_loss" else run.curve(key)
            if x and any(y):  # a column of zeros, such as the KL without random weights, is not shown
                lines.append(Line(x, y, i, thin=key != panel.key))
    if not lines:
        return None
    return Picture(panel.title, panel.note, Markup(svg_charts.curves(lines, panel.key, marked=panel.key == "knn")))


def _kl_in_loss(run: Run) -> tuple[list[float], list[float]]:
    rows = [row for row in run.metrics if all(finite(row.get(key)) for key in ("epoch", "loss", "nll", "kl"))]
    return [row["epoch"] for row in rows], [row["loss"] - row["nll"] if row["kl"] else 0.0 for row in rows]


# ------------------------------------------------------------------------------------------------------------ posterior


def posterior_section(runs: Sequence[Run]) -> Section:
    pictures = []
    for quantity, title, note in (
        ("sigma", "σ of the weights", "Strong: mean over all random weights. Thin: the largest of any weight."),
        (
            "snr",
            "Signal to noise of the weights",
            "|mean| / σ. Strong: mean over all random weights. Thin: the largest.",
        ),
    ):
        lines = []
        for i, run in enumerate(runs):
            epochs, mean, largest = _over_layers(run, quantity)
            lines += [Line(epochs, mean, i), Line(epochs, largest, i, thin=True)] if epochs else []
        if lines:
            pictures.append(Picture(title, note, Markup(svg_charts.curves(lines, quantity))))
    for i, run in enumerate(runs):
        if run.posterior:
            note = "One row per layer, from the input at the top to the output at the bottom. Blank: 0 or not logged."
            pictures.append(
                Picture(f"{run.name}: layer by layer", note, Markup(_heat_maps(run, f"heat-{i}")), wide=True)
            )
    return Section(
        "Posterior",
        "posterior",
        "How certain the run is of its weights, over training. Layers with a low signal to noise can be pruned first.",
        pictures,
        empty="None of these runs has random weights, or none has finished an epoch: there is no sigma to show.",
    )


def _over_layers(run: Run, quantity: str) -> tuple[list[float], list[float], list[float]]:
    """Epochs, the mean over all weights and the maximum, of sigma or SNR."""
    names = (f"{quantity}_mean", f"{quantity}_max", "weights")
    rows = [row for row in run.posterior if all(finite(row.get(name)) for name in names)]
    epochs = sorted({float(row["epoch"]) for row in rows})
    mean, largest = [], []
    for epoch in epochs:
        layers = [row for row in rows if row["epoch"] == epoch]
        count = sum(row["weights"] for row in layers) or 1
        mean.append(sum(row["weights"] * row[f"{quantity}_mean"] for row in layers) / count)
        largest.append(max(row[f"{quantity}_max"] for row in layers))
    return epochs, mean, largest


def _heat_maps(run: Run, salt: str) -> str:
    layers = list(dict.fromkeys(str(row["layer"]) for row in run.posterior))
    epochs = sorted({float(row["epoch"]) for row in run.posterior})
    row_of, column_of = ({key: i for i, key in enumerate(keys)} for keys in (layers, epochs))
    maps = []
    for key, label in (("sigma_mean", "mean σ"), ("snr_mean", "mean signal to noise")):
        values = np.full((len(layers), len(epochs)), np.nan)
        for row in run.posterior:
            if finite(row.get(key)):
                values[row_of[str(row["layer"])], column_of[float(row["epoch"])]] = row[key]
        maps.append((label, values))
    return svg_charts.heat_maps(layers, epochs, maps, salt)
