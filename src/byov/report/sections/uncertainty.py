"""What an uncertainty is worth: risk against coverage, the errors it finds, images of another kind."""

from __future__ import annotations

import re
from collections.abc import Sequence

from markupsafe import Markup

from byov.metrics.ranking import risk_coverage
from byov.report.elements import Cell, Column, Picture, Section, Table, rows_of
from byov.report.plots import svg_charts
from byov.report.plots.svg_charts import Line
from byov.report.run_data import Run

SELECTIVE = (
    Column("error_auroc", "finds errors (AUROC)", 3, 1),
    Column("aurc", "AURC", 3, -1),
    Column("accuracy_at_80", "top-1 of the surest 80%", 1, 1, 100),
    Column("r_auroc", "finds wrong neighbours", 3, 1),
)
POINTS = 50  # of a risk-coverage curve


def selective_section(runs: Sequence[Run]) -> Section:
    return Section(
        "Selective prediction",
        "selective",
        "Were the least sure images left out, how much better would the rest be? Errors are those of the probe at the"
        " means; scores called label free need no labels.",
        [picture for picture in [_risk_picture(runs)] if picture],
        [table for run in runs if (table := _selective_table(run))],
        empty="No run is evaluated, so there is no telling whether its uncertainty finds errors.",
    )


def outside_section(runs: Sequence[Run]) -> Section:
    """Out-of-distribution detection: AUROC by score and source."""
    return Section(
        "Images of another kind",
        "outside",
        "Whether an uncertainty tells images of other sources from the test images: AUROC, 0.5 is chance.",
        tables=[table for run in runs if (table := _outside_table(run))],
        notes=[
            f"{run.name} has none: `byov evaluate {run.path} --ood SOURCE` adds them."
            for run in runs
            if not _outside_table(run)
        ],
        legend=False,
        empty=f"No run is tested on images of another kind: `byov evaluate {runs[0].path} --ood SOURCE` does that.",
    )


def _risk_picture(runs: Sequence[Run]) -> Picture | None:
    lines = []
    for i, run in enumerate(runs):
        scores = dict.fromkeys(["score.max_softmax", f"score.{run.default_score}"])
        for name in scores:
            if name in run.images and "means.top1" in run.images:
                curve = risk_coverage(run.images[name], run.images["means.top1"] == 0)
                # the first tenth hangs on a handful of images
                picked = [round(len(curve.risk) * (0.1 + 0.9 * k / POINTS)) - 1 for k in range(POINTS + 1)]
                picked = sorted({max(0, at) for at in picked})
                x, y = curve.coverage[picked].tolist(), curve.risk[picked].tolist()
                lines.append(Line(x, y, i, thin=name != "score.max_softmax"))
    note = "Part of wrong answers among the surest. Strong: by the probe's top probability. Thin: the label-free score."
    svg = svg_charts.curves(lines, "risk", "part of the images answered") if lines else ""
    return Picture("Risk and coverage", note, Markup(svg)) if lines else None


def _selective_table(run: Run) -> Table | None:
    keys = [key.split(".") for key in run.results if key.startswith("selective.")]
    scores = list(dict.fromkeys(parts[1] for parts in keys if len(parts) == 3))
    columns = [c.cells([run.results.get(f"selective.{score}.{c.key}") for score in scores]) for c in SELECTIVE]
    titles = [column.title for column in SELECTIVE]
    return (
        Table(run.name, "Best of each column underlined.", titles, rows_of(_words(scores), columns)) if scores else None
    )


def _outside_table(run: Run) -> Table | None:
    found = [match for key in run.results if (match := re.fullmatch(r"ood\.([^.]+)\.([^.]+)\.auroc", key))]
    sources, scores = (list(dict.fromkeys(match[group] for match in found)) for group in (1, 2))
    columns: list[list[Cell]] = []
    for source in sources:
        column = Column("auroc", source, 3, 1)
        columns.append(column.cells([run.results.get(f"ood.{source}.{score}.auroc") for score in scores]))
    return (
        Table(run.name, "AUROC; best of each column underlined.", sources, rows_of(_words(scores), columns))
        if found
        else None
    )


def _words(names: Sequence[str]) -> list[str]:
    """Keys as words, which a narrow page can break."""
    return [name.replace("_", " ") for name in names]
