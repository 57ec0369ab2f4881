"""One self-contained page about one or several runs: their table, their evaluations, and the other sections.

Styles and figures are inside the page; it has no script, no font and no external address. What a run lacks is stated in
words and is never an error. A section is a function from runs to a `Section`, listed in SECTIONS: those about the
evaluation are here, those about training, pruning and settings in `sections`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from markupsafe import Markup
from numpy.typing import NDArray
from torch import Tensor

from byov._core.errors import BadInput
from byov._core.files import write_text
from byov.config import BAYESIAN, same_source
from byov.data.images import ImageSet
from byov.data.sources import open_source
from byov.data.transforms import resized
from byov.evaluation.evaluate import fingerprint
from byov.metrics.ranking import risk_coverage
from byov.report.elements import Cell, Column, Picture, Section, Strip, Table, TableRow, Thumbnail, fill, rows_of
from byov.report.gallery import LOSSLESS_SIDE, data_uri
from byov.report.plots import svg_charts
from byov.report.plots.svg_charts import CellMap, Line
from byov.report.run_data import Run, finite, load_runs
from byov.report.sections.pruning import pruning_section
from byov.report.sections.settings import different_settings, results_table, settings_table
from byov.report.sections.training import monitor_section, posterior_section, training_section

# -------------------------------------------------------------------------------------------------------------- summary


# Rows that are not a run: the prefix of their keys in evaluation.json, and their name
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
    """Make a row per run with the best of each column marked, then the means over draws, then the references."""
    columns = [column.cells([_value(run, column) for run in runs]) for column in COLUMNS]
    names = [run.name + (f", evaluated at {run.earlier_state}" if run.earlier_state else "") for run in runs]
    rows = [TableRow(names[i], [cells[i] for cells in columns], i) for i in range(len(runs))]
    return rows + [_drawn_row(run) for run in runs if finite(run.results.get("draws.top1"))] + _reference_rows(runs)


def _value(run: Run, column: Column) -> Any:
    if column.key in ("images_per_second", "peak_memory_mib"):
        return getattr(run, column.key)
    return run.results.get(column.key, run.summary.get(column.key))  # sigma is also in training's summary


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


# ---------------------------------------------------------------------------------------------------------- reliability


def reliability_section(runs: Sequence[Run]) -> Section:
    note = "Bars: accuracy at that confidence. Marks: mean confidence; a bar below its mark is overconfident."
    pictures = []
    for i, run in enumerate(runs):
        for prefix, what in (("", ""), ("draws.", ", mean over draws")):
            if bins := run.bins(prefix):
                error = run.results.get(f"{prefix}ece")
                title = f"{run.name}{what}" + (f", ECE {error:.3f}" if finite(error) else "")
                svg = svg_charts.reliability(bins, i, f"reliability-{prefix}{i}")
                pictures.append(Picture(title, note, Markup(svg)))
    return Section(
        "Reliability",
        "reliability",
        "Whether probabilities match accuracies: the linear probe on the frozen encoder, on test images.",
        pictures,
        legend=False,
        empty="No run has been evaluated yet, so there is no reliability diagram.",
    )


# ------------------------------------------------------------------------------------------------------- example images


EACH = 8  # images from either end


def example_section(runs: Sequence[Run]) -> Section:
    strips: list[Strip] = []
    notes: list[str] = []
    for run in runs:
        try:
            strips += _strips(run, _test_images(run))
        except (BadInput, OSError) as error:
            notes.append(f"{run.name}: {error}")
    return Section(
        "Most and least certain",
        "examples",
        "Test images from both ends of the ranking. P: percentile among all test images. Framed: the probe is wrong.",
        strips=strips,
        notes=notes if strips else [],
        legend=False,
        empty=" ".join(["No images to show.", *notes]),
    )


def _test_images(run: Run) -> ImageSet:
    """The test images of the evaluation; raises BadInput if they are not available."""
    if f"score.{run.default_score}" not in run.images:
        raise BadInput(f"there are no scores per test image yet: `byov evaluate {run.shell_path}` adds them.")
    source = open_source(str(run.settings.get("data", run.config.data)), run.config.image_size)
    test = source.load("test", say=lambda sentence: None)
    if test.labels is None or fingerprint(test) != run.evaluated_images:
        raise BadInput(
            f"the images of {source.name} have changed since: `byov evaluate {run.shell_path}` scores them again."
        )
    return test


def _strips(run: Run, test: ImageSet) -> list[Strip]:
    score = run.images[f"score.{run.default_score}"]
    order = score.argsort(stable=True)
    each = min(EACH, len(order) // 2)
    percentile = torch.empty_like(score)
    percentile[order] = (torch.arange(len(order), dtype=score.dtype) + 0.5) * (100 / len(order))
    wrong = run.images["means.top1"] == 0
    note = f"Score: {run.default_score}, higher is less certain."
    ends = {"least certain": order.flip(0)[:each], "most certain": order[:each]}
    return [
        Strip(f"{run.name}, {end}", note, [_thumbnail(test, int(i), score, percentile, wrong) for i in chosen])
        for end, chosen in ends.items()
    ]


def _thumbnail(test: ImageSet, i: int, score: Tensor, percentile: Tensor, wrong: Tensor) -> Thumbnail:
    assert test.labels is not None
    label = int(test.labels[i])
    image = test.images[i : i + 1]
    small = resized(image, min(LOSSLESS_SIDE, max(image.shape[2:])))
    return Thumbnail(
        data_uri(small[0].numpy()),
        test.classes[label] if test.classes else f"class {label}",
        f"{float(score[i]):.3g}",
        f"P{float(percentile[i]):.1f}",
        bool(wrong[i]),
    )


# --------------------------------------------------------------------------------------------------- uncertainty scores


SELECTIVE = (
    Column("error_auroc", "misclassifications, AUROC", 3, 1),
    Column("aurc", "AURC", 3, -1),
    Column("accuracy_at_80", "top-1 of the most certain 80%", 1, 1, 100),
    Column("r_auroc", "wrong neighbours, AUROC", 3, 1),
)
POINTS = 50  # of a risk-coverage curve


def selective_section(runs: Sequence[Run]) -> Section:
    return Section(
        "Selective prediction",
        "selective",
        "How much better the predictions become when the least certain images are left out. Errors are those of the"
        " probe at the means; label-free scores need no labels.",
        [picture for picture in [_risk_picture(runs)] if picture],
        [table for run in runs if (table := _selective_table(run))],
        empty="No run has been evaluated yet, so it is not known whether its uncertainty finds errors.",
    )


def outside_section(runs: Sequence[Run]) -> Section:
    return Section(
        "Out-of-distribution detection",
        "outside",
        "Whether an uncertainty distinguishes images of other sources from the test images: AUROC, 0.5 is chance.",
        tables=[table for run in runs if (table := _outside_table(run))],
        notes=[
            f"{run.name} has no such results: `byov evaluate {run.shell_path} --ood SOURCE` adds them."
            for run in runs
            if not _outside_table(run)
        ],
        legend=False,
        empty=f"No run has been tested on other sources: `byov evaluate {runs[0].shell_path} --ood SOURCE` does that.",
    )


def _risk_picture(runs: Sequence[Run]) -> Picture | None:
    lines = []
    for i, run in enumerate(runs):
        scores = dict.fromkeys(["score.max_softmax", f"score.{run.default_score}"])
        for name in scores:
            if name in run.images and "means.top1" in run.images:
                curve = risk_coverage(run.images[name], run.images["means.top1"] == 0)
                # the first tenth depends on a handful of images
                picked = [round(len(curve.risk) * (0.1 + 0.9 * k / POINTS)) - 1 for k in range(POINTS + 1)]
                picked = sorted({max(0, at) for at in picked})
                x, y = curve.coverage[picked].tolist(), curve.risk[picked].tolist()
                lines.append(Line(x, y, i, thin=name != "score.max_softmax"))
    note = "Error rate among the most certain images. Strong: the probe's top probability. Thin: the label-free score."
    svg = svg_charts.curves(lines, "risk", "share of the images answered") if lines else ""
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
    """Keys as words, so that a narrow page can break them."""
    return [name.replace("_", " ") for name in names]


# --------------------------------------------------------------------------------------------------------------- shifts


SEVERITIES = ("0", "1", "2", "3", "4", "5")  # 0: the unchanged test images
MEASURES = (("ece", "ECE", -1), ("top1", "top-1, %", 1))  # key, name, and which way is better

Look = Callable[[str], Any]  # from a key of evaluation.json to its value


@dataclass(frozen=True)
class Baseline:
    name: str
    difference: Look


def shift_section(runs: Sequence[Run]) -> Section:
    tested = [run for run in runs if shifts_of(run)]
    ranges = {key: _range([_grid(run.results.get, shifts_of(run), key) for run in tested]) for key, _, _ in MEASURES}
    pictures = []
    for run in tested:
        baseline = baseline_of(run, runs)
        compared = f", and minus those of {baseline.name}: purple is better, orange worse" if baseline else ""
        note = f"By severity; 0 is no shift{compared}. All at the means."
        svg = svg_charts.cell_maps(shifts_of(run), SEVERITIES, _maps(run, baseline, ranges), f"shifts-{run.name}")
        pictures.append(Picture(run.name, note, Markup(svg), wide=True))
    return Section(
        "Shifts",
        "shifts",
        "Accuracy and calibration on corrupted test images; nothing is fitted again.",
        pictures,
        legend=False,
        notes=[
            f"{run.name} has no such results: `byov evaluate {run.shell_path} --shifts` adds them."
            for run in runs
            if run not in tested
        ],
        empty=f"No run has been evaluated under shifts: `byov evaluate {runs[0].shell_path} --shifts` adds a heat map.",
    )


def shifts_of(run: Run) -> list[str]:
    """List the shifts of the results, in their order."""
    keys = [key.split(".") for key in run.results if key.startswith("shifts.")]
    return list(dict.fromkeys(parts[1] for parts in keys if len(parts) == 4 and parts[3] in ("ece", "top1")))


def baseline_of(run: Run, runs: Sequence[Run]) -> Baseline | None:
    """Find the run that `--baseline` named, or else the page's first deterministic run on the same data."""
    if any(key.startswith("baseline.shifts.") for key in run.results):
        name = Path(str(run.settings.get("baseline", {}).get("run", "the baseline"))).name
        return Baseline(name, lambda key: run.results.get(f"baseline.{key}"))
    plain = [
        r
        for r in runs
        if r.config.method not in BAYESIAN and same_source(r.config.data, run.config.data) and shifts_of(r)
    ]
    if not plain or plain[0] is run:
        return None
    other = plain[0]

    def difference(key: str) -> float | None:
        own, theirs = run.results.get(key), other.results.get(key)
        return own - theirs if finite(own) and finite(theirs) else None

    return Baseline(other.name, difference)


