"""The figure of an alignment: its ellipses contain the stated share, its points are the scores."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from PIL import Image

from byov.evaluation.agreement import density
from byov.metrics import gaussian_fit
from byov.report.plots.run_figures import _panel, draw_alignment, ellipse


def results(images: int = 60, ceiling: bool = True) -> dict[str, Any]:
    """As `align` returns them."""
    g = torch.Generator().manual_seed(0)
    scatter = {name: torch.rand(2, images, generator=g).double() for name in ("run", "supervised", "second")}
    found: dict[str, Any] = {
        "scatter": {n: {"predictive_std": v[0].tolist(), "confidence": v[1].tolist()} for n, v in scatter.items()},
        "settings": {"images": images, "data": "digits", "draws": {"run": 20}},
    }
    for prefix, a, b in (("", "run", "supervised"), ("ceiling.", "supervised", "second"))[: 1 + ceiling]:
        x, y = scatter[a][0], scatter[b][0]
        fit, of = gaussian_fit(x, y), density(x, y, points=12)
        for key in ("pearson", "spearman", "partial_spearman"):
            found |= {f"{prefix}{key}": 0.25, f"{prefix}{key}_interval": [0.125, 0.375]}
        found |= {f"{prefix}ks_distance": fit.ks_distance, f"{prefix}skewness": fit.skewness}
        found[f"{prefix}gaussian"] = {"mean": fit.mean.tolist(), "covariance": fit.covariance.tolist()}
        found[f"{prefix}density"] = {"x": of.x.tolist(), "y": of.y.tolist(), "values": of.values.tolist()}
    return found


@pytest.mark.parametrize("content", [0.5, 0.9])
@pytest.mark.parametrize("covariance", [[[4.0, 1.5], [1.5, 1.0]], [[1.0, -0.6], [-0.6, 3.0]], [[1.0, 0.0], [0.0, 2.0]]])
def test_an_ellipse_holds_its_part_of_the_gaussian(content: float, covariance: list[list[float]]) -> None:
    n = 20_000
    points = np.random.default_rng(0).multivariate_normal([3.0, -2.0], covariance, n)
    drawn = ellipse({"mean": [3.0, -2.0], "covariance": covariance}, content)
    inside = drawn.get_path().contains_points(drawn.get_patch_transform().inverted().transform(points)).mean()
    assert inside == pytest.approx(content, abs=4 * (content * (1 - content) / n) ** 0.5 + 1e-3)  # it is a polygon


def test_points_lie_where_the_scores_are() -> None:
    found = results() | {"ceiling.partial_spearman": None, "ceiling.partial_spearman_interval": [None, None]}
    axes = Figure().subplots()
    points = _panel(axes, found, "ceiling.")
    offsets = np.asarray(points.get_offsets())
    supervised, second = found["scatter"]["supervised"], found["scatter"]["second"]
    assert np.allclose(offsets, np.stack([supervised["predictive_std"], second["predictive_std"]], 1))
    mean = (np.array(supervised["confidence"]) + np.array(second["confidence"])) / 2
    assert np.allclose(points.get_array(), mean)
    assert "Pearson 0.25 (0.12 to 0.38)" in axes.get_title() and "two seeds" in axes.get_title()
    assert "given confidence - (- to -)" in axes.get_title(), "undefined"


def test_the_ceiling_is_a_panel_of_its_own(tmp_path: Path) -> None:
    widths = []
    for ceiling in (False, True):
        path = draw_alignment(results(ceiling=ceiling), tmp_path / "figures" / f"{ceiling}.png")
        with Image.open(path) as picture:
            assert picture.format == "PNG"
            widths.append(picture.width)
    assert widths[1] > 1.7 * widths[0]
