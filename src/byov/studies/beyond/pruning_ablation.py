"""SNR pruning taken apart: what mean and sigma contribute, layer by layer and over all; whole units; retraining.

The first of the reader's next checks and the third open question. Within a layer `magnitude / layer's sigma` ranks as
magnitude does: it is there for the global ranking, where it says how much of SNR is only the scale of the layers.
"""

from __future__ import annotations

import math
from statistics import mean
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from byov.config import Config
from byov.report.plots.seed_plots import COLOURS, MARKERS, STYLE
from byov.studies.framework.claims import Claim, Effect
from byov.studies.framework.lab import Lab
from byov.studies.measurements.snr_components import PARTS, SCOPES, apart_rows, apart_settings

TITLE = "SNR pruning taken apart: mean, sigma, layers; whole units; retraining; bytes and speed"
NAMES = {
    "snr": "SNR",
    "magnitude": "magnitude",
    "variance": "1 / sigma alone",
    "snr_shuffled": "SNR, sigma shuffled",
    "magnitude_by_layer": "magnitude / layer's sigma",
}
JUDGED = 0.5  # the sparsity that claims are judged at
Rows = list[dict[str, Any]]


def runs(lab: Lab) -> list[Config]:
    return lab.configs("byov", "byol")


def results(lab: Lab) -> Rows:
    """A row for each run, kind (single weights, units, retrained), score, scope and sparsity."""
    rows, settings = [], apart_settings()
    for config in runs(lab):
        found = lab.measured("pruning-ablation", config, lambda run: {"rows": apart_rows(run, lab.say)}, settings)
        rows += [{"method": config.method, "seed": config.seed, **row} for row in found["rows"]]
    return rows


def chosen(rows: Rows, **where: Any) -> Rows:
    """The rows that have these values."""
    return [row for row in rows if all(row[key] == value for key, value in where.items())]


def score_effects(rows: Rows, by: str, against: str = "magnitude") -> list[Effect]:
    """Points of top-1 that one score keeps more than another: half of each layer's weights gone, probe not refitted.

    Rows know their own error to magnitude: two of them are added in squares.
    """
    where = {"method": "byov", "kind": "weights", "scope": "layer", "asked": JUDGED}
    mine = {row["seed"]: row for row in chosen(rows, by=by, **where)}
    other = {row["seed"]: row for row in chosen(rows, by=against, **where)}
    return [
        Effect(
            seed,
            100 * (row["top1"] - other[seed]["top1"]),
            100 * math.hypot(row["top1.error"], other[seed]["top1.error"]),
        )
        for seed, row in mine.items()
    ]


# The paper's 12 points are its maximum over sparsities. At one that is fixed: a point, as in fig4-pruning.
LEAST = 1.0
CLAIMS = [
    Claim(
        where="reader's summary, mechanism 2",
        says="A weight's own sigma matters: SNR keeps more accuracy than SNR with sigma shuffled within the layer.",
        paper="up to 12 points of top-1 (SNR against magnitude)",
        unit="points of top-1",
        size=LEAST,
        effects=lambda rows: score_effects(rows, "snr", "snr_shuffled"),
    ),
    Claim(
        where="reader's summary, mechanism 2",
        says="A weight's variance is a better sign of its use than its magnitude.",
        paper="up to 12 points of top-1 (SNR against magnitude)",
        unit="points of top-1",
        size=LEAST,
        effects=lambda rows: score_effects(rows, "variance"),
    ),
]


def draw(rows: Rows, scale: str) -> Figure:
    """Accuracy over sparsity by part, per layer and global; units and retraining; accuracy over bytes."""
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(11, 3.6), layout="constrained")
        layer, everywhere, probed, size = figure.subplots(1, 4)
        for axes, scope in zip((layer, everywhere), SCOPES, strict=True):
            for i, by in enumerate(PARTS):
                _line(axes, chosen(rows, method="byov", kind="weights", scope=scope, by=by), i, NAMES[by])
            _line(axes, chosen(rows, method="byol", kind="weights", scope=scope, by="magnitude"), 6, "BYOL, magnitude")
            axes.set_title("lowest of each layer" if scope == "layer" else "lowest of all layers", fontsize=8)
            axes.set_ylabel("top-1, probe not refitted (%)")
        fitted = [row for row in chosen(rows, method="byov") if row["refitted.top1"] is not None]
        for i, (kind, by, label) in enumerate(
            (
                ("weights", "snr", "weights, SNR"),
                ("weights", "magnitude", "weights, magnitude"),
                ("units", "snr", "units, SNR"),
                ("units", "magnitude", "units, magnitude"),
                ("retrained", "snr", "SNR, retrained each round"),
            )
        ):
            here = chosen(fitted, kind=kind, by=by)
            _line(probed, here, i, label, "refitted.top1")
            _line(size, [row for row in here if row["compressed_bytes"]], i, label, "refitted.top1", "compressed_bytes")
        unpruned = chosen(fitted, kind="none")
        for axes in (probed, size):
            axes.axhline(100 * mean(row["top1"] for row in unpruned), color="0.3", linewidth=1)
            axes.set_ylabel("top-1, probe refitted (%)")
        probed.set_title("units and retraining (line: unpruned)", fontsize=8)
        units = chosen(fitted, kind="units")
        for by, asked in sorted({(row["by"], row["asked"]) for row in units}):
            here = chosen(units, by=by, asked=asked)
            x, y, speed = (mean(row[key] for row in here) for key in ("compressed_bytes", "refitted.top1", "speed"))
            above = 4 if by == "magnitude" else -9  # of the dots, which lie over one another
            place, apart = (x / 1024, 100 * y), (4, above)
            size.annotate(f"{speed:.1f}x", place, textcoords="offset points", xytext=apart, fontsize=6)
        size.margins(x=0.15)
        size.set_title("compressed size (units: speed)", fontsize=8)
        size.set_xlabel(f"KiB after zlib (unpruned: {mean(r['compressed_bytes'] for r in unpruned) / 1024:.0f})")
        for axes in (layer, everywhere, probed):
            axes.set_xlabel("sparsity")
            axes.xaxis.set_major_formatter(PercentFormatter(1))
        handles, texts = everywhere.get_legend_handles_labels()
        figure.legend(handles, texts, loc="outside lower left", ncols=3, fontsize=7)
        handles, texts = probed.get_legend_handles_labels()
        figure.legend(handles, texts, loc="outside lower right", ncols=3, fontsize=7)
        figure.suptitle(f"SNR pruning taken apart ({scale}); bands: all seeds")
        return figure


def _line(axes: Axes, rows: Rows, slot: int, label: str, measure: str = "top1", x: str = "sparsity") -> None:
    """Mean over seeds with a band from least to most, by the sparsity that was asked for."""
    points = []
    for asked in sorted({row["asked"] for row in rows}):
        here = chosen(rows, asked=asked)
        found = [100 * row[measure] for row in here]
        points.append((mean(row[x] for row in here) / (1024 if x != "sparsity" else 1), found))
    if not points:
        return
    places, values = [place for place, _ in points], [found for _, found in points]
    colour = COLOURS[slot % len(COLOURS)]
    marker = MARKERS[slot % len(MARKERS)]
    axes.plot(places, [mean(found) for found in values], color=colour, marker=marker, ms=4, lw=1.2, label=label)
    axes.fill_between(places, list(map(min, values)), list(map(max, values)), color=colour, alpha=0.15, linewidth=0)
