"""A run folder as the report sees it: what is there, what is not, and why."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

from byov.config import BAYESIAN, Config, read_config
from byov.errors import BadInput

Row = dict[str, Any]


@dataclass(frozen=True)
class Run:
    """Everything a page says about one run."""

    name: str
    path: Path
    config: Config
    metrics: list[Row]
    """One row a log step, in order of steps."""
    posterior: list[Row]
    """One row a layer and epoch, in order of epochs."""
    results: Row
    """`results/evaluation.json`; empty where the run is not evaluated."""
    summary: Row
    """`summary.json`; empty where training has not ended."""
    pruning: Row
    """`results/pruning.json`; empty where the run is not one that `byov prune` wrote."""
    missing: list[str]
    """A sentence for each thing that is not there."""

    def curve(self, key: str) -> tuple[list[float], list[float]]:
        """Epochs and values of one column of the metrics, where it was logged and finite."""
        rows = [row for row in self.metrics if finite(row.get(key)) and finite(row.get("epoch"))]
        return [float(row["epoch"]) for row in rows], [float(row[key]) for row in rows]

    @property
    def images_per_second(self) -> float | None:
        """Of the whole run, or the median so far where it has not ended."""
        value = self.summary.get("images_per_second")
        seen = sorted(self.curve("images_per_second")[1])
        return float(value) if finite(value) else seen[len(seen) // 2] if seen else None

    @property
    def description(self) -> str:
        """What it is, in a line."""
        config, epochs = self.config, self.config.optim.epochs
        length = f"{epochs} epoch{'s' * (epochs != 1)}"
        part = self.pruning.get("sparsity")
        pruned = f", {part:.0%} of its weights pruned" if finite(part) else ""
        return f"{config.method} on {config.data}, {config.model.backbone}, {length}, seed {config.seed}{pruned}"

    @property
    def peak_memory_mib(self) -> float | None:
        value = self.summary.get("peak_memory_mib")
        return float(value) if finite(value) else max(self.curve("memory_mib")[1], default=None)


def finite(value: Any) -> TypeGuard[float]:
    """Whether a value from a JSON file is a number that can be drawn."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def load_runs(paths: Sequence[Path]) -> list[Run]:
    """The runs, named by folder; by as much of the path as tells them apart where folders share a name."""
    if not paths:
        raise BadInput("a report needs at least one run folder; give the one that `byov train --out` wrote.")
    return [load_run(path, name) for path, name in zip(paths, _names(paths), strict=True)]


def load_run(path: Path, name: str | None = None) -> Run:
    """One run folder; all but its config may be missing."""
    if not (path / "config.yaml").is_file():
        raise BadInput(
            f"{path} is not a run folder: it has no config.yaml; give the one that `byov train --out` wrote."
        )
    config = read_config(path / "config.yaml")
    missing: list[str] = []
    metrics, broken = _read_lines(path / "metrics.jsonl")
    if not metrics:
        missing.append("No line of metrics.jsonl yet, so there are no training curves: training has hardly begun.")
    elif broken:
        missing.append(f"{_lines(broken)} of metrics.jsonl could not be read (cut short by a kill?) and is left out.")
    posterior, broken = _read_lines(path / "posterior.jsonl")
    if not posterior:
        missing.append(
            "No posterior.jsonl yet, so there are no sigma and SNR to show: it is written once an epoch."
            if config.method in BAYESIAN
            else f"No sigma and SNR: the weights of {config.method} are not random."
        )
    elif broken:
        missing.append(f"{_lines(broken)} of posterior.jsonl could not be read (cut short by a kill?) and is left out.")
    results = _read_object(path / "results" / "evaluation.json")
    if not results:
        missing.append(f"Not evaluated yet: `byov evaluate {path} --data {config.data}` adds accuracy and calibration.")
    elif not _bins(results):
        missing.append("The results hold no bins, so there is no reliability diagram.")
    step = results.get("settings", {}).get("step")
    if step is not None and metrics and step < metrics[-1]["step"]:
        missing.append(f"Evaluated at step {step}, but trained on to {metrics[-1]['step']} since: evaluate again.")
    summary = _read_object(path / "summary.json")
    if not summary:
        missing.append("No summary.json: training has not ended; speed and memory are those logged so far.")
    pruning = _read_object(path / "results" / "pruning.json")
    if pruning and not pruning.get("rounds"):
        missing.append(
            "Pruned and not trained since: its curves, speed and memory are those of the run it was made from."
        )
    return Run(
        name=name or path.resolve().name,
        path=path,
        config=config,
        metrics=_merged(metrics, ("step",)),
        posterior=_merged(posterior, ("epoch", "layer")),
        results=results,
        summary=summary,
        pruning=pruning,
        missing=missing,
    )


def _names(paths: Sequence[Path]) -> list[str]:
    parts = [path.resolve().parts for path in paths]
    for depth in range(1, max(map(len, parts)) + 1):
        names = ["/".join(part[-depth:]) for part in parts]
        if len(set(names)) == len(names):
            return names
    raise BadInput("the same run folder is given twice; give each once.")


def _read_lines(path: Path) -> tuple[list[Row], int]:
    """The objects of a JSON-lines file and how many lines are broken: `kill -9` may cut one, the last until resumed."""
    rows: list[Row] = []
    broken = 0
    if not path.is_file():
        return rows, broken
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            row = json.loads(line) if line.strip() else None
        except json.JSONDecodeError:
            row = broken
        if isinstance(row, dict):
            rows.append(row)
        elif row is not None:
            broken += 1
    return rows, broken


def _read_object(path: Path) -> Row:
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return tree if isinstance(tree, dict) else {}


def _merged(rows: list[Row], key: tuple[str, ...]) -> list[Row]:
    """One row a key, in order; should one stand twice, the later line is the one that counts."""
    found: dict[tuple[Any, ...], Row] = {}
    for row in rows:
        if all(name in row for name in key) and finite(row[key[0]]):
            at = tuple(row[name] for name in key)
            found[at] = {**found.get(at, {}), **row}
    return sorted(found.values(), key=lambda row: float(row[key[0]]))


def _bins(results: Row) -> list[tuple[int, float, float]]:
    """The reliability bins of the results: images, mean confidence, accuracy."""
    bins = results.get("bins")
    if not isinstance(bins, list) or not all(isinstance(b, list) and len(b) == 3 and all(map(finite, b)) for b in bins):
        return []
    return [(int(images), float(confidence), float(accuracy)) for images, confidence, accuracy in bins]


def reliability_bins_of(run: Run) -> list[tuple[int, float, float]]:
    """Images, mean confidence and accuracy of each bin; none where the run is not evaluated."""
    return _bins(run.results)


def _lines(count: int) -> str:
    return "One line" if count == 1 else f"{count} lines"
