"""Figure 1b: the predictive std of BYOV against that of supervised Bayes by Backprop, image by image.

The agreement of two seeds of the supervised model is the ceiling: no model without labels can be expected to do better.
"""

from __future__ import annotations

from functools import partial
from statistics import mean
from typing import Any

import matplotlib as mpl
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from torch import Tensor

from byov.config import Config
from byov.evaluation.agreement import align, density, given_both
from byov.inference.run import Run
from byov.metrics import gaussian_fit, partial_pearson, partial_spearman, pearson, spearman
from byov.metrics.correlation import misfit_replicates
from byov.metrics.resampling import RESAMPLES, replicates
from byov.report.plots.run_figures import CONTENTS, ellipse
from byov.studies.framework.claims import NO_NUMBER, Claim, Row, Rows, at_most, select, statistics
from byov.studies.framework.lab import Lab, identity
from byov.studies.framework.replicates import REPLICATES, errors_and_replicates, packed

TITLE = "Figure 1b: predictive std of BYOV against supervised Bayes by Backprop"
DRAWS = 200  # the paper: 1000. This gives each std a relative error of 5%
IMAGES, SHOWN = 1000, 500  # at most, to measure and to draw: a correlation over 1000 images has an error of .03
CORRELATIONS = ("pearson", "spearman", "partial_pearson", "partial_spearman")
PREFIXES = ("", "unaligned.", "ceiling.")

# Half the misfit of two independent exponentials (KS .20, skewness 8). Values that pile up near 0 with a long tail are
# what one would expect of a std, so a good fit must be nearer to a Gaussian than to that. A sample of 355 images from a
# true Gaussian has a KS distance of at most .07, 19 times out of 20.
KS_BOUND, SKEWNESS_BOUND = 0.1, 4.0


def runs(lab: Lab) -> list[Config]:
    """BYOV and the supervised model with each seed, and the supervised model with one more for the last ceiling."""
    return [*lab.configs("byov"), *(lab.config("supervised-bbb", seed) for seed in range(lab.seeds + 1))]


def results(lab: Lab) -> Rows:
    """For each seed a row of kind "summary", and one of kind "image" for each image in the figure."""
    return [row for seed in range(lab.seeds) for row in _rows(lab, seed)]


def _rows(lab: Lab, seed: int) -> Rows:
    supervised, second = lab.config("supervised-bbb", seed), lab.config("supervised-bbb", seed + 1)

    def measure(run: Run) -> dict[str, Any]:
        found = align(run, lab.run(supervised), lab.run(second), draws=DRAWS, most=IMAGES, say=lab.say)
        stds = {name: torch.tensor(of["predictive_std"]) for name, of in found["scatter"].items()}
        kept = {key: value for key, value in found.items() if not key.endswith(("density", "gaussian", "settings"))}
        misfit = errors_and_replicates(misfit_replicates(stds["run"], stds["supervised"]))
        return kept | misfit | correlation_replicates(found["scatter"])

    settings = {"draws": DRAWS, "images": IMAGES, "supervised": identity(supervised), "second": identity(second)}
    settings |= {"resamples": RESAMPLES}
    found = lab.measured("fig1b", lab.config("byov", seed), measure, settings)
    return [_summary(found, seed), *_images(found["scatter"], seed)]


def correlation_replicates(scatter: dict[str, Any]) -> dict[str, str]:
    """Return `NAME.replicates` of every correlation of the run with the supervised model."""
    pair = [scatter[name] for name in ("run", "supervised")]
    x, y = (torch.tensor(of["predictive_std"], dtype=torch.float64) for of in pair)
    first, second = (torch.tensor(of["confidence"], dtype=torch.float64) for of in pair)

    def correlations(counts: Tensor) -> dict[str, Tensor]:
        return {
            "pearson": pearson(x, y, counts),
            "spearman": spearman(x, y, counts),
            "partial_pearson": given_both(partial_pearson, x, y, first, second, counts),
            "partial_spearman": given_both(partial_spearman, x, y, first, second, counts),
        }

    return {f"{name}{REPLICATES}": packed(v.nan_to_num(0)) for name, v in replicates(correlations, len(x)).items()}


def _summary(found: dict[str, Any], seed: int) -> Row:
    row: Row = {"kind": "summary", "seed": seed}
    for key in (prefix + name for prefix in PREFIXES for name in CORRELATIONS):
        low, high = found[f"{key}_interval"]
        error = None if low is None or high is None else (high - low) / (2 * 1.96)  # of a 95% interval
        row |= {key: found[key], f"{key}.error": error}
    row |= {prefix + name: found[prefix + name] for prefix in PREFIXES for name in ("ks_distance", "skewness")}
    with_replicates = (*CORRELATIONS, "ks_distance", "skewness")
    row |= {f"{name}{REPLICATES}": found[f"{name}{REPLICATES}"] for name in with_replicates}
    others = ("ks_distance.error", "skewness.error", "run.top1", "supervised.top1")
    return row | {key: found[key] for key in (*others, "run.mean_predictive_std", "supervised.mean_predictive_std")}


