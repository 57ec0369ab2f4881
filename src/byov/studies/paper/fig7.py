"""Figure 7: the variance over draws after encoder, projector and predictor, image by image, under growing noise.

Raw, as the paper presumably has it, and with each draw aligned on the reference bank: what a draw does to all images
alike is most of the raw variance, and says nothing of any one of them.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.colors import BoundaryNorm
from matplotlib.figure import Figure

from byov.config import Config
from byov.inference.load import Run
from byov.studies.framework.claims import Claim, Effect
from byov.studies.framework.lab import Lab
from byov.studies.measurements.variance_under_noise import STRENGTHS, noise_statistics, noisy_variances

TITLE = "Figure 7: variance after encoder, projector and predictor under growing Gaussian noise"
DRAWS = 50  # the paper's
IMAGES = 200  # at most
LEVELS = ("encoder", "projector", "predictor")
KINDS = ("raw", "aligned")


def runs(lab: Lab) -> list[Config]:
    return lab.configs("byov")


def results(lab: Lab) -> list[dict[str, Any]]:
    """For each seed and kind of variance a row "summary", and a row "image" for each image and strength of noise."""
    return [row for config in runs(lab) for row in _rows(lab, config)]


def _rows(lab: Lab, config: Config) -> list[dict[str, Any]]:
    def measure(run: Run) -> dict[str, Any]:
        found = noisy_variances(run, DRAWS, IMAGES)
        return {
            "statistics": {kind: noise_statistics(levels) for kind, levels in found.items()},
            "variances": {kind: {name: v.tolist() for name, v in levels.items()} for kind, levels in found.items()},
        }

    settings = {"draws": DRAWS, "images": IMAGES, "strengths": STRENGTHS}
    found = lab.measured("fig7", config, measure, settings)
    summaries = [
        {"kind": "summary", "seed": config.seed, "variance": kind, **found["statistics"][kind]} for kind in KINDS
    ]
    return summaries + _image_rows(found["variances"], config.seed)


def _image_rows(variances: dict[str, dict[str, list[list[float]]]], seed: int) -> list[dict[str, Any]]:
    images = range(len(variances[KINDS[0]][LEVELS[0]][0]))
    return [
        {"kind": "image", "seed": seed, "variance": kind, "image": image, "noise": noise}
        | {level: float(f"{variances[kind][level][i][image]:.6g}") for level in LEVELS}
        for kind in KINDS
        for i, noise in enumerate(STRENGTHS)
        for image in images
    ]


# -------------------------------------------------------------------------------------------------------------- claims


def _effects(kind: str, name: str, scale: float) -> Callable[[list[dict[str, Any]]], list[Effect]]:
    """Of a statistic; none of a seed where it or its error is undefined."""

    def effects(rows: list[dict[str, Any]]) -> list[Effect]:
        mine = [row for row in rows if row["kind"] == "summary" and row["variance"] == kind]
        return [
            Effect(row["seed"], scale * row[name], scale * row[f"{name}.error"])
            for row in mine
            if None not in (row[name], row[f"{name}.error"])
        ]

    return effects


# The least that would matter. A correlation: .32, by which a tenth of the spread of one level is told by another (.1 =
# .32^2). Growth and shrinkage: a tenth, which an eye would just see in a cloud of points.
CORRELATED, SEEN = 0.32, 10.0


def _claims(kind: str) -> list[Claim]:
    draws = "draws as they come" if kind == "raw" else "draws aligned"
    return [
        Claim(
            "F, Figure 7",
            f"The variances after encoder, projector and predictor correlate positively (the least Spearman of the "
            f"three pairs; {draws}).",
            "no number",
            "correlation",
            CORRELATED,
            _effects(kind, "spearman", 1),
        ),
        Claim(
            "F, Figure 7",
            f"The average variance grows with the noise, from none to the strongest (the least of the three levels; "
            f"{draws}).",
            "no number",
            "percent",
            SEEN,
            _effects(kind, "growth", 100),
        ),
        Claim(
            "F, Figure 7",
            f"The spread of the variance over images shrinks with the noise, from none to the strongest (the least of "
            f"the three levels; {draws}).",
            "no number",
            "percent",
            SEEN,
            _effects(kind, "shrinkage", 100),
        ),
    ]


CLAIMS = [claim for kind in KINDS for claim in _claims(kind)]


# -------------------------------------------------------------------------------------------------------------- figure


def draw(rows: list[dict[str, Any]], scale: str) -> Figure:
    """Each pair of levels, a point an image of the first seed, coloured by its noise; raw above, aligned below."""
    images = [row for row in rows if row["kind"] == "image"]
    images = [row for row in images if row["seed"] == images[0]["seed"]]
    pairs = list(combinations(LEVELS, 2))
    with mpl.rc_context({"font.size": 9, "axes.grid": True, "axes.axisbelow": True, "grid.alpha": 0.4}):
        figure = Figure(figsize=(9.5, 5.6), layout="constrained")
        for line, kind in zip(figure.subplots(2, 3), KINDS, strict=True):
            mine = [row for row in images if row["variance"] == kind]
            for axes, (a, b) in zip(line, pairs, strict=True):
                points = _scatter(axes, mine, a, b)
                axes.set(xlabel=f"variance, {a}", ylabel=f"variance, {b}")
                axes.locator_params(axis="x", nbins=4)  # small numbers have long names
                axes.ticklabel_format(scilimits=(-2, 3))
            line[0].set_title("draws as they come" if kind == "raw" else "draws aligned", loc="left", fontsize=9)
        bar = figure.colorbar(points, ax=figure.axes, label="std of the noise (black to white: 1)", aspect=40, pad=0.01)
        bar.set_ticks([i + 0.5 for i in range(len(STRENGTHS))], labels=[f"{strength:g}" for strength in STRENGTHS])
        return figure


def _scatter(axes: Axes, rows: list[dict[str, Any]], a: str, b: str) -> Any:
    colours = [STRENGTHS.index(row["noise"]) + 0.5 for row in rows]
    norm = BoundaryNorm(range(len(STRENGTHS) + 1), mpl.colormaps["viridis"].N)
    x, y = ([row[level] for row in rows] for level in (a, b))
    return axes.scatter(x, y, c=colours, norm=norm, cmap="viridis", s=5, linewidths=0, rasterized=True)