def _maps(run: Run, baseline: Baseline | None, ranges: dict[str, tuple[float, float]]) -> list[CellMap]:
    shifts = shifts_of(run)
    maps = [CellMap(name, _grid(run.results.get, shifts, key), *ranges[key]) for key, name, _ in MEASURES]
    for key, name, better in MEASURES if baseline else ():
        assert baseline is not None
        values = _grid(baseline.difference, shifts, key)
        _, most = _range([np.abs(values)])
        maps.append(CellMap(f"{name}, difference", values, -most, most, better=better))
    return maps


def _grid(look: Look, shifts: Sequence[str], key: str) -> NDArray[np.float64]:
    """(shifts, severities); accuracies in percent; NaN where there is no number."""
    scale = 100.0 if key == "top1" else 1.0
    values = [[look(key if s == "0" else f"shifts.{name}.{s}.{key}") for s in SEVERITIES] for name in shifts]
    return np.array([[scale * v if finite(v) else np.nan for v in row] for row in values])


def _range(grids: Sequence[NDArray[np.float64]]) -> tuple[float, float]:
    """Smallest and largest value over all runs, so that colours can be compared."""
    known = np.concatenate([grid[np.isfinite(grid)] for grid in grids]) if grids else np.empty(0)
    return (float(known.min()), float(known.max())) if known.size else (0.0, 1.0)


