"""Plots over seeds: bands, dots and layers, from rows made by hand."""

from __future__ import annotations

import io
import math
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure

from byov.report.plots.seed_plots import HEADS, LOOKS, dots, draw_band, layer_figure, layer_style

LAYERS = ("encoder.stem.weight", "encoder.norm.weight", "projector.0.weight", "predictor.0.weight")


def test_the_line_is_the_mean_and_the_band_the_range() -> None:
    rows = [{"x": x, "y": y} for x, ys in ((2, (0.4, 0.6)), (1, (0.1, 0.3)), (3, (None,))) for y in ys]
    axes = Figure().subplots()
    draw_band(axes, rows, "x", "y", 100, label="ours", **LOOKS[0])
    (line,) = axes.lines
    assert np.allclose(line.get_xydata(), [(1, 20), (2, 50)]) and line.get_label() == "ours"
    corners = axes.collections[0].get_paths()[0].vertices
    assert {(x, round(y)) for x, y in corners.tolist()} == {(1, 10), (1, 30), (2, 40), (2, 60)}


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


def rows(factors: tuple[float, ...] = (1.0, 4.0)) -> list[dict[str, Any]]:
    """Two settings, a seed for each factor, three epochs; SNR is 0 at the start."""
    return [
        {
            "setting": setting,
            "seed": seed,
            "layer": layer,
            "epoch": epoch,
            **{f"sigma_{s}": factor * (1 + i) for s in ("mean", "max")},
            **{f"snr_{s}": factor * epoch * (1 + i) for s in ("mean", "max")},
        }
        for setting in ("a", "b")
        for seed, factor in enumerate(factors)
        for i, layer in enumerate(LAYERS)
        for epoch in range(3)
    ]


def test_the_encoder_runs_from_dark_to_light_and_heads_have_their_own_dash() -> None:
    style = layer_style(LAYERS)
    dark, light = (sum(style[layer][0][:3]) for layer in LAYERS[:2])
    assert dark < light
    assert style[LAYERS[2]] == HEADS["projector"] and style[LAYERS[3]] == HEADS["predictor"]
    assert len({dash for _, dash in style.values()}) == 3


def test_lines_are_geometric_means_over_seeds_in_panels_that_share_their_axis() -> None:
    figure = layer_figure(rows(), "setting", {"a": "A", "b": "B"}, ("sigma", "snr"))
    assert len(figure.axes) == 8  # mean and max; sigma of a, of b; SNR of a, of b
    assert [axes.get_title() for axes in figure.axes[:4]] == ["A", "B", "A", "B"]
    sigma, _, snr, snr_b = figure.axes[:4]
    assert len(sigma.lines) == len(LAYERS)
    assert sigma.lines[1].get_ydata() == pytest.approx(2 * np.ones(3) * math.sqrt(4))
    assert list(snr.lines[0].get_xdata()) == [1, 2]  # a logarithm has no place for the 0 at the start
    assert sigma.get_yscale() == "log" and snr.get_ylim() == snr_b.get_ylim() != sigma.get_ylim()
    figure.savefig(io.BytesIO(), format="png")  # it can be laid out


def test_a_setting_that_lacks_runs_leaves_its_panel_empty() -> None:
    figure = layer_figure([row for row in rows() if row["setting"] == "a"], "setting", {"a": "A", "b": "B"}, ("snr",))
    assert [len(axes.lines) for axes in figure.axes] == [4, 0, 4, 0]
