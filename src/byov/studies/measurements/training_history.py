"""What a run wrote about itself while it trained: its layers' sigma and SNR, and how steady its gradient was."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from byov.runs.folder import RunFolder, read_log
from byov.studies.measurements.layer_profiles import largest_rise

LAYER_MEASURES = ("sigma_mean", "sigma_max", "snr_mean", "snr_max")


def layer_history(folder: Path, epochs: int = 24) -> list[dict[str, Any]]:
    """Sigma and SNR of every layer's weights, for about that many epochs, evenly spaced, first and last among them.

    Biases are left out: those before a normalisation and those of attention's keys do not change the function. They sit
    at the prior, and would say nothing but which prior it is.
    """
    rows = [row for row in read_log(RunFolder(folder).posterior).rows if not row["layer"].endswith("bias")]
    seen = sorted({row["epoch"] for row in rows})
    every = max(1, round((len(seen) - 1) / epochs))
    shown = {*seen[::every], *seen[-1:]}
    return [
        {"layer": row["layer"], "epoch": row["epoch"], **{key: row[key] for key in LAYER_MEASURES}}
        for row in rows
        if row["epoch"] in shown
    ]


def gradient_spike(folder: Path) -> float | None:
    """The largest rise of the gradient's norm over its recent level, as a logarithm."""
    return largest_rise([row["grad_norm"] for row in read_log(RunFolder(folder).metrics).rows if "grad_norm" in row])
