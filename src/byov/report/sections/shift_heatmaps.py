"""Heat maps of the shifts: ECE and top-1 by shift and severity, and the difference to the baseline."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from markupsafe import Markup
from numpy.typing import NDArray

from byov.config import BAYESIAN, same_source
from byov.report.elements import Picture, Section
from byov.report.plots import svg_charts
from byov.report.plots.svg_charts import CellMap
from byov.report.run_data import Run, finite

SEVERITIES = ("0", "1", "2", "3", "4", "5")  # 0: the test images as they are
MEASURES = (("ece", "ECE", -1), ("top1", "top-1, %", 1))  # key, name, and which way is better

Look = Callable[[str], Any]  # from a key of evaluation.json to what stands there


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
        beside = f", and less those of {baseline.name}: purple is better, orange worse" if baseline else ""
        note = f"By severity; 0 is no shift{beside}. All at the means."
        svg = svg_charts.cell_maps(shifts_of(run), SEVERITIES, _maps(run, baseline, ranges), f"shifts-{run.name}")
        pictures.append(Picture(run.name, note, Markup(svg), wide=True))
    return Section(
        "Shifts",
        "shifts",
        "How accuracy and calibration hold when the test images are corrupted; nothing is fitted anew.",
        pictures,
        legend=False,
        notes=[_how(run) for run in runs if run not in tested],
        empty=f"No run is evaluated under shifts: `byov evaluate {runs[0].path} --shifts` adds a heat map.",
    )


def shifts_of(run: Run) -> list[str]:
    """The shifts that the results have, in their order."""
    keys = [key.split(".") for key in run.results if key.startswith("shifts.")]
    return list(dict.fromkeys(parts[1] for parts in keys if len(parts) == 4 and parts[3] in ("ece", "top1")))


def baseline_of(run: Run, runs: Sequence[Run]) -> Baseline | None:
    """The run that `--baseline` named; else the page's first deterministic run on the same data."""
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
    """Least and largest, the same for all runs, so that colours can be compared."""
    known = np.concatenate([grid[np.isfinite(grid)] for grid in grids]) if grids else np.empty(0)
    return (float(known.min()), float(known.max())) if known.size else (0.0, 1.0)


def _how(run: Run) -> str:
    return f"{run.name} has none: `byov evaluate {run.path} --shifts` adds them."
