"""Dots stand where the values are."""

from __future__ import annotations

import numpy as np
from matplotlib.figure import Figure

from byov.report.plots.seed_dots import dots


def test_seeds_means_and_whiskers() -> None:
    axes = Figure().subplots()
    dots(axes, {"": {"a": [1.0, 3.0], "c": [5.0]}}, ["a", "b", "c"], {"a": 0.5})
    seeds, means, whisker = axes.get_lines()
    assert np.array_equal(seeds.get_xydata(), [[1, 0], [3, 0], [5, 2]])
    assert np.array_equal(means.get_xydata(), [[2, 0], [5, 2]])  # b has none
    assert np.array_equal(whisker.get_xydata(), [[1.5, 0], [2.5, 0]])
    assert [label.get_text() for label in axes.get_yticklabels()] == ["a", "b", "c"]


def test_series_stand_side_by_side() -> None:
    axes = Figure().subplots()
    dots(axes, {"x": {"a": [1.0]}, "y": {"a": [1.0]}}, ["a"])
    heights = [line.get_ydata()[0] for line in axes.get_lines()]
    assert heights == [-0.175, -0.175, 0.175, 0.175]
    assert axes.get_legend_handles_labels()[1] == ["x", "y"]
