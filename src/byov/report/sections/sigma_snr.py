"""Sigma and signal to noise of the weights over training: of all together, and layer by layer."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from markupsafe import Markup

from byov.report.elements import Picture, Section
from byov.report.plots import svg_charts
from byov.report.plots.svg_charts import Line
from byov.report.run_data import Run, finite


def posterior_section(runs: Sequence[Run]) -> Section:
    """Sigma and SNR: mean and maximum over all weights, then layer by layer."""
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
            note = "One row a layer, from the input at the top to the output at the bottom. Blank: 0 or not logged."
            pictures.append(
                Picture(f"{run.name}: layer by layer", note, Markup(_heat_maps(run, f"heat-{i}")), wide=True)
            )
    return Section(
        "Posterior",
        "posterior",
        "How sure the run is of its weights, over training. Layers with a low signal to noise can be pruned first.",
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
