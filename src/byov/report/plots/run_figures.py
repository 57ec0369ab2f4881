"""Figures that commands write into a run folder: agreement of two models (`evaluate --align`), and pruning curves."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Ellipse

from byov._core.files import write_atomically

# ------------------------------------------------------------------------------------------------------------ agreement


AGREEMENT = {  # prefix of the keys -> title, and whose scores are on the two axes
    "": ("against supervised BBB", "run", "supervised"),
    "ceiling.": ("ceiling: two seeds of supervised BBB", "supervised", "second"),
}
NAMES = {"run": "this run, through the probe", "supervised": "supervised BBB", "second": "supervised BBB, second seed"}
CONTENTS = (0.5, 0.9)  # of the drawn ellipses: the share of the Gaussian inside
LEVELS = 6


def draw_alignment(results: Mapping[str, Any], path: Path) -> Path:
    """Draw `results/alignment.json` as a PNG: points coloured by confidence, density lines, the fitted Gaussian."""
    panels = [prefix for prefix in AGREEMENT if f"{prefix}density" in results]
    figure = Figure(figsize=(4.8 * len(panels) + 0.6, 4.9), layout="constrained")
    for axes, prefix in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        points = _panel(axes, results, prefix)
    bar = figure.colorbar(points, ax=figure.axes, label="mean confidence of the two", aspect=35, pad=0.01)
    bar.set_alpha(1)
    settings = results["settings"]
    figure.suptitle(
        f"predictive std of {settings['images']:,} images of {settings['data']}, {settings['draws']['run']} draws",
        fontsize=10,
    )
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=130)
    write_atomically(path, lambda temporary: temporary.write_bytes(picture.getvalue()))
    return path


def _panel(axes: Axes, results: Mapping[str, Any], prefix: str) -> Any:
    """Draw one pair of models; return the points, whose colours need a bar."""
    title, *pair = AGREEMENT[prefix]
    a, b = (results["scatter"][name] for name in pair)
    colour = (np.array(a["confidence"]) + np.array(b["confidence"])) / 2
    x, y = a["predictive_std"], b["predictive_std"]
    points = axes.scatter(x, y, c=colour, vmin=0, vmax=1, cmap="cividis", s=4, alpha=0.5, linewidths=0, rasterized=True)
    density = results[f"{prefix}density"]
    axes.contour(density["x"], density["y"], density["values"], levels=LEVELS, colors="k", linewidths=0.6)
    ellipses = [axes.add_patch(ellipse(results[f"{prefix}gaussian"], content)) for content in CONTENTS]
    ellipses[0].set_label("fitted Gaussian, " + " and ".join(f"{content:.0%}" for content in CONTENTS))
    axes.legend(handles=[*ellipses[:1], Line2D([], [], color="k", linewidth=0.6, label="density")], fontsize=8)
    axes.set(xlabel=NAMES[pair[0]], ylabel=NAMES[pair[1]], xlim=(0, 1.05 * max(x)), ylim=(0, 1.05 * max(y)))
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title(f"{title}\n{_numbers(results, prefix)}", fontsize=9)
    return points


def ellipse(gaussian: Mapping[str, Any], content: float) -> Ellipse:
    """Make the ellipse that contains this share of a Gaussian; its squared radius is exponential with mean 2."""
    lengths, directions = np.linalg.eigh(np.array(gaussian["covariance"]))
    width, height = 2 * np.sqrt(lengths * -2 * math.log(1 - content))
    angle = math.degrees(math.atan2(directions[1, 0], directions[0, 0]))
    return Ellipse(gaussian["mean"], width, height, angle=angle, fill=False, color="C3", linestyle="--", linewidth=1.4)


def _numbers(results: Mapping[str, Any], prefix: str) -> str:
    """Correlations with their intervals, and the Gaussian's misfit."""
    names = {"pearson": "Pearson", "spearman": "Spearman", "partial_spearman": "Spearman given confidence"}
    lines = []
    for key, name in names.items():
        low, high = results[f"{prefix}{key}_interval"]
        lines.append(f"{name} {_number(results[prefix + key])} ({_number(low)} to {_number(high)})")
    misfit = f"misfit: KS {_number(results[f'{prefix}ks_distance'])}, skewness {_number(results[f'{prefix}skewness'])}"
    return "\n".join([", ".join(lines[:2]), lines[2], misfit])


def _number(value: float | None) -> str:
    """None is undefined: a score that is a function of the confidences leaves nothing to correlate."""
    return "-" if value is None else f"{value:.2f}"


# -------------------------------------------------------------------------------------------------------------- pruning


PRUNING_LINES = {  # key of a point -> label, colour, dash
    "top1": ("probe of the unpruned encoder", "C0", "-"),
    "refitted.top1": ("new probe", "C1", "--"),
    "ece": ("probe of the unpruned encoder", "C0", "-"),
    "refitted.ece": ("new probe", "C1", "--"),
    "cosine": ("", "C2", "-"),
}
PRUNING = {"top-1": ("top1", "refitted.top1"), "ECE": ("ece", "refitted.ece"), "cosine to unpruned": ("cosine",)}


def draw_pruning(results: Mapping[str, Any], path: Path) -> Path:
    """Draw `results/pruning.json` as a PNG: curves without training; a star for each round of training."""
    rows, settings = results["curve"], results["settings"]
    panels = {title: keys for title, keys in PRUNING.items() if keys[0] in rows[0]}
    figure = Figure(figsize=(3.6 * len(panels) + 0.4, 3.2), layout="constrained")
    for axes, (title, keys) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels.items(), strict=True):
        for key in keys:
            label, colour, dash = PRUNING_LINES[key]
            x, y = [row["sparsity"] for row in rows], [row[key] for row in rows]
            axes.plot(x, y, color=colour, linestyle=dash, marker="o", markersize=3, label=label)
            for row in results["rounds"]:
                if row["epochs"]:
                    axes.plot(row["sparsity"], row[key], color=colour, marker="*", markersize=10)
        axes.set(title=title, xlabel="sparsity", xlim=(-0.02, 1.02))
        axes.grid(linewidth=0.4)
        axes.spines[["top", "right"]].set_visible(False)
        if len(keys) > 1:
            axes.legend(frameon=False, fontsize=8)
    what = "units" if settings["structured"] else "weights"
    figure.suptitle(f"{what} pruned by {settings['by']}, {settings['scope']}, {settings['data']}", fontsize=10)
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=130)
    write_atomically(path, lambda temporary: temporary.write_bytes(picture.getvalue()))
    return path
