"""Two runs under every shift, on the same shifted test images, at the means (the paper's Figure 4, centre and right).

A shift's number is the average over its severities. Errors are of one bootstrap over images: an image is taken with all
that was done to it, so that shifts and severities do not count as images of their own.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor

from byov.data.shifts import SEVERITIES, shifted
from byov.evaluation.labelled import Subject, subject_of
from byov.evaluation.named_metrics import Measures
from byov.evaluation.shift_robustness import SEED, shift_names
from byov.inference.features import features_of
from byov.inference.inputs import spread
from byov.inference.load import Run
from byov.metrics.resampling import WeightedMeasures, standard_errors

IMAGES = 2000  # at most: through two encoders under 75 shifts
LOWER = ("ece", "reliability", "brier")  # is better
MEASURES = (*LOWER, "top1")
DIFFERENCE = ".difference"
CLEAN, SHARE = "clean", "share of the others"
WORSE = ("shear", "gaussian_noise")  # where the paper finds BYOV worse (4.3); all others are "the others"

Pairs = Mapping[str, list[tuple[WeightedMeasures, WeightedMeasures]]]
"""By shift: both runs' measures at each severity."""


def compare_shifts(run: Run, baseline: Run, resamples: int = 500) -> list[Measures]:
    """A row for clean images and each shift: `m` and `m.baseline`, `m.difference` (run less baseline), `m.error`.

    The last row is of all shifts but WORSE: `m.difference` is the share of those under which m is lower, less a half.
    """
    pairs = _pairs(subject_of(run), subject_of(baseline))
    images = len(pairs[CLEAN][0][0].labels)
    values = _statistics(pairs, torch.ones(1, images, dtype=torch.float64))
    errors = standard_errors(partial(_statistics, pairs), images, resamples)
    rows: dict[str, Measures] = {shift: {"shift": shift} for shift in (*pairs, SHARE)}
    for key, value in values.items():
        shift, name = key.split("/")
        rows[shift][name] = float(value)
        if name.endswith(DIFFERENCE):
            rows[shift][name.removesuffix(DIFFERENCE) + ".error"] = errors[key]
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
        found[name] = [both(shifted(clean, chosen, name, severity, SEED)) for severity in SEVERITIES]
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
