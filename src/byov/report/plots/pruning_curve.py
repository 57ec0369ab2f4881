"""The picture of a pruned run: what is left of the features at each sparsity."""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from byov._core.files import write_atomically

LINES = {  # key of a point -> its label and look
    "top1": ("probe of the unpruned encoder", "C0", "-"),
    "refitted.top1": ("probe fitted anew", "C1", "--"),
    "ece": ("probe of the unpruned encoder", "C0", "-"),
    "refitted.ece": ("probe fitted anew", "C1", "--"),
    "cosine": ("", "C2", "-"),
}
PANELS = {"top-1": ("top1", "refitted.top1"), "ECE": ("ece", "refitted.ece"), "cosine to unpruned": ("cosine",)}


def draw_pruning(results: Mapping[str, Any], path: Path) -> Path:
    """Draws `results/pruning.json` as a PNG: curves without training; a star for what was trained on."""
    rows, settings = results["curve"], results["settings"]
    panels = {title: keys for title, keys in PANELS.items() if keys[0] in rows[0]}
    figure = Figure(figsize=(3.6 * len(panels) + 0.4, 3.2), layout="constrained")
    for axes, (title, keys) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels.items(), strict=True):
        for key in keys:
            label, colour, dash = LINES[key]
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