# ------------------------------------------------------------------------------------------------------------- the page


SECTIONS: tuple[Callable[[Sequence[Run]], Section], ...] = (
    reliability_section,
    example_section,
    selective_section,
    outside_section,
    shift_section,
    training_section,
    monitor_section,
    posterior_section,
    pruning_section,
)


def write_report(runs: Sequence[Path], out: Path) -> Path:
    """Write one self-contained HTML page about one or several runs.

    Args:
        runs: Run folders, in the order of the page.
        out: The page; it is written whole or not at all.

    Returns:
        The path of the page.

    Raises:
        BadInput: If a folder is not a run, or `out` is a folder.

    Example:
        >>> byov.write_report([Path("runs/mine")], Path("report.html")).name
        'report.html'
    """
    if out.is_dir():
        raise BadInput(f"{out} is a folder: give the name of the page, such as {out / 'report.html'}.")
    page = render(load_runs([Path(run) for run in runs]))
    write_text(out, page)
    return out


def render(runs: Sequence[Run]) -> str:
    """Return the page as HTML."""
    sections = [section(runs) for section in SECTIONS]
    return fill(
        "template.html.j2",
        runs=runs,
        title=" · ".join(run.name for run in runs),
        legend=[_look(run, i) for i, run in enumerate(runs)],
        columns=COLUMNS,
        summary=summary_rows(runs),
        outdated=[run.outdated for run in runs if run.outdated],
        sections=[section for section in sections if section.filled],
        empty=[(section.title, section.empty) for section in sections if not section.filled],
        different=different_settings(runs),
        settings=settings_table(runs),
        results=results_table(runs),
        missing=[(run.name, run.missing) for run in runs if run.missing],
    )


def _look(run: Run, i: int) -> dict[str, str | int]:
    """Name, colour and dash of a run, the same in all figures."""
    dash = svg_charts.CSS_DASHES[i % len(svg_charts.CSS_DASHES)]
    return {"name": run.name, "slot": i % svg_charts.SERIES, "dash": dash}
