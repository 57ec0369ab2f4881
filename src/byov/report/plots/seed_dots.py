"""A picture of arms: one row each, a small dot a seed, a large one for their mean. Safe for colour-blind readers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import mean
from typing import Any

from matplotlib.axes import Axes

from byov.report.plots.palette import BLACK, BLUE, GREEN, ORANGE, PURPLE, SKY, VERMILION

COLOURS = (BLUE, VERMILION, GREEN, PURPLE, ORANGE, SKY, BLACK)
MARKERS = "osD^vP*"
STYLE: dict[Any, Any] = {"font.size": 8, "axes.grid": True, "grid.alpha": 0.35, "axes.axisbelow": True}


def dots(
    axes: Axes,
    series: Mapping[str, Mapping[str, Sequence[float]]],
    labels: Sequence[str],
    errors: Mapping[str, float] | None = None,
) -> None:
    """Draws series -> row -> a value a seed; `errors`: half a whisker for a row, where there is one series.

    Rows without values are left empty.
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
