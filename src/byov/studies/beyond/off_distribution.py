"""Calibration and pruning off the training distribution: shifted images and other sources, before and after pruning.

The third of the reader's next checks: does what the posterior knows hold beyond the images it was learned from?
"""

from __future__ import annotations

from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

from byov.config import Config
from byov.report.plots.seed_plots import STYLE, dots
from byov.studies.beyond.score import OTHERS
from byov.studies.framework.claims import Claim, Effect
from byov.studies.framework.lab import Lab
from byov.studies.measurements.pruned_robustness import UNPRUNED, robust_rows, robust_settings
from byov.studies.measurements.transfer import sources_there

TITLE = "calibration, OOD detection and pruning on shifted images and other sources"
SPARSITY = 0.5
METHODS = {"byov": "BYOV", "byol": "BYOL"}


def runs(lab: Lab) -> list[Config]:
    return [lab.config(method, seed) for seed in range(lab.seeds) for method in METHODS]


def results(lab: Lab) -> list[dict[str, Any]]:
    """A row for each run, pruning (none, by SNR, by magnitude) and probe (the unpruned encoder's, or refitted)."""
    sources = sources_there(OTHERS.get(lab.scale.data, ()), lab.say)
    settings = robust_settings(SPARSITY, sources)
    rows = []
    for config in runs(lab):
        found = lab.measured(
            "off-distribution", config, lambda run: {"rows": robust_rows(run, SPARSITY, sources, lab.say)}, settings
        )
        rows += [{"method": config.method, "seed": config.seed, **row} for row in found["rows"]]
    return rows


def pruning_effects(rows: list[dict[str, Any]]) -> list[Effect]:
    """Points of top-1 on shifted images that SNR keeps more than magnitude, through the unpruned encoder's probe."""
    mine = [row for row in rows if (row["method"], row["pruned"], row["probe"]) == ("byov", "snr", "kept")]
    return [Effect(row["seed"], 100 * row["shifted.top1.difference"], 100 * row["shifted.top1.error"]) for row in mine]


CLAIMS = [
    Claim(
        where="reader's summary, next check 3",
        says="SNR pruning keeps more accuracy than magnitude pruning, here on shifted images with half of the weights.",
        paper="up to 12 points of top-1 (on clean images)",
        unit="points of top-1",
        size=1.0,  # as in fig4-pruning at half of the weights: the 12 are the paper's maximum over sparsities
        effects=pruning_effects,
    ),
]


def draw(rows: list[dict[str, Any]], scale: str) -> Figure:
    """Top-1 and ECE on clean and shifted images, and OOD detection, by pruning; one probe beside the other."""
    names = {(m, p): f"{METHODS[m]}, {p if p == UNPRUNED else f'by {p}'}" for m in METHODS for p in _prunings(rows)}
    labels = [name for pair, name in names.items() if any((row["method"], row["pruned"]) == pair for row in rows)]

    def values(key: str, probe: str, factor: float) -> dict[str, list[float]]:
        found: dict[str, list[float]] = {label: [] for label in labels}
        for row in rows:
            if row["probe"] == probe and row.get(key) is not None:
                found[names[row["method"], row["pruned"]]].append(factor * row[key])
        return found

    sources = list(dict.fromkeys(key.split(".")[1] for row in rows for key in row if key.startswith("ood.")))
    panels = {
        "shifted.top1": ("top-1, shifted (%)", 100.0),
        "ece": ("ECE, clean (points)", 100.0),
        "shifted.ece": ("ECE, shifted (points)", 100.0),
    }
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(2 + 1.8 * (len(panels) + len(sources)), 2.7), layout="constrained")
        all_axes = figure.subplots(1, len(panels) + len(sources), sharey=True)
        for axes, (key, (label, factor)) in zip(all_axes, panels.items(), strict=False):
            dots(axes, {f"probe {probe}": values(key, probe, factor) for probe in ("kept", "refitted")}, labels)
            axes.set_xlabel(label)
        for axes, source in zip(all_axes[len(panels) :], sources, strict=True):
            series = {f"probe {p}, softmax": values(f"ood.{source}.softmax", p, 1) for p in ("kept", "refitted")}
            dots(axes, series | {"nearest neighbours": values(f"ood.{source}.knn", "kept", 1)}, labels)
            axes.set_xlabel(f"AUROC, {source}")
        handles, texts = all_axes[-1].get_legend_handles_labels()
        figure.legend(handles, texts, loc="outside lower center", ncols=3, fontsize=7)
        figure.suptitle(f"Off the training distribution, {SPARSITY:.0%} pruned ({scale}): dots are seeds")
        return figure


def _prunings(rows: list[dict[str, Any]]) -> list[str]:
    return list(dict.fromkeys(row["pruned"] for row in rows))
