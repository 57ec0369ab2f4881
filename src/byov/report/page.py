"""One self-contained page about one or several runs: load the runs, draw the figures, fill the template.

The page needs nothing but itself: styles and figures are inside, no script, no font, no address. What a run does not
hold is said in words, never an error.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
from markupsafe import Markup, escape

from byov.config import flatten, to_dict
from byov.errors import BadInput
from byov.files import write_text
from byov.report import figures
from byov.report.figures import Line
from byov.report.run import Run, finite, load_runs, reliability_bins_of

# Rows of the summary that are no run: the prefix of their keys in evaluation.json, and their name
REFERENCES = (("untrained.", "untrained encoder"), ("pixels.", "raw pixels"))


@dataclass(frozen=True)
class Column:
    """A column of the summary table."""

    key: str
    title: str
    digits: int
    better: int
    """1: higher is better, -1: lower is, 0: neither."""
    scale: float = 1.0
    """Accuracies are stored as parts of 1 and read as percent."""


COLUMNS = (
    Column("top1", "top-1, %", 1, 1, 100),
    Column("ece", "ECE", 3, -1),
    Column("brier", "Brier", 3, -1),
    Column("nll", "NLL", 3, -1),
    Column("median_sigma", "median σ", 4, 0),
    Column("images_per_second", "images/s", 0, 1),
    Column("peak_memory_mib", "peak MiB", 0, -1),
)


@dataclass(frozen=True)
class Cell:
    text: str
    best: bool = False


@dataclass(frozen=True)
class TableRow:
    name: str
    cells: list[Cell]
    slot: int | None = None
    """The run's colour; None for a reference."""


@dataclass(frozen=True)
class Picture:
    title: str
    note: str
    svg: Markup
    wide: bool = False


@dataclass(frozen=True)
class Section:
    title: str
    anchor: str
    intro: str
    pictures: list[Picture]
    legend: bool = True
    empty: str = ""
    """What to say where there is no picture."""


@dataclass(frozen=True)
class Panel:
    """A curve over training and how to read it."""

    key: str
    title: str
    note: str
    more: tuple[str, ...] = field(default=())
    """Further columns in the same panel, drawn thin."""


TRAINING = (
    Panel("loss", "Loss", "What is minimised: the data term plus the weighted KL."),
    Panel(
        "nll",
        "Data term",
        "Student against teacher, both directions: 0 is equal, 4 unrelated. Supervised: cross-entropy.",
    ),
    Panel("kl", "KL to the prior", "Summed over the random weights, before it is weighted."),
    Panel(
        "kl_in_loss",
        "KL's share of the loss",
        "Loss minus data term: what the KL weighs after β and temperature.",
    ),
    Panel("beta", "β", "Weight of the KL over training."),
    Panel("tau", "τ", "Decay of the teacher's moving average; at 1 the teacher stands still."),
    Panel("lr", "Learning rates", "Of the means; thin: of the log-variances.", ("log_variance_lr",)),
    Panel("grad_norm", "Gradient norm", "Of the means, before clipping. Spikes are unstable steps."),
)
MONITORS = (
    Panel(
        "feature_std",
        "Feature spread",
        "Of the directions of the encoder's features. 1: they fill the sphere; falling to 0: all images look alike.",
    ),
    Panel(
        "projection_std", "Projection spread", "The same after the projector. Near 1 is healthy; at 0 it has collapsed."
    ),
    Panel("effective_rank", "Effective rank", "Dimensions the features really use. Near 1: collapse to a line."),
    Panel("teacher_moved", "Teacher moved", "How far a step moves the teacher. It shrinks to 0 as τ goes to 1."),
    Panel(
        "knn",
        "Online kNN",
        "Accuracy of a nearest-neighbour vote, with no training. It should rise, and above the untrained.",
    ),
    Panel(
        "images_per_second",
        "Throughput",
        "Images a second. Dips are checkpoints, kNN checks, or another job on the machine.",
    ),
    Panel("memory_mib", "Memory", "MiB of the process. It should be flat; a slope is a leak."),
)


def write_report(runs: Sequence[Path], out: Path) -> Path:
    """Writes the page about these run folders to `out`, whole or not at all."""
    if out.is_dir():
        raise BadInput(f"{out} is a folder; give the name of the page, such as {out / 'report.html'}.")
    page = render(load_runs([Path(run) for run in runs]))
    write_text(out, page)
    return out