def _images(scatter: dict[str, Any], seed: int) -> Rows:
    names = {"run": "byov", "supervised": "supervised", "second": "second"}
    columns = {column: scatter[name]["predictive_std"] for name, column in names.items()}
    columns["confidence"] = scatter["run"]["confidence"]
    every = -(-len(columns["byov"]) // SHOWN)
    return [
        {"kind": "image", "seed": seed, **dict(zip(columns, values, strict=True))}
        for values in list(zip(*columns.values(), strict=True))[::every]
    ]


# -------------------------------------------------------------------------------------------------------------- claims


# The room of a correlation is its ceiling: two seeds of the supervised model do not agree better.
# The smallest correlation that would matter: one std explains a tenth of the variance of the other (.32^2 = .1)
CORRELATED = 0.32
_summaries = partial(statistics, kind="summary")

CLAIMS = [
    Claim(
        "abstract, 4.3, Figure 1b",
        "A joint Gaussian captures the predictive std of BYOV and of supervised BBB well: the share of images inside "
        "any of its ellipses is off by at most a tenth.",
        NO_NUMBER,
        "KS distance below 0.1",
        KS_BOUND,  # a perfect fit
        partial(_summaries, name="ks_distance", scale=-1, offset=KS_BOUND),
        room=at_most(KS_BOUND, kind="summary"),
    ),
    Claim(
        "abstract, 4.3, Figure 1b",
        "A joint Gaussian captures the predictive std of BYOV and of supervised BBB well: together they are less than "
        "half as skewed as two exponentials.",
        NO_NUMBER,
        "Mardia's skewness below 4",
        SKEWNESS_BOUND,  # a perfect fit
        partial(_summaries, name="skewness", scale=-1, offset=SKEWNESS_BOUND),
        room=at_most(SKEWNESS_BOUND, kind="summary"),
    ),
    Claim(
        "5 (and 1.1: distributionally aligned)",
        "The predictive std of BYOV is correlated with that of supervised BBB (Pearson).",
        NO_NUMBER,
        "correlation",
        CORRELATED,
        partial(_summaries, name="pearson"),
        room=partial(_summaries, name="ceiling.pearson"),
    ),
    Claim(
        "5 (and 1.1: distributionally aligned)",
        "The predictive std of BYOV is correlated with that of supervised BBB (Spearman).",
        NO_NUMBER,
        "correlation",
        CORRELATED,
        partial(_summaries, name="spearman"),
        room=partial(_summaries, name="ceiling.spearman"),
    ),
    Claim(
        "4.3, 5: a proxy for the uncertainty of a supervised model",
        "The two predictive stds are correlated beyond what the confidence of both models already explains "
        "(partial Spearman).",
        NO_NUMBER,
        "partial correlation",
        CORRELATED,
        partial(_summaries, name="partial_spearman"),
        room=partial(_summaries, name="ceiling.partial_spearman"),
    ),
]


# -------------------------------------------------------------------------------------------------------------- figure


def draw(rows: Rows, scale: str) -> Figure:
    """The first seed's images, their density and the Gaussian; the ceiling on the right. Numbers are seed means."""
    images = select(rows, kind="image")
    images = select(images, seed=images[0]["seed"])
    summaries = select(rows, kind="summary")
    with mpl.rc_context({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=(8.6, 4.2), layout="constrained")
        own, ceiling = figure.subplots(1, 2)
        points = _panel(own, images, "byov", "supervised")
        own.set(xlabel="predictive std, BYOV through the probe", ylabel="predictive std, supervised BBB")
        own.set_title(f"BYOV against supervised BBB\n{_numbers(summaries, '')}", fontsize=8)
        _panel(ceiling, images, "supervised", "second")
        ceiling.set(xlabel="predictive std, supervised BBB", ylabel="predictive std, another seed of it")
        ceiling.set_title(f"ceiling: two seeds of supervised BBB\n{_numbers(summaries, 'ceiling.')}", fontsize=8)
        bar = figure.colorbar(points, ax=[own, ceiling], label="confidence of BYOV", aspect=35, pad=0.01)
        bar.set_alpha(1)
        return figure


def _panel(axes: Axes, images: Rows, a: str, b: str) -> Any:
    """Draw one pair of models; returns the points, whose colours need a bar."""
    x, y = (torch.tensor([row[name] for row in images], dtype=torch.float64) for name in (a, b))
    colours = [row["confidence"] for row in images]
    look = {"vmin": 0, "vmax": 1, "cmap": "cividis", "s": 8, "alpha": 0.6, "linewidths": 0}
    points = axes.scatter(x, y, c=colours, **look)  # type: ignore[arg-type]
    of, fit = density(x, y), gaussian_fit(x, y)
    axes.contour(of.x, of.y, of.values, levels=6, colors="k", linewidths=0.7)
    gaussian = {"mean": fit.mean.tolist(), "covariance": fit.covariance.tolist()}
    ellipses = [axes.add_patch(ellipse(gaussian, content)) for content in CONTENTS]
    ellipses[0].set_label("joint Gaussian, " + " and ".join(f"{content:.0%}" for content in CONTENTS))
    kde = Line2D([], [], color="k", linewidth=0.7, label="kernel density")
    axes.legend(handles=[*ellipses[:1], kde], fontsize=7, loc="upper left", frameon=False)
    axes.set(xlim=(0, 1.05 * float(x.max())), ylim=(0, 1.15 * float(y.max())))
    return points


def _numbers(summaries: Rows, prefix: str) -> str:
    """Means over seeds."""

    def average(name: str) -> str:
        known = [row[prefix + name] for row in summaries if row[prefix + name] is not None]
        return f"{mean(known):.2f}" if known else "-"

    return (
        f"Pearson {average('pearson')}, Spearman {average('spearman')}, "
        f"given confidence {average('partial_spearman')}\n"
        f"misfit of the Gaussian: KS {average('ks_distance')}, skewness {average('skewness')}"
    )
