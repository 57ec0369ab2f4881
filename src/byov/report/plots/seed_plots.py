"""Plots over seeds for the studies: bands, dots, and layers over training, in one palette."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import mean
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

# The palette of Okabe and Ito, safe for colour-blind readers
BLUE, VERMILION, GREEN, PURPLE = "#0072B2", "#D55E00", "#009E73", "#CC79A7"
ORANGE, SKY, BLACK = "#E69F00", "#56B4E9", "#000000"


# ---------------------------------------------------------------------------------------------------------------- bands


# Lines also differ in dash and marker
LOOKS: tuple[dict[str, Any], ...] = (
    {"color": BLUE, "linestyle": "-", "marker": "o"},
    {"color": VERMILION, "linestyle": "--", "marker": "s"},
    {"color": GREEN, "linestyle": "-.", "marker": "^"},
    {"color": PURPLE, "linestyle": ":", "marker": "D"},
    {"color": "#444444", "linestyle": (0, (5, 1, 1, 1, 1, 1)), "marker": "v"},
)


def draw_band(axes: Axes, rows: Sequence[Mapping[str, Any]], x: str, y: str, scale: float = 1.0, **look: Any) -> None:
    """Draw the mean of column y at each value of column x, and the range over the rows (the seeds) there.

    Rows without a value are left out.
    """
    rows = [row for row in rows if row[y] is not None]
    points = sorted({row[x] for row in rows})
    values = [[scale * row[y] for row in rows if row[x] == point] for point in points]
    axes.plot(points, [mean(of) for of in values], linewidth=1.4, markersize=3.5, **look)
    axes.fill_between(points, [min(of) for of in values], [max(of) for of in values], color=look["color"], alpha=0.15)


# ----------------------------------------------------------------------------------------------------------------- dots


COLOURS = (BLUE, VERMILION, GREEN, PURPLE, ORANGE, SKY, BLACK)
MARKERS = "osD^vP*"
STYLE: dict[Any, Any] = {"font.size": 8, "axes.grid": True, "grid.alpha": 0.35, "axes.axisbelow": True}


def dots(
    axes: Axes,
    series: Mapping[str, Mapping[str, Sequence[float]]],
    labels: Sequence[str],
    errors: Mapping[str, float] | None = None,
) -> None:
    """Draw values by series and row: a small dot per seed and a large one for their mean.

    `errors` are half lengths of whiskers by row, for a single series. Rows without values are left empty.
    """
    for i, (name, values) in enumerate(series.items()):
        shift = (i - (len(series) - 1) / 2) * 0.7 / len(series)
        style: dict[str, Any] = {"color": COLOURS[i % len(COLOURS)], "marker": MARKERS[i % len(MARKERS)]}
        places = [(row + shift, list(values.get(label, ()))) for row, label in enumerate(labels)]
        places = [(y, found) for y, found in places if found]
        axes.plot(
            [v for _, found in places for v in found],
            [y for y, found in places for _ in found],
            linestyle="",
            markersize=3,
            alpha=0.4,
            **style,
        )
        at = [(y, mean(found)) for y, found in places]
        axes.plot([x for _, x in at], [y for y, _ in at], linestyle="", markersize=6, label=name, **style)
        for label, half in (errors or {}).items():
            x = mean(values[label])
            y = labels.index(label) + shift
            axes.plot([x - half, x + half], [y, y], color=style["color"], linewidth=1.2)
    axes.set_yticks(range(len(labels)), labels)
    axes.set_ylim(len(labels) - 0.5, -0.5)


# --------------------------------------------------------------------------------------------------------------- layers


Row = Mapping[str, Any]
Style = tuple[Any, Any]
"""Colour and dash."""
HEADS: dict[str, Style] = {"projector": (VERMILION, "--"), "predictor": (PURPLE, ":")}
ENCODER = mpl.colormaps["cividis"]
SYMBOLS = {"sigma": "σ", "snr": "SNR"}


def layer_style(layers: Sequence[str]) -> dict[str, Style]:
    """Choose colour and dash of each layer: encoder layers from dark (first) to light (last), heads by name."""
    encoder = [layer for layer in layers if layer.split(".")[0] not in HEADS]
    depth = {layer: i / max(1, len(encoder) - 1) for i, layer in enumerate(encoder)}
    return {
        layer: HEADS[layer.split(".")[0]] if layer not in depth else (ENCODER(0.95 * depth[layer]), "-")
        for layer in layers
    }


def layer_figure(rows: Sequence[Row], by: str, titles: Mapping[Any, str], measures: Sequence[str]) -> Figure:
    """Draw a block of panels per measure (`sigma`, `snr`), with a panel column per value of the column `by`.

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
    """Epochs, and values (epoch, seed); epochs with a 0, which has no logarithm, are left out."""
    found: dict[float, list[float]] = {}
    for row in rows:
        found.setdefault(row["epoch"], []).append(row[key])
    shown = {epoch: values for epoch, values in sorted(found.items()) if min(values) > 0}
    return list(shown), np.array(list(shown.values()))


def _layers(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(row["layer"] for row in rows))


def _legend(rows: Sequence[Row]) -> list[Line2D]:
    """Both ends of the encoder's colours, and the colours of the heads in the rows."""
    ends = (("encoder, first layer", 0), ("encoder, last", 1))
    styles: dict[str, Style] = {name: (ENCODER(0.95 * at), "-") for name, at in ends}
    parts = {layer.split(".")[0] for layer in _layers(rows)}
    styles |= {name: style for name, style in HEADS.items() if name in parts}
    return [Line2D([], [], color=colour, linestyle=dash, label=name) for name, (colour, dash) in styles.items()]