def render(runs: Sequence[Run]) -> str:
    """The page as HTML text."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters["code_spans"] = _code_spans
    return environment.get_template("template.html.j2").render(
        runs=runs,
        title=" · ".join(run.name for run in runs),
        legend=[{"name": run.name, "slot": _slot(i), "dash": _dash(i)} for i, run in enumerate(runs)],
        columns=COLUMNS,
        summary=summary_rows(runs),
        sections=[reliability_section(runs), training_section(runs), monitor_section(runs), posterior_section(runs)],
        settings=comparison([flatten(to_dict(run.config)) for run in runs]),
        results=comparison([_flat_results(run) for run in runs]),
        missing=[(run.name, run.missing) for run in runs if run.missing],
    )


def summary_rows(runs: Sequence[Run]) -> list[TableRow]:
    """A row for each run, the best of each column marked; below, what any encoder has to beat."""
    values = [[_value(run, column) for column in COLUMNS] for run in runs]
    rows = []
    for i, run in enumerate(runs):
        best = [_is_best(values, i, j) for j in range(len(COLUMNS))]
        cells = [Cell(_text(v, c), b) for v, c, b in zip(values[i], COLUMNS, best, strict=True)]
        rows.append(TableRow(run.name, cells, _slot(i)))
    return rows + _reference_rows(runs)


def _reference_rows(runs: Sequence[Run]) -> list[TableRow]:
    rows = []
    for prefix, name in REFERENCES:
        texts = {run.name: [_text(run.results.get(prefix + c.key), c) for c in COLUMNS] for run in runs}
        texts = {run: row for run, row in texts.items() if any(text != "–" for text in row)}
        same = len({tuple(row) for row in texts.values()}) == 1  # runs on the same data share their references
        for run, row in list(texts.items())[: 1 if same else None]:
            rows.append(TableRow(name if same else f"{name} ({run})", [Cell(text) for text in row]))
    return rows


def _value(run: Run, column: Column) -> Any:
    if column.key in ("images_per_second", "peak_memory_mib"):
        return getattr(run, column.key)
    return run.results.get(column.key, run.summary.get(column.key))  # training's summary knows the sigma too


def _text(value: Any, column: Column) -> str:
    return f"{value * column.scale:,.{column.digits}f}" if finite(value) else "–"


def _is_best(values: list[list[Any]], i: int, j: int) -> bool:
    """Whether row i is best in column j, to the digits shown; nothing is best alone, or with all the others."""
    column = COLUMNS[j]
    shown = [round(row[j] * column.scale, column.digits) if finite(row[j]) else None for row in values]
    known = [value * column.better for value in shown if value is not None]
    own = shown[i]
    return bool(column.better) and own is not None and len(set(known)) > 1 and own * column.better == max(known)


def training_section(runs: Sequence[Run]) -> Section:
    return Section(
        "Training",
        "training",
        "Faint: as logged. Strong: local mean.",
        [picture for panel in TRAINING if (picture := _curve_picture(runs, panel))],
        empty="No training curve has been logged yet.",
    )


def monitor_section(runs: Sequence[Run]) -> Section:
    return Section(
        "Monitors",
        "monitors",
        "What would show early that a run goes wrong.",
        [picture for panel in MONITORS if (picture := _curve_picture(runs, panel))],
        empty="No monitor has been logged yet.",
    )


def posterior_section(runs: Sequence[Run]) -> Section:
    """Sigma and SNR: mean and maximum over all weights, then layer by layer."""
    pictures = []
    for quantity, title, note in (
        ("sigma", "σ of the weights", "Strong: mean over all random weights. Thin: the largest of any weight."),
        (
            "snr",
            "Signal to noise of the weights",
            "|mean| / σ. Strong: mean over all random weights. Thin: the largest.",
        ),
    ):
        lines = []
        for i, run in enumerate(runs):
            epochs, mean, largest = _over_layers(run, quantity)
            lines += [Line(epochs, mean, i), Line(epochs, largest, i, thin=True)] if epochs else []
        if lines:
            pictures.append(Picture(title, note, Markup(figures.curves(lines, quantity))))
    for i, run in enumerate(runs):
        if run.posterior:
            note = "One row a layer, from the input at the top to the output at the bottom. Blank: 0 or not logged."
            pictures.append(
                Picture(f"{run.name}: layer by layer", note, Markup(_heat_maps(run, f"heat-{i}")), wide=True)
            )
    return Section(
        "Posterior",
        "posterior",
        "How sure the run is of its weights, over training. Layers with a low signal to noise can be pruned first.",
        pictures,
        empty="None of these runs has random weights, or none has finished an epoch: there is no sigma to show.",
    )


def reliability_section(runs: Sequence[Run]) -> Section:
    pictures = []
    for i, run in enumerate(runs):
        if bins := reliability_bins_of(run):
            note = "Bars: accuracy at that confidence. Marks: mean confidence; a bar below its mark is overconfident."
            error = run.results.get("ece")
            title = f"{run.name}, ECE {error:.3f}" if finite(error) else run.name
            pictures.append(Picture(title, note, Markup(figures.reliability(bins, i, f"reliability-{i}"))))
    return Section(
        "Reliability",
        "reliability",
        "Whether a probability means what it says: the linear probe on the frozen encoder, test images.",
        pictures,
        legend=False,
        empty="No run is evaluated yet, so there is no reliability diagram.",
    )


def comparison(trees: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Keys of all trees with each tree's value, and whether they differ."""
    rows = []
    for key in dict.fromkeys(key for tree in trees for key in tree):
        values = [_plain(tree.get(key)) for tree in trees]
        rows.append({"key": key, "values": values, "differs": len(set(values)) > 1})
    return rows


