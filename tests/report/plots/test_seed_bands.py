"""A band is the range of the seeds around the line of their means."""

import numpy as np
from matplotlib.figure import Figure

from byov.report.plots.seed_bands import LOOKS, draw_band


def test_the_line_is_the_mean_and_the_band_the_range() -> None:
    rows = [{"x": x, "y": y} for x, ys in ((2, (0.4, 0.6)), (1, (0.1, 0.3)), (3, (None,))) for y in ys]
    axes = Figure().subplots()
    draw_band(axes, rows, "x", "y", 100, label="ours", **LOOKS[0])
    (line,) = axes.lines
    assert np.allclose(line.get_xydata(), [(1, 20), (2, 50)]) and line.get_label() == "ours"
    corners = axes.collections[0].get_paths()[0].vertices
    assert {(x, round(y)) for x, y in corners.tolist()} == {(1, 10), (1, 30), (2, 40), (2, 60)}
