"""The run folder: the path of every file in it, and the reader of its logs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from byov._core.files import parse_json

CHECKPOINT = "last.safetensors"


@dataclass(frozen=True)
class RunFolder:
    """The paths of a run folder; none of them need exist."""

    path: Path

    @property
    def lock(self) -> Path:
        """The lock of the process that trains or prunes (`_core.lock`)."""
        return self.path / ".lock"

    @property
    def config(self) -> Path:
        """The resolved settings, YAML."""
        return self.path / "config.yaml"

    @property
    def checkpoint(self) -> Path:
        """The last checkpoint (`runs.checkpoints`)."""
        return self.path / "checkpoints" / CHECKPOINT

    @property
    def metrics(self) -> Path:
        """One JSON line per log step."""
        return self.path / "metrics.jsonl"

    @property
    def posterior(self) -> Path:
        """One JSON line per layer and epoch: sigma and SNR."""
        return self.path / "posterior.jsonl"

    @property
    def summary(self) -> Path:
        """Length, speed and memory; written when training ends."""
        return self.path / "summary.json"

    @property
    def tensorboard(self) -> Path:
        return self.path / "tensorboard"

    @property
    def results(self) -> Path:
        """The folder of everything measured on the run, JSON and safetensors."""
        return self.path / "results"

    @property
    def figures(self) -> Path:
        return self.path / "figures"

    @property
    def reference(self) -> Path:
        """The folder of the reference set: its images here, its features per draw in subfolders."""
        return self.path / "reference"

    @property
    def reference_images(self) -> Path:
        """Which images of the source are reference and calibration images, JSON."""
        return self.reference / "images.json"

    @property
    def reference_pixels(self) -> Path:
        """The pixels of these images."""
        return self.reference / "images.safetensors"

    @property
    def view_cache(self) -> Path:
        """The folder of cached views (`training.view_cache`), while training lasts."""
        return self.path / "cache"


class Log(NamedTuple):
    """The rows of a JSONL file."""

    rows: list[dict[str, Any]]
    broken: int
    """Number of lines that could not be read."""


def read_log(path: Path) -> Log:
    """Read a JSONL log; empty if the file does not exist. A kill may have cut the last line short: it is skipped."""
    rows: list[dict[str, Any]] = []
    broken = 0
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.is_file() else ():
        if not line.strip():
            continue
        try:
            row = parse_json(line)
            if isinstance(row["step"], bool) or not math.isfinite(row["step"]):
                raise ValueError("it has no step")
            rows.append(row)
        except (ValueError, KeyError, TypeError, OverflowError):
            broken += 1
    return Log(rows, broken)