def _plain(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, list):
        return ", ".join(_plain(item) for item in value)
    return "–" if value is None else str(value)


def _flat_results(run: Run) -> dict[str, Any]:
    return {key: value for key, value in flatten(run.results).items() if key != "bins" and not key.endswith(".bins")}


def _curve_picture(runs: Sequence[Run], panel: Panel) -> Picture | None:
    """The panel's figure, or None where no run logged it."""
    lines = []
    for i, run in enumerate(runs):
        for key in (panel.key, *panel.more):
            x, y = _kl_in_loss(run) if key == "kl_in_loss" else run.curve(key)
            if x and any(y):  # a column of zeros (a KL without random weights) says nothing
                lines.append(Line(x, y, i, thin=key != panel.key))
    if not lines:
        return None
    return Picture(panel.title, panel.note, Markup(figures.curves(lines, panel.key, marked=panel.key == "knn")))


def _kl_in_loss(run: Run) -> tuple[list[float], list[float]]:
    rows = [row for row in run.metrics if all(finite(row.get(key)) for key in ("epoch", "loss", "nll", "kl"))]
    return [row["epoch"] for row in rows], [row["loss"] - row["nll"] if row["kl"] else 0.0 for row in rows]


def _over_layers(run: Run, quantity: str) -> tuple[list[float], list[float], list[float]]:
    """Epochs, the mean over all weights and the maximum, of sigma or SNR."""
    names = (f"{quantity}_mean", f"{quantity}_max", "weights")
    rows = [row for row in run.posterior if all(finite(row.get(name)) for name in names)]
    epochs = sorted({float(row["epoch"]) for row in rows})
    mean, largest = [], []
    for epoch in epochs:
        layers = [row for row in rows if row["epoch"] == epoch]
        count = sum(row["weights"] for row in layers) or 1
        mean.append(sum(row["weights"] * row[f"{quantity}_mean"] for row in layers) / count)
        largest.append(max(row[f"{quantity}_max"] for row in layers))
    return epochs, mean, largest


def _heat_maps(run: Run, salt: str) -> str:
    layers = list(dict.fromkeys(str(row["layer"]) for row in run.posterior))
    epochs = sorted({float(row["epoch"]) for row in run.posterior})
    row_of, column_of = ({key: i for i, key in enumerate(keys)} for keys in (layers, epochs))
    maps = []
    for key, label in (("sigma_mean", "mean σ"), ("snr_mean", "mean signal to noise")):
        values = np.full((len(layers), len(epochs)), np.nan)
        for row in run.posterior:
            if finite(row.get(key)):
                values[row_of[str(row["layer"])], column_of[float(row["epoch"])]] = row[key]
        maps.append((label, values))
    return figures.heat_maps(layers, epochs, maps, salt)


def _code_spans(text: str) -> Markup:
    """A sentence with `commands` set as code."""
    return Markup(re.sub(r"`([^`]*)`", r"<code>\1</code>", str(escape(text))))


def _slot(i: int) -> int:
    return i % figures.SERIES


def _dash(i: int) -> str:
    return figures.CSS_DASHES[i % len(figures.CSS_DASHES)]
