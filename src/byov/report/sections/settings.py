"""Settings and results, key by key: what differs, and all of them in a fold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from byov.config import Config, flatten, to_dict
from byov.report.run_data import Run


@dataclass(frozen=True)
class KeyRow:
    key: str
    values: list[str]
    differs: bool


@dataclass(frozen=True)
class KeyTable:
    caption: str
    columns: list[str]
    rows: list[KeyRow]


def settings_table(runs: Sequence[Run]) -> KeyTable:
    return KeyTable("config.yaml", [run.name for run in runs], comparison([_settings(run.config) for run in runs]))


def different_settings(runs: Sequence[Run]) -> KeyTable:
    """List what differs between the runs, or between a single run and the defaults."""
    alone = len(runs) == 1
    trees = [_settings(run.config) for run in runs] + ([_settings(Config())] if alone else [])
    rows = [row for row in comparison(trees) if row.differs]
    names = [run.name for run in runs] + (["default"] if alone else [])
    return KeyTable("What is not the default" if alone else "What differs", names, rows)


def results_table(runs: Sequence[Run]) -> KeyTable:
    trees = [_flat_results(run) for run in runs]
    return KeyTable("results/evaluation.json", [run.name for run in runs], comparison(trees))


def comparison(trees: Sequence[dict[str, Any]]) -> list[KeyRow]:
    """List the keys of all trees with each tree's value, and whether they differ."""
    rows = []
    for key in dict.fromkeys(key for tree in trees for key in tree):
        values = [_plain(tree.get(key)) for tree in trees]
        rows.append(KeyRow(key, values, len(set(values)) > 1))
    return rows


def _settings(config: Config) -> dict[str, Any]:
    return flatten(to_dict(config))


def _plain(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, list):
        return ", ".join(_plain(item) for item in value)
    return "–" if value is None else str(value)


def _flat_results(run: Run) -> dict[str, Any]:
    return {key: value for key, value in flatten(run.results).items() if key != "bins" and not key.endswith(".bins")}
