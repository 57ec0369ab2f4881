"""A run folder as the report reads it: what it holds, what is missing, and why."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

from torch import Tensor

from byov._core.cache import read_entry
from byov._core.errors import BadInput
from byov._core.files import read_json
from byov.config import BAYESIAN, Config, read_config
from byov.evaluation.evaluate import is_current
from byov.evaluation.predictive import LABEL_FREE
from byov.runs import checkpoints
from byov.runs.folder import RunFolder, read_log
from byov.scoring.scores import DEFAULT, DEFAULT_AT_MEANS

Row = dict[str, Any]


@dataclass(frozen=True)
class Run:
    """Everything that a page shows about one run."""

    name: str
    path: Path
    config: Config
    metrics: list[Row]
    """One row per log step, in order."""
    posterior: list[Row]
    """One row per layer and epoch, in order of epochs."""
    results: Row
    """`results/evaluation.json`; empty if the run is not evaluated."""
    images: dict[str, Tensor]
    """Scores and measures per test image, by name, from `results/evaluation.safetensors`."""
    evaluated_images: str
    """Fingerprint of these images."""
    summary: Row
    """`summary.json`; empty if training has not ended."""
    pruning: Row
    """`results/pruning.json`; empty unless `byov prune` wrote the run."""
    step: int | None
    """Of the last checkpoint; None if it cannot be read."""
    current: bool
    """Whether the results belong to the weights that the run has now; True where this is not known."""
    missing: list[str]
    """One sentence for each thing that is missing."""

    @property
    def shell_path(self) -> str:
        """The path as a command takes it."""
        return shlex.quote(str(self.path))

    @property
    def earlier_state(self) -> str:
        """What the evaluation is of, if not of the last checkpoint: `step X of Y`; or else empty."""
        if self.current:
            return ""
        evaluated = self.settings.get("step")
        return "the same step with other weights" if evaluated == self.step else f"step {evaluated} of {self.step}"

    @property
    def outdated(self) -> str:
        """A sentence if the evaluation is of an earlier state of the run, or else empty."""
        if not self.earlier_state:
            return ""
        return (
            f"The evaluation of {self.name} is of an earlier state of the run ({self.earlier_state}): "
            f"`byov evaluate {self.shell_path}` updates it."
        )

    def curve(self, key: str) -> tuple[list[float], list[float]]:
        """Return epochs and values of one column of the metrics, where it was logged and finite."""
        rows = [row for row in self.metrics if finite(row.get(key)) and finite(row.get("epoch"))]
        return [float(row["epoch"]) for row in rows], [float(row[key]) for row in rows]

    @property
    def settings(self) -> Row:
        """The settings of the evaluation."""
        settings = self.results.get("settings")
        return settings if isinstance(settings, dict) else {}

    @property
    def default_score(self) -> str:
        """The uncertainty of `byov score` if the evaluation has it, or else that of the top probability."""
        label_free = (f"{LABEL_FREE}{name}" for name in (DEFAULT, DEFAULT_AT_MEANS))
        return next((name for name in label_free if f"score.{name}" in self.images), "max_softmax")

    def bins(self, prefix: str = "") -> list[tuple[int, float, float]]:
        """Return images, mean confidence and accuracy of each bin; empty if the run is not evaluated."""
        return _bins(self.results, prefix)

    @property
    def images_per_second(self) -> float | None:
        """Of the whole run, or the median so far if it has not ended."""
        value = self.summary.get("images_per_second")
        seen = sorted(self.curve("images_per_second")[1])
        return float(value) if finite(value) else seen[len(seen) // 2] if seen else None

    @property
    def description(self) -> str:
        """One line about the run."""
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
    """Return whether a value from a JSON file is a finite number."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def load_runs(paths: Sequence[Path]) -> list[Run]:
    """Load runs, each named by its folder, or by as much of the path as distinguishes them."""
    if not paths:
        raise BadInput("a report needs at least one run folder: give one that `byov train --out` wrote.")
    return [load_run(path, name) for path, name in zip(paths, _names(paths), strict=True)]


def load_run(path: Path, name: str | None = None) -> Run:
    """Load one run folder; everything but its config may be missing."""
    folder = RunFolder(path)
    if not folder.config.is_file():
        raise BadInput(f"{path} is not a run folder: it has no config.yaml; give one that `byov train --out` wrote.")
    metrics, posterior = read_log(folder.metrics), read_log(folder.posterior)
    rows = read_entry(folder.results / "evaluation.safetensors")
    results = _read_object(folder.results / "evaluation.json")
    step, current = _checkpoint(folder, results)
    run = Run(
        name=name or path.resolve().name,
        path=path,
        config=read_config(folder.config),
        metrics=_merged(metrics.rows, ("step",)),
        posterior=_merged(posterior.rows, ("epoch", "layer")),
        results=results,
        images={} if rows is None else {key: row for key, row in rows.tensors.items() if row.isfinite().all()},
        evaluated_images="" if rows is None else str(rows.header.get("images")),
        summary=_read_object(folder.summary),
        pruning=_read_object(folder.results / "pruning.json"),
        step=step,
        current=current,
        missing=[],
    )
    run.missing.extend([*_missing_logs(run, metrics.broken, posterior.broken), *_missing_results(run)])
    return run


def _missing_logs(run: Run, metrics_broken: int, posterior_broken: int) -> Iterator[str]:
    cut = "could not be read (was the run killed?) and is left out."
    method = run.config.method
    if not run.metrics:
        yield "metrics.jsonl has no line yet, so there are no training curves: training has just begun."
    elif metrics_broken:
        yield f"{_lines(metrics_broken)} of metrics.jsonl {cut}"
    if not run.posterior and method in BAYESIAN:
        yield "There is no posterior.jsonl yet, so sigma and SNR are not shown: it is written once per epoch."
    elif not run.posterior:
        yield f"No sigma and SNR: the weights of {method} are not random."
    elif posterior_broken:
        yield f"{_lines(posterior_broken)} of posterior.jsonl {cut}"
    if not run.summary:
        yield "There is no summary.json: training has not ended; speed and memory are those logged so far."
    if run.pruning and not run.pruning.get("rounds"):
        yield "Pruned and not trained since: curves, speed and memory are those of the run it was made from."


def _missing_results(run: Run) -> Iterator[str]:
    if not run.results:
        command = f"byov evaluate {run.shell_path} --data {shlex.quote(run.config.data)}"
        yield f"Not evaluated yet: `{command}` adds accuracy and calibration."
    elif not run.bins():
        yield "The results have no bins, so there is no reliability diagram."


def _names(paths: Sequence[Path]) -> list[str]:
    parts = [path.resolve().parts for path in paths]
    for depth in range(1, max(map(len, parts)) + 1):
        names = ["/".join(part[-depth:]) for part in parts]
        if len(set(names)) == len(names):
            return names
    raise BadInput("the same run folder is given twice: give each once.")


def _checkpoint(folder: RunFolder, results: Row) -> tuple[int | None, bool]:
    """The step of the last checkpoint, and whether the results are of its weights."""
    try:
        step = int(checkpoints.state(folder.checkpoint)["step"])
        known = isinstance(settings := results.get("settings"), dict) and "step" in settings
        return step, not known or is_current(results, folder.path)
    except (BadInput, KeyError):
        return None, True


def _read_object(path: Path) -> Row:
    try:
        return read_json(path)
    except (OSError, ValueError):
        return {}


def _merged(rows: list[Row], key: tuple[str, ...]) -> list[Row]:
    """One row per key, in order; of repeated rows, later values win."""
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
