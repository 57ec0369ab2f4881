"""The summary: a row a run, and below what any encoder has to beat."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from byov.report.elements import Cell, Column, TableRow
from byov.report.run_data import Run, finite

# Rows that are no run: the prefix of their keys in evaluation.json, and their name
REFERENCES = (("untrained.", "untrained encoder"), ("pixels.", "raw pixels"))

COLUMNS = (
    Column("top1", "top-1, %", 1, 1, 100),
    Column("ece", "ECE", 3, -1),
    Column("brier", "Brier", 3, -1),
    Column("nll", "NLL", 3, -1),
    Column("median_sigma", "median σ", 4, 0),
    Column("images_per_second", "images/s", 0, 1),
    Column("peak_memory_mib", "peak MiB", 0, -1),
)


def summary_rows(runs: Sequence[Run]) -> list[TableRow]:
    """A row for each run, the best of each column marked; then the means over draws, and the references."""
    columns = [column.cells([_value(run, column) for run in runs]) for column in COLUMNS]
    rows = [TableRow(run.name, [cells[i] for cells in columns], i) for i, run in enumerate(runs)]
    return rows + [_drawn_row(run) for run in runs if finite(run.results.get("draws.top1"))] + _reference_rows(runs)


def _value(run: Run, column: Column) -> Any:
    if column.key in ("images_per_second", "peak_memory_mib"):
        return getattr(run, column.key)
    return run.results.get(column.key, run.summary.get(column.key))  # training's summary knows the sigma too


def _drawn_row(run: Run) -> TableRow:
    name = f"{run.name}, mean over {run.settings.get('draws', 'its')} draws"
    return TableRow(name, [Cell(column.text(run.results.get(f"draws.{column.key}"))) for column in COLUMNS])


def _reference_rows(runs: Sequence[Run]) -> list[TableRow]:
    rows = []
    for prefix, name in REFERENCES:
        texts = {run.name: [c.text(run.results.get(prefix + c.key)) for c in COLUMNS] for run in runs}
        texts = {run: row for run, row in texts.items() if any(text != "–" for text in row)}
        same = len({tuple(row) for row in texts.values()}) == 1  # runs on the same data share their references
        for run, row in list(texts.items())[: 1 if same else None]:
            rows.append(TableRow(name if same else f"{name} ({run})", [Cell(text) for text in row]))
    return rows
