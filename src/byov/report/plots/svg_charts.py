"""The report's figures, as SVG text for the page.

No colour is fixed here. Ink, grid and series are placeholders that become CSS variables of the page, so that a figure
is readable in a light and in a dark page. Text stays text, in the page's font. Series differ in dash as well as in
colour, and the heat maps use cividis: both are safe for colour-blind readers.
"""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm, Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, NullFormatter, PercentFormatter
from numpy.typing import NDArray

SERIES = 6  # colours of series; with more runs, they repeat
DASHES: tuple[Any, ...] = ("-", (0, (5, 2)), (0, (1.5, 1.5)), (0, (6, 2, 1.5, 2)))
CSS_DASHES = ("none", "7 3", "2 2", "8 3 2 3")  # the same in the page's legend

_INK, _GRID = "#010203", "#040506"
_PLACEHOLDERS = {_INK: "currentColor", _GRID: "var(--grid)"} | {
    f"#0a0b{i:02x}": f"var(--series-{i})" for i in range(SERIES)
}
_STYLE: dict[Any, Any] = {  # Any: matplotlib types its keys one by one
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": 9,
    "text.color": _INK,
    "axes.edgecolor": _GRID,
    "axes.labelcolor": _INK,
    "axes.facecolor": "none",
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.color": _GRID,
    "grid.linewidth": 0.6,
    "xtick.color": _GRID,
    "ytick.color": _GRID,
    "xtick.labelcolor": _INK,
    "ytick.labelcolor": _INK,
    "figure.facecolor": "none",
    "path.simplify_threshold": 0.5,
}


@dataclass(frozen=True)
class Line:
    """One line of a panel."""

    x: Sequence[float]
    y: Sequence[float]
    slot: int
    """The number of the run, which fixes colour and dash."""
    thin: bool = False
    """Drawn thin: the second of two lines of one run."""


def curves(lines: Sequence[Line], salt: str, x_label: str = "epoch", marked: bool = False) -> str:
    """Draw lines; many values are faint, with their local mean on top. Logarithmic if they span two decades."""
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(4.4, 2.5))
        # fixed margins: the axes of all cards line up, in half the time of matplotlib's layout
        axes = figure.subplots(gridspec_kw={"left": 0.12, "right": 0.985, "bottom": 0.175, "top": 0.92})
        for line in lines:
            _draw(axes, line, marked)
        if _spans_decades([value for line in lines for value in line.y]):
            axes.set_yscale("log")
            axes.yaxis.set_minor_formatter(NullFormatter())
        axes.set_xlabel(x_label)
        places = {value for line in lines for value in line.x}
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=x_label == "epoch"))
        if len(places) == 1:
            axes.set_xticks(list(places))
        return _svg(figure, salt)


def reliability(bins: Sequence[tuple[int, float, float]], slot: int, salt: str) -> str:
    """Draw a reliability diagram: the accuracy of each confidence bin, the diagonal, and the images per bin."""
    edges = np.linspace(0, 1, len(bins) + 1)
    centres, width = (edges[:-1] + edges[1:]) / 2, 1 / len(bins)
    images, confidence, accuracy = (np.array(column, dtype=float) for column in zip(*bins, strict=True))
    full = images > 0
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(4.4, 4.2), layout="constrained")
        upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(3.2, 1))
        upper.bar(centres[full], accuracy[full], 0.88 * width, color=_colour(slot), alpha=0.75)
        # where a bar would end if accuracy equalled confidence; the gap is the bin's error
        upper.hlines(
            confidence[full], centres[full] - 0.44 * width, centres[full] + 0.44 * width, color=_INK, linewidth=1.6
        )
        upper.plot([0, 1], [0, 1], color=_INK, linewidth=0.8, linestyle=(0, (4, 3)), alpha=0.6)
        upper.set(ylim=(0, 1), xlim=(0, 1), ylabel="accuracy")
        lower.bar(centres, images / images.sum(), 0.88 * width, color=_colour(slot), alpha=0.75)
        lower.set(xlabel="confidence", ylabel="images")
        lower.yaxis.set_major_locator(MaxNLocator(2))
        lower.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
        figure.align_ylabels()
        return _svg(figure, salt)


