"""Layers over training: a thin line for each, coloured by depth; mean above, maximum below, one column a setting."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from byov.report.plots.palette import PURPLE, VERMILION

Row = Mapping[str, Any]
Style = tuple[Any, Any]
"""Colour and dash."""
HEADS: dict[str, Style] = {"projector": (VERMILION, "--"), "predictor": (PURPLE, ":")}
ENCODER = mpl.colormaps["cividis"]
SYMBOLS = {"sigma": "σ", "snr": "SNR"}


def layer_style(layers: Sequence[str]) -> dict[str, Style]:
    """Colour and dash of each layer: the encoder's from first (dark) to last (light), the heads' by name."""
    encoder = [layer for layer in layers if layer.split(".")[0] not in HEADS]
    depth = {layer: i / max(1, len(encoder) - 1) for i, layer in enumerate(encoder)}
    return {
        layer: HEADS[layer.split(".")[0]] if layer not in depth else (ENCODER(0.95 * depth[layer]), "-")
        for layer in layers
    }


def layer_figure(rows: Sequence[Row], by: str, titles: Mapping[Any, str], measures: Sequence[str]) -> Figure:
    """A block of panels for each measure (`sigma`, `snr`), and in it a column for each value of the column `by`.

    Rows hold layer, epoch, seed and `MEASURE_mean`, `MEASURE_max`. Lines are geometric means over seeds, bands their
    range. Panels of one block and row share their axis, which is logarithmic.
    """
    across = len(measures) * len(titles)
    with mpl.rc_context({"font.size": 8, "axes.grid": True, "grid.alpha": 0.3, "grid.linewidth": 0.5}):
        figure = Figure(figsize=(1 + 1.75 * across, 4.4), layout="constrained")
        panels = figure.subplots(2, across, sharex=True, squeeze=False)
        for line, statistic in enumerate(("mean", "max")):
            for i, measure in enumerate(measures):
                block = list(panels[line, i * len(titles) : (i + 1) * len(titles)])
                _draw_block(block, rows, by, titles, f"{measure}_{statistic}")
                block[0].set_ylabel(f"{statistic} of {SYMBOLS[measure]} in a layer")
        for axes, title in zip(panels[0], [*titles.values()] * len(measures), strict=True):
            axes.set_title(title, fontsize=8)
        for axes in panels[1]:
            axes.set_xlabel("epoch")
        figure.legend(handles=_legend(rows), loc="outside lower center", ncols=5, frameon=False)
        return figure


def _draw_block(block: Sequence[Axes], rows: Sequence[Row], by: str, titles: Mapping[Any, str], key: str) -> None:
    for axes, value in zip(block, titles, strict=True):
        if axes is not block[0]:
            axes.sharey(block[0])
            axes.tick_params(which="both", labelleft=False)
        _draw_layers(axes, [row for row in rows if row[by] == value], key)
    block[0].set_yscale("log")


def _draw_layers(axes: Axes, rows: Sequence[Row], key: str) -> None:
    for layer, (colour, dash) in layer_style(_layers(rows)).items():
        epochs, values = _over_seeds([row for row in rows if row["layer"] == layer], key)
        if not epochs:
            continue
        axes.fill_between(epochs, values.min(axis=1), values.max(axis=1), color=colour, alpha=0.12, linewidth=0)
        centre = np.exp(np.log(values).mean(axis=1))
        axes.plot(epochs, centre, color=colour, linestyle=dash, linewidth=1.1 if dash != "-" else 0.8)


def _over_seeds(rows: Sequence[Row], key: str) -> tuple[list[float], np.ndarray[Any, Any]]:
    """Epochs, and values (epoch, seed); epochs with a 0, which a logarithm cannot show, are left out."""
    found: dict[float, list[float]] = {}
    for row in rows:
        found.setdefault(row["epoch"], []).append(row[key])
    shown = {epoch: values for epoch, values in sorted(found.items()) if min(values) > 0}
    return list(shown), np.array(list(shown.values()))


def _layers(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(row["layer"] for row in rows))


def _legend(rows: Sequence[Row]) -> list[Line2D]:
    """A sample of the encoder's colours, and those of the heads that are there."""
    ends = (("encoder, first layer", 0), ("encoder, last", 1))
    styles: dict[str, Style] = {name: (ENCODER(0.95 * at), "-") for name, at in ends}
    parts = {layer.split(".")[0] for layer in _layers(rows)}
    styles |= {name: style for name, style in HEADS.items() if name in parts}
    return [Line2D([], [], color=colour, linestyle=dash, label=name) for name, (colour, dash) in styles.items()]
