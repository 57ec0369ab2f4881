"""Figure 7: the variance over draws after encoder, projector and predictor, image by image, under growing noise.

The variance is measured raw, as presumably in the paper, and with each draw aligned on the reference set (unlabelled
images that every draw encodes too). Most of the raw variance is what a draw does to all images alike, which says
nothing about any one of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from itertools import combinations
from typing import Any

import matplotlib as mpl
import torch
from matplotlib.axes import Axes
from matplotlib.colors import BoundaryNorm
from matplotlib.figure import Figure
from torch import Tensor

from byov._core.randomness import uniforms
from byov.config import Config
from byov.data.shifts import gaussian_noise
from byov.data.sources import open_source
from byov.evaluation.predictive import Level, predict_levels
from byov.inference.inputs import at_side, spread
from byov.inference.run import ReferenceSet, Run
from byov.metrics import pearson, spearman
from byov.metrics.resampling import RESAMPLES, replicates
from byov.studies.framework.claims import NO_NUMBER, Claim, Rows, at_most, select, statistics
from byov.studies.framework.lab import Lab
from byov.studies.framework.replicates import errors_and_replicates

TITLE = "Figure 7: variance after encoder, projector and predictor under growing Gaussian noise"
DRAWS = 50  # the paper's
IMAGES = 200  # at most
LEVELS = ("encoder", "projector", "predictor")
KINDS = {"raw": "draws not aligned", "aligned": "draws aligned"}
# Standard deviations, black to white being 1. The shifts' own noise ends at .1 for small images; here it grows until
# nothing of the image remains, as in the paper.
STRENGTHS = (0.0, 0.05, 0.1, 0.2, 0.4, 0.8)


def runs(lab: Lab) -> list[Config]:
    return lab.configs("byov")


def results(lab: Lab) -> Rows:
    """For each seed and kind of variance a row "summary", and a row "image" for each image and strength of noise."""
    return [row for config in runs(lab) for row in _rows(lab, config)]


def _rows(lab: Lab, config: Config) -> Rows:
    def measure(run: Run) -> dict[str, Any]:
        found = noisy_variances(run, DRAWS, IMAGES)
        return {
            "statistics": {kind: noise_statistics(levels) for kind, levels in found.items()},
            "variances": {kind: {name: v.tolist() for name, v in levels.items()} for kind, levels in found.items()},
        }

    settings = {"draws": DRAWS, "images": IMAGES, "strengths": STRENGTHS, "resamples": RESAMPLES}
    found = lab.measured("fig7", config, measure, settings)
    summaries = [
        {"kind": "summary", "seed": config.seed, "variance": kind, **found["statistics"][kind]} for kind in KINDS
    ]
    return summaries + _image_rows(found["variances"], config.seed)


def _image_rows(variances: dict[str, dict[str, list[list[float]]]], seed: int) -> Rows:
    images = range(len(variances["raw"][LEVELS[0]][0]))
    return [
        {"kind": "image", "seed": seed, "variance": kind, "image": image, "noise": noise}
        | {level: float(f"{variances[kind][level][i][image]:.6g}") for level in LEVELS}
        for kind in KINDS
        for i, noise in enumerate(STRENGTHS)
        for image in images
    ]


# --------------------------------------------------------------------------------------------------------- measurement

Variances = Mapping[str, Tensor]
"""By level: the variance over draws of each noisy image, averaged over outputs, (strengths, images)."""


def noisy_variances(run: Run, draws: int, images: int) -> dict[str, dict[str, Tensor]]:
    """Measure `Variances` of some test images, "raw" and "aligned".

    An image has the same noise at all strengths, only scaled.
    """
    source = open_source(run.config.data, run.config.image_size)
    pixels = source.load(source.default).images
    ids = spread(len(pixels), images)
    clean = at_side(pixels[ids], run.image_shape[-1])
    noise = partial(uniforms, ids)
    seen = [gaussian_noise(clean, strength, noise) for strength in STRENGTHS]
    levels = predict_levels(ReferenceSet(run), torch.cat(seen), draws)
    return {
        kind: {name: getattr(level, kind).variance.mean(1).view(len(seen), -1) for name, level in levels.items()}
        for kind in Level._fields
    }


def noise_statistics(variances: Variances, resamples: int = RESAMPLES) -> dict[str, float | str]:
    """Measure how the levels correlate and how noise changes them, with `NAME.error` and `NAME.replicates` over images.

    - `pearson`, `spearman`: over all points, the smallest over the pairs of levels; `A_B.` is that of a pair.
    - `clean_spearman`: the smallest over the images without noise, since noise alone could make all levels rise.
    - `growth`: relative growth of the variance's mean over images, from no noise to the strongest; smallest level.
    - `shrinkage`: the same for the decrease of its standard deviation over images.
    """
    images = next(iter(variances.values())).shape[1]
    values = _statistics(variances, torch.ones(1, images, dtype=torch.float64))
    found: dict[str, float | str] = {name: float(value) for name, value in values.items()}
    return found | errors_and_replicates(replicates(partial(_statistics, variances), images, resamples))


def _statistics(variances: Variances, counts: Tensor) -> dict[str, Tensor]:
    """All of them for counts (resamples, images): an image is resampled with all its noise."""
    found: dict[str, Tensor] = {}
    everywhere = counts.repeat(1, len(STRENGTHS))
    pairs = {f"{a}_{b}": (variances[a], variances[b]) for a, b in combinations(variances, 2)}
    for name, (a, b) in pairs.items():
        found[f"{name}.pearson"] = pearson(a.flatten(), b.flatten(), everywhere)
        found[f"{name}.spearman"] = spearman(a.flatten(), b.flatten(), everywhere)
        found[f"{name}.clean_spearman"] = spearman(a[0], b[0], counts)
    for name, level in variances.items():
        (first, first_std), (last, last_std) = (_moments(level[i], counts) for i in (0, -1))
        found |= {f"{name}.growth": last / first - 1, f"{name}.shrinkage": 1 - last_std / first_std}
    for name in ("pearson", "spearman", "clean_spearman", "growth", "shrinkage"):
        found[name] = torch.stack([v for key, v in found.items() if key.endswith(f".{name}")]).amin(0)
    return found


def _moments(values: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation over images."""
    total = counts.sum(1)
    mean = counts @ values / total
    return mean, ((counts * (values - mean[:, None]).square()).sum(1) / total).sqrt()


