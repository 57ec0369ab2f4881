"""Figure 4, centre and right: Brier reliability and ECE of BYOV minus those of BYOL, under shifts of the test images.

Both runs see the same shifted images, at the means. A shift's number is the average over its severities. Errors come
from one bootstrap over images: an image is resampled with all its shifted copies, which do not count as images.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from statistics import mean
from typing import Any

import matplotlib as mpl
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from byov.config import Config
from byov.data.shifts import SEVERITIES, SHIFTS, shifted
from byov.evaluation.measures import SHIFT_SEED, shift_names
from byov.evaluation.probe import Subject, subject_of
from byov.inference.inputs import spread
from byov.inference.run import Run, features_of
from byov.metrics.resampling import RESAMPLES, WeightedMeasures, replicates, sampling_floor
from byov.report.plots.seed_plots import LOOKS
from byov.studies.framework.claims import NO_NUMBER, Claim, Row, Rows, at_most, differences, rooms, select
from byov.studies.framework.lab import Lab
from byov.studies.framework.replicates import errors_and_replicates

TITLE = "Figure 4, centre and right: calibration and reliability under shifts, BYOV against BYOL"
NAMES = {"ece": "ECE", "reliability": "Brier reliability", "brier": "Brier score"}
IMAGES = 2000  # at most: they pass two encoders under 75 shifts
LOWER = tuple(NAMES)  # is better
MEASURES = (*LOWER, "top1")
DIFFERENCE = ".difference"
FLOOR_DRAWS = 20  # for each severity
CLEAN, SHARE = "clean", "share of the others"
WORSE = ("shear", "gaussian_noise")  # where the paper finds BYOV worse (4.3); all others are "the others"


def runs(lab: Lab) -> list[Config]:
    return lab.configs("byov", "byol")


def results(lab: Lab) -> Rows:
    """A row for each seed and shift (averaged over severities), for clean images, and for the share of shifts."""
    settings = {"images": IMAGES, "shifts": list(SHIFTS), "severities": SEVERITIES, "shift_seed": SHIFT_SEED}
    settings |= {"resamples": RESAMPLES}
    return [
        row
        for config in lab.configs("byov")
        for row in lab.measured_rows("fig4-shift", config, compare_shifts, settings, lab.config("byol", config.seed))
    ]


# --------------------------------------------------------------------------------------------------------- measurement

Pairs = Mapping[str, list[tuple[WeightedMeasures, WeightedMeasures]]]
"""By shift: both runs' measures at each severity."""


def compare_shifts(run: Run, baseline: Run, resamples: int = RESAMPLES) -> Rows:
    """Return a row for clean images and each shift, comparing the run with the baseline.

    For each measure m: `m`, `m.baseline`, `m.difference` (run minus baseline) with `m.error` and `m.replicates`, and
    `m.floor`, what sampling alone gives the baseline.
    The last row is for all shifts but WORSE: `m.difference` is the share of those under which m is lower, minus a half.
    """
    pairs = _pairs(subject_of(run), subject_of(baseline))
    images = len(pairs[CLEAN][0][0].labels)
    values = _statistics(pairs, torch.ones(1, images, dtype=torch.float64))
    found = replicates(partial(_statistics, pairs), images, resamples)
    rows: dict[str, Row] = {shift: {"shift": shift} for shift in (*pairs, SHARE)}
    for key, value in values.items():
        shift, name = key.split("/")
        rows[shift][name] = float(value)
        if name.endswith(DIFFERENCE):
            rows[shift] |= errors_and_replicates({name.removesuffix(DIFFERENCE): found[key]})
    for shift, severities in pairs.items():
        floors = [sampling_floor(theirs.p, FLOOR_DRAWS) for _, theirs in severities]
        rows[shift] |= {f"{name}.floor": mean(floor[name] for floor in floors) for name in floors[0]}
    return list(rows.values())


def _pairs(ours: Subject, theirs: Subject) -> Pairs:
    """Both runs on the same shifted images."""
    chosen = spread(len(ours.data.test), IMAGES)
    labels = ours.data.test_labels[chosen]

    def both(images: Tensor) -> tuple[WeightedMeasures, WeightedMeasures]:
        features = [features_of(subject.encoder, images, size=subject.side) for subject in (ours, theirs)]
        p, q = ours.probe.probabilities(features[0]), theirs.probe.probabilities(features[1])
        return WeightedMeasures(p, labels), WeightedMeasures(q, labels)

    clean = ours.test_images[chosen]
    found = {CLEAN: [both(clean)]}
    for name in shift_names(ours):
        found[name] = [both(shifted(clean, chosen, name, severity, SHIFT_SEED)) for severity in SEVERITIES]
    return found


