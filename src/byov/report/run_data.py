"""A run folder as the report sees it: what is there, what is not, and why."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

from torch import Tensor

from byov._core.errors import BadInput
from byov.config import BAYESIAN, Config, read_config
from byov.evaluation.partial_results import read_section
from byov.evaluation.per_image_uncertainty import LABEL_FREE
from byov.runs.folder import RunFolder, read_log
from byov.scoring.candidates import DEFAULT, DEFAULT_AT_MEANS

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
    images: dict[str, Tensor]
    """A number for each test image, by name, from `results/evaluation.safetensors`; none without that file."""
    evaluated_images: str
    """Fingerprint of these images."""
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
    def settings(self) -> Row:
        """What the results were made with."""
        settings = self.results.get("settings")
        return settings if isinstance(settings, dict) else {}

    @property
    def default_score(self) -> str:
        """The uncertainty that `byov score` would give, where the evaluation has it; else the top probability's."""
        label_free = (f"{LABEL_FREE}{name}" for name in (DEFAULT, DEFAULT_AT_MEANS))
        return next((name for name in label_free if f"score.{name}" in self.images), "max_softmax")

    def bins(self, prefix: str = "") -> list[tuple[int, float, float]]:
        """Images, mean confidence and accuracy of each bin; none where the run is not evaluated."""
        return _bins(self.results, prefix)

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
    folder = RunFolder(path)
    if not folder.config.is_file():
        raise BadInput(
            f"{path} is not a run folder: it has no config.yaml; give the one that `byov train --out` wrote."
        )
    metrics, posterior = read_log(folder.metrics), read_log(folder.posterior)
    rows = read_section(folder.results / "evaluation.safetensors")
    run = Run(
        name=name or path.resolve().name,
        path=path,
        config=read_config(folder.config),
        metrics=_merged(metrics.rows, ("step",)),
        posterior=_merged(posterior.rows, ("epoch", "layer")),
        results=_read_object(folder.results / "evaluation.json"),
        images={} if rows is None else {key: row for key, row in rows.images.items() if row.isfinite().all()},
        evaluated_images="" if rows is None else str(rows.measures.get("images")),
        summary=_read_object(folder.summary),
        pruning=_read_object(folder.results / "pruning.json"),
        missing=[],
    )
    run.missing.extend([*_missing_logs(run, metrics.broken, posterior.broken), *_missing_results(run)])
    return run


def _missing_logs(run: Run, metrics_broken: int, posterior_broken: int) -> Iterator[str]:
    cut = "could not be read (cut short by a kill?) and is left out."
    method = run.config.method
    if not run.metrics:
        yield "No line of metrics.jsonl yet, so there are no training curves: training has hardly begun."
    elif metrics_broken:
        yield f"{_lines(metrics_broken)} of metrics.jsonl {cut}"
    if not run.posterior and method in BAYESIAN:
        yield "No posterior.jsonl yet, so there are no sigma and SNR to show: it is written once an epoch."
    elif not run.posterior:
        yield f"No sigma and SNR: the weights of {method} are not random."
    elif posterior_broken:
        yield f"{_lines(posterior_broken)} of posterior.jsonl {cut}"
    if not run.summary:
        yield "No summary.json: training has not ended; speed and memory are those logged so far."
    if run.pruning and not run.pruning.get("rounds"):
        yield "Pruned and not trained since: its curves, speed and memory are those of the run it was made from."


def _missing_results(run: Run) -> Iterator[str]:
    if not run.results:
        yield f"Not evaluated yet: `byov evaluate {run.path} --data {run.config.data}` adds accuracy and calibration."
    elif not run.bins():
        yield "The results hold no bins, so there is no reliability diagram."
    step = run.settings.get("step")
    if step is not None and run.metrics and step < run.metrics[-1]["step"]:
        yield f"Evaluated at step {step}, but trained on to {run.metrics[-1]['step']} since: evaluate again."


def _names(paths: Sequence[Path]) -> list[str]:
    parts = [path.resolve().parts for path in paths]
    for depth in range(1, max(map(len, parts)) + 1):
        names = ["/".join(part[-depth:]) for part in parts]
        if len(set(names)) == len(names):
            return names
    raise BadInput("the same run folder is given twice; give each once.")


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


def _bins(results: Row, prefix: str) -> list[tuple[int, float, float]]:
    """The reliability bins of the results: images, mean confidence, accuracy."""
    bins = results.get(f"{prefix}bins")
    if not isinstance(bins, list) or not all(isinstance(b, list) and len(b) == 3 and all(map(finite, b)) for b in bins):
        return []
    return [(int(images), float(confidence), float(accuracy)) for images, confidence, accuracy in bins]


def _lines(count: int) -> str:
    return "One line" if count == 1 else f"{count} lines"