# -------------------------------------------------------------------------------------------------------------- claims

# The smallest effect that would matter. A correlation: .32, where one level explains a tenth of the variance of another
# (.1 = .32^2). Growth and shrinkage: a tenth, which is just visible in a cloud of points.
CORRELATED, SEEN = 0.32, 10.0


def _claim(kind: str, says: str, least: str, unit: str, size: float, name: str, scale: float) -> Claim:
    effects = partial(statistics, name=name, scale=scale, kind="summary", variance=kind)
    says = f"{says} (the smallest {least}; {KINDS[kind]})."
    room = None if name == "growth" else at_most(scale, kind="summary", variance=kind)  # nothing bounds growth
    return Claim("F, Figure 7", says, NO_NUMBER, unit, size, effects, room=room)


def _claims(kind: str) -> list[Claim]:
    correlate = "The variances after encoder, projector and predictor correlate positively"
    grows = "The average variance grows with the noise, from none to the strongest"
    shrinks = "The spread of the variance over images shrinks with the noise, from none to the strongest"
    levels = "of the three levels"
    return [
        _claim(kind, correlate, "Spearman of the three pairs", "correlation", CORRELATED, "spearman", 1),
        _claim(kind, grows, levels, "percent", SEEN, "growth", 100),
        _claim(kind, shrinks, levels, "percent", SEEN, "shrinkage", 100),
    ]


CLAIMS = [claim for kind in KINDS for claim in _claims(kind)]


# -------------------------------------------------------------------------------------------------------------- figure


def draw(rows: Rows, scale: str) -> Figure:
    """Each pair of levels, one point per image of the first seed, coloured by its noise; raw above, aligned below."""
    images = select(rows, kind="image")
    images = select(images, seed=images[0]["seed"])
    pairs = list(combinations(LEVELS, 2))
    with mpl.rc_context({"font.size": 9, "axes.grid": True, "axes.axisbelow": True, "grid.alpha": 0.4}):
        figure = Figure(figsize=(9.5, 5.6), layout="constrained")
        for line, kind in zip(figure.subplots(2, 3), KINDS, strict=True):
            mine = select(images, variance=kind)
            for axes, (a, b) in zip(line, pairs, strict=True):
                points = _scatter(axes, mine, a, b)
                axes.set(xlabel=f"variance, {a}", ylabel=f"variance, {b}")
                axes.locator_params(axis="x", nbins=4)  # small numbers have long names
                axes.ticklabel_format(scilimits=(-2, 3))
            line[0].set_title(KINDS[kind], loc="left", fontsize=9)
        bar = figure.colorbar(points, ax=figure.axes, label="std of the noise (black to white: 1)", aspect=40, pad=0.01)
        bar.set_ticks([i + 0.5 for i in range(len(STRENGTHS))], labels=[f"{strength:g}" for strength in STRENGTHS])
        return figure


def _scatter(axes: Axes, rows: Rows, a: str, b: str) -> Any:
    colours = [STRENGTHS.index(row["noise"]) + 0.5 for row in rows]
    norm = BoundaryNorm(range(len(STRENGTHS) + 1), mpl.colormaps["viridis"].N)
    x, y = ([row[level] for row in rows] for level in (a, b))
    return axes.scatter(x, y, c=colours, norm=norm, cmap="viridis", s=5, linewidths=0, rasterized=True)