def _statistics(pairs: Pairs, counts: Tensor) -> dict[str, Tensor]:
    """`SHIFT/MEASURE`, the same of the baseline and the difference, for counts (resamples, images)."""
    found: dict[str, Tensor] = {}
    for shift, severities in pairs.items():
        ours, theirs = ([one[i](counts) for one in severities] for i in (0, 1))
        for measure in MEASURES:
            mine, other = (torch.stack([f[measure] for f in side]).mean(0) for side in (ours, theirs))
            key = f"{shift}/{measure}"
            found |= {key: mine, f"{key}.baseline": other, key + DIFFERENCE: mine - other}
    others = [shift for shift in pairs if shift not in (CLEAN, *WORSE)]
    for measure in LOWER:
        lower = torch.stack([found[f"{shift}/{measure}{DIFFERENCE}"] < 0 for shift in others])
        found[f"{SHARE}/{measure}{DIFFERENCE}"] = lower.double().mean(0) - 0.5
    return found


# -------------------------------------------------------------------------------------------------------------- claims


def _claim(where: str, says: str, paper: str, shift: str, measure: str, size: float, sign: int = -1) -> Claim:
    """BYOV minus BYOL in points; sign -1 where the paper says that BYOV is better, which is lower."""
    unit = "points of shifts above a half" if shift == SHARE else f"points of {NAMES[measure]}"
    rule: dict[str, Any] = {"measure": measure, "sign": sign, "shift": shift}
    room = at_most(50, shift=SHARE) if shift == SHARE else partial(rooms, **rule)
    effects = partial(differences, **rule)
    return Claim(where, f"{says} ({NAMES[measure]}).", paper, unit, size, effects, room=room)


BARS, SALT = "4.3, Figure 4", "salt_pepper"
# Where the paper has only a bar: half a point, about half of the smallest difference that it prints (1.03).
# Of the shifts: a quarter, which is 3 of 4 better instead of 2 of 4.
LEAST, QUARTER = 0.5, 25.0
TWO = ("ece", "reliability")

CLAIMS = [
    _claim("abstract, Figure 4", "BYOV is better calibrated under salt & pepper noise", "2.4", SALT, "ece", 2.4),
    _claim(
        BARS,
        "BYOV is more reliable under salt & pepper noise",
        "1.2 (the abstract's Brier)",
        SALT,
        "reliability",
        1.2,
    ),
    _claim("abstract", "BYOV has the better Brier score under salt & pepper noise", "1.2", SALT, "brier", 1.2),
    *(
        _claim(BARS, f"BYOV is notably worse under {name}", NO_NUMBER, shift, measure, LEAST, sign=+1)
        for shift, name in zip(WORSE, ("shearing", "Gaussian noise"), strict=True)
        for measure in TWO
    ),
    *(
        _claim(BARS, "BYOV is better under most other shifts", NO_NUMBER, SHARE, measure, QUARTER, sign=+1)
        for measure in TWO
    ),
    *(_claim(BARS, "BYOV is better on clean test images", NO_NUMBER, CLEAN, measure, LEAST) for measure in TWO),
]


# -------------------------------------------------------------------------------------------------------------- figure


def draw(rows: Rows, scale: str) -> Figure:
    """One bar per shift: the mean over seeds; one dot per seed; whiskers are the standard error over images."""
    bars = [row for row in rows if row["shift"] != SHARE]
    shifts = list(dict.fromkeys(row["shift"] for row in bars))
    with mpl.rc_context({"font.size": 9, "axes.grid": True, "axes.axisbelow": True, "grid.alpha": 0.4}):
        figure = Figure(figsize=(8, 1 + 0.24 * len(shifts)), layout="constrained")
        panels = figure.subplots(1, 2, sharey=True)
        for axes, measure in zip(panels, ("reliability", "ece"), strict=True):
            _bars(axes, bars, shifts, measure)
            axes.set(xlabel=f"{NAMES[measure]}, BYOV minus BYOL (points)")
        figure.suptitle(
            "left of 0 BYOV is better; a dot is a seed, a whisker the standard error over images", fontsize=8
        )
        panels[0].set_yticks(range(len(shifts)), [shift.replace("_", " ") for shift in shifts])
        panels[0].invert_yaxis()
        return figure


def _bars(axes: Axes, rows: Rows, shifts: list[str], measure: str) -> None:
    for place, shift in enumerate(shifts):
        mine = select(rows, shift=shift)
        values = [100 * row[f"{measure}.difference"] for row in mine]
        error = 100 * mean(row[f"{measure}.error"] ** 2 for row in mine) ** 0.5
        look = LOOKS[0] if mean(values) < 0 else LOOKS[1]
        hatch = None if mean(values) < 0 else "////"
        axes.barh(place, mean(values), 0.7, color=look["color"], alpha=0.75, hatch=hatch, edgecolor="white")
        axes.errorbar(mean(values), place, xerr=error, color="black", linewidth=1, capsize=2)
        axes.plot(values, [place] * len(values), ".", color="black", markersize=4)
    axes.axvline(0, color="black", linewidth=0.8)
    axes.grid(axis="y", visible=False)
