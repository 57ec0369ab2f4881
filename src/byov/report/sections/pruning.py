"""The section about pruning: accuracy and features at each sparsity, and what pruning saves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from markupsafe import Markup

from byov.config import BAYESIAN
from byov.report.elements import Cell, Picture, Section, Table, TableRow
from byov.report.plots import svg_charts
from byov.report.plots.svg_charts import Line
from byov.report.run_data import Run, finite

PANELS = (  # title, keys of a point of the curve (all but the first are drawn thin), how to read it
    ("Top-1 when pruned", ("top1", "refitted.top1"), "Strong: the probe of the unpruned encoder. Thin: a new probe."),
    ("ECE when pruned", ("ece", "refitted.ece"), "Strong: the probe of the unpruned encoder. Thin: a new probe."),
    ("Features when pruned", ("cosine",), "Mean cosine between an image's features before and after."),
)
COLUMNS = ("by", "of each", "sparsity", "top-1, %", "unpruned", "bytes, zlib", "unpruned", "images/s", "unpruned")


def pruning_section(runs: Sequence[Run]) -> Section:
    pruned = {i: run for i, run in enumerate(runs) if run.pruning.get("curve")}
    return Section(
        "Pruning",
        "pruning",
        "The least important weights are set to 0, without training; a single dot is the result of further training.",
        [p for panel in PANELS if (p := _picture(pruned, *panel))],
        [Table("What it saves", "Of the encoder, as pruned.", list(COLUMNS), _rows(pruned))] if pruned else [],
        empty=f"None of these runs is pruned: `{_command(runs[0])}` makes a pruned run, with a curve.",
    )


def _command(run: Run) -> str:
    criterion = "snr" if run.config.method in BAYESIAN else "magnitude"
    return f"byov prune {run.shell_path} --by {criterion} --sparsity 0.5 --out RUN2"


def _picture(pruned: dict[int, Run], title: str, keys: tuple[str, ...], note: str) -> Picture | None:
    lines = []
    for i, run in pruned.items():
        for key in keys:
            lines += [_line(run.pruning["curve"], key, i, thin=key != keys[0])]
            lines += [_line([row], key, i, thin=key != keys[0]) for row in run.pruning.get("rounds", [])]
    lines = [line for line in lines if line.x]
    return Picture(title, note, Markup(svg_charts.curves(lines, title, "sparsity"))) if lines else None


def _line(rows: Sequence[dict[str, Any]], key: str, slot: int, thin: bool) -> Line:
    rows = [row for row in rows if finite(row.get("sparsity")) and finite(row.get(key))]
    return Line([row["sparsity"] for row in rows], [row[key] for row in rows], slot, thin)


def _rows(pruned: dict[int, Run]) -> list[TableRow]:
    rows = []
    for i, run in pruned.items():
        found = run.pruning
        settings, size, speed = (found.get(key, {}) for key in ("settings", "bytes", "images_per_second"))
        top1 = (found.get("top1"), found["curve"][0].get("top1"))
        cells = [
            str(settings.get("by", "–")),
            str(settings.get("scope", "–")),
            _number(found.get("sparsity"), ".0%"),
            *(_number(value, ".1f", 100) for value in top1),
            *(_number(size.get(f"{key}_compressed"), ",.0f") for key in ("pruned", "unpruned")),
            *(_number(speed.get(key), ",.0f") for key in ("pruned", "unpruned")),
        ]
        rows.append(TableRow(run.name, [Cell(text) for text in cells], i))
    return rows


def _number(value: Any, form: str, scale: float = 1) -> str:
    return format(value * scale, form) if finite(value) else "–"