def heat_maps(
    layers: Sequence[str], epochs: Sequence[float], maps: Sequence[tuple[str, NDArray[np.float64]]], salt: str
) -> str:
    """Draw maps of layers (first at the top) by epochs, side by side, each on a separate colour scale."""
    with mpl.rc_context(_STYLE | {"axes.grid": False, "font.size": 8.5}):
        figure = Figure(figsize=(9.6, 1.1 + 0.155 * len(layers)), layout="constrained")
        panels = figure.subplots(1, len(maps), sharey=True, squeeze=False)[0]
        for axes, (label, values) in zip(panels, maps, strict=True):
            shown = np.ma.masked_invalid(np.where(values > 0, values, np.nan))
            low, high = (shown.min(), shown.max()) if shown.count() else (1.0, 1.0)
            # a logarithmic bar has no tick inside a decade
            norm = LogNorm(low, high) if high > 10 * low else Normalize(low, high if high > low else low * 1.01)
            mesh = axes.pcolormesh(
                _edges(epochs), np.arange(len(layers) + 1), shown, norm=norm, cmap="cividis", rasterized=True
            )
            bar = figure.colorbar(mesh, ax=axes, location="top", label=label, aspect=35, fraction=0.03, pad=0.01)
            bar.outline.set_visible(False)
            bar.ax.xaxis.set_minor_formatter(NullFormatter())
            if not isinstance(norm, LogNorm):
                bar.locator = MaxNLocator(4)
            axes.set(xlabel="epoch")
            axes.xaxis.set_major_locator(MaxNLocator(8, integer=True))
            axes.spines[:].set_visible(False)
            axes.tick_params(left=False)
        every = max(1, len(layers) // 90)
        panels[0].set_yticks(np.arange(0, len(layers), every) + 0.5, list(layers[::every]), fontsize=7.5)
        panels[0].invert_yaxis()
        return _svg(figure, salt)


@dataclass(frozen=True)
class CellMap:
    """Numbers in cells, and the range of their colours."""

    label: str
    values: NDArray[np.float64]
    low: float
    high: float
    better: int = 0
    """For differences: 1 if higher is better (purple), -1 if lower is better; 0: not a difference."""

    def text(self, value: float) -> str:
        digits, sign = (1 if "%" in self.label else 3), ("+" if self.better else "")
        return re.sub(r"^([+-]?)0\.(?=\d\d)", r"\1.", f"{round(value, digits) + 0.0:{sign}.{digits}f}")  # + 0.0: no -0


def cell_maps(rows: Sequence[str], columns: Sequence[str], maps: Sequence[CellMap], salt: str) -> str:
    """Draw maps of named rows by named columns, side by side, with the numbers in the cells."""
    with mpl.rc_context(_STYLE | {"axes.grid": False, "font.size": 8.5}):
        figure = Figure(figsize=(1.3 + 2.45 * len(maps), 0.8 + 0.21 * len(rows)), layout="constrained")
        panels = figure.subplots(1, len(maps), sharey=True, squeeze=False)[0]
        for axes, each in zip(panels, maps, strict=True):
            _fill_cells(axes, each)
            axes.set_xticks(np.arange(len(columns)) + 0.5, list(columns))
            axes.set_title(each.label, fontsize=9)
            axes.spines[:].set_visible(False)
            axes.tick_params(left=False, bottom=False)
        panels[0].set_yticks(np.arange(len(rows)) + 0.5, [row.replace("_", " ") for row in rows])
        panels[0].invert_yaxis()
        # few maps should not grow to fill the page, nor many shrink until they are unreadable
        least, most = (round(pixels * figure.get_figwidth()) for pixels in (78, 105))
        return _svg(figure, salt).replace("<svg", f'<svg style="min-width: {least}px; max-width: {most}px"', 1)


def _fill_cells(axes: Axes, each: CellMap) -> None:
    colours = mpl.colormaps[{0: "cividis", 1: "PuOr", -1: "PuOr_r"}[each.better]]
    norm = Normalize(each.low, each.high if each.high > each.low else each.low + 1e-9)
    axes.pcolormesh(np.ma.masked_invalid(each.values), norm=norm, cmap=colours, rasterized=True)
    for (row, column), value in np.ndenumerate(each.values):
        if np.isfinite(value):
            red, green, blue, _ = colours(norm(value))
            dark = 0.299 * red + 0.587 * green + 0.114 * blue < 0.5
            ink = "#ffffff" if dark else "#000000"
            axes.text(column + 0.5, row + 0.5, each.text(value), color=ink, ha="center", va="center", fontsize=7)


def _colour(slot: int) -> str:
    return f"#0a0b{slot % SERIES:02x}"


def _draw(axes: Axes, line: Line, marked: bool) -> None:
    x, y = np.asarray(line.x), np.asarray(line.y)
    dash = DASHES[line.slot % len(DASHES)]
    width = 0.9 if line.thin else 1.9
    if marked or len(x) <= 60:
        marker = "o" if marked or len(x) == 1 else None
        axes.plot(x, y, color=_colour(line.slot), linestyle=dash, linewidth=width, marker=marker, markersize=3.5)
        return
    every = -(-len(x) // 500)
    axes.plot(x[::every], y[::every], color=_colour(line.slot), linewidth=0.7, alpha=0.3)
    x, y = _means(x, 120), _means(y, 120)
    axes.plot(x, y, color=_colour(line.slot), linestyle=dash, linewidth=width)


def _means(values: NDArray[np.float64], pieces: int) -> NDArray[np.float64]:
    """Means over consecutive pieces of about equal length."""
    return np.array([piece.mean() for piece in np.array_split(values, min(pieces, max(1, len(values) // 3)))])


def _spans_decades(values: Sequence[float]) -> bool:
    return len(values) > 0 and min(values) > 0 and max(values) / min(values) > 100


def _edges(centres: Sequence[float]) -> NDArray[np.float64]:
    """Borders between columns with these centres."""
    c = np.asarray(centres, dtype=float)
    if len(c) == 1:
        return np.array([c[0] - 0.5, c[0] + 0.5])
    middle = (c[:-1] + c[1:]) / 2
    return np.concatenate([[c[0] - (middle[0] - c[0])], middle, [c[-1] + (c[-1] - middle[-1])]])


def _svg(figure: Figure, salt: str) -> str:
    """The figure as an <svg> element for an HTML page: unique ids, no fixed width, no external address."""
    out = io.StringIO()
    with mpl.rc_context({"svg.hashsalt": salt}):
        nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        figure.savefig(out, format="svg", metadata=nothing, dpi=144)
    text = out.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = (
        re.sub(r'\s(?:xmlns(?::\w+)?|width|height|version)="[^"]*"', "", text[: text.index(">")])
        + text[text.index(">") :]
    )
    text = text.replace("xlink:href", "href")
    text = re.sub(r'<g id="[^"]*"', "<g", text)
    for placeholder, variable in _PLACEHOLDERS.items():
        text = text.replace(placeholder, variable)
    return text
