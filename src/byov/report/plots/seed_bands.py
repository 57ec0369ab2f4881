"""Lines over seeds: the mean, and the range behind it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import mean
from typing import Any

from matplotlib.axes import Axes

from byov.report.plots.palette import BLUE, GREEN, PURPLE, VERMILION

# Dashes and markers tell the lines apart too
LOOKS: tuple[dict[str, Any], ...] = (
    {"color": BLUE, "linestyle": "-", "marker": "o"},
    {"color": VERMILION, "linestyle": "--", "marker": "s"},
    {"color": GREEN, "linestyle": "-.", "marker": "^"},
    {"color": PURPLE, "linestyle": ":", "marker": "D"},
    {"color": "#444444", "linestyle": (0, (5, 1, 1, 1, 1, 1)), "marker": "v"},
)


def draw_band(axes: Axes, rows: Sequence[Mapping[str, Any]], x: str, y: str, scale: float = 1.0, **look: Any) -> None:
    """A line through the means of column y at each value of column x, and the range of the rows (the seeds) there.

    Rows without a value are left out.
    """
    rows = [row for row in rows if row[y] is not None]
    points = sorted({row[x] for row in rows})
    values = [[scale * row[y] for row in rows if row[x] == point] for point in points]
    axes.plot(points, [mean(of) for of in values], linewidth=1.4, markersize=3.5, **look)
    axes.fill_between(points, [min(of) for of in values], [max(of) for of in values], color=look["color"], alpha=0.15)
