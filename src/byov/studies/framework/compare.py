"""Arms beside each other: every measure of every arm and seed, and how far it lies from a reference arm's.

Arms are paired by seed and by image: the same seed gives the same order of images and views, and the test images are
the same, so that what is common to both falls out of the difference.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from byov.config import Config
from byov.evaluation.named_metrics import strict
from byov.metrics.resampling import paired_errors
from byov.studies.framework.claims import Effect
from byov.studies.framework.lab import Lab
from byov.studies.measurements.accuracy_and_spread import weight_spread
from byov.studies.measurements.predictions import MEASURES, Outcomes, check_same_images, measures_of

MEANS = "means"
Arms = Mapping[str, Callable[[int], Config]]
"""The config of each arm, by seed."""


def compare(
    lab: Lab, arms: Arms, reference: str, columns: Mapping[str, dict[str, Any]] | None = None
) -> list[dict[str, Any]]:
    """A row for each seed, arm and place ("at": means, draws, draws_unaligned) with MEASURES.

    `MEASURE.difference` is to the reference arm with the same seed, at its means; `MEASURE.error` its standard error
    over images. `columns` are put into the rows of an arm.
    """
    return [row for seed in range(lab.seeds) for row in _of_seed(lab, arms, reference, columns or {}, seed)]


def _of_seed(
    lab: Lab, arms: Arms, reference: str, columns: Mapping[str, dict[str, Any]], seed: int
) -> list[dict[str, Any]]:
    rows, beside = [], arms[reference](seed)
    for arm, make in arms.items():
        config = make(seed)
        sigma = lab.measured("spread", config, weight_spread, {})["median_sigma"]
        own = {"arm": arm, "seed": seed, "median_sigma": sigma, **columns.get(arm, {})}
        rows += [own | row for row in _measured(lab, config, beside)]
    return rows


def _measured(lab: Lab, config: Config, reference: Config) -> list[dict[str, Any]]:
    """The places of one run, beside another."""
    mine, other = lab.outcomes(config), lab.outcomes(reference)
    return [{"at": at, **_beside(mine, other, at)} for at in mine.probabilities]


def _beside(mine: Outcomes, other: Outcomes, at: str) -> dict[str, Any]:
    check_same_images(mine, other)
    p, q = mine.probabilities[at], other.probabilities[MEANS]
    own, reference = measures_of(p, mine.labels), measures_of(q, other.labels)
    errors = paired_errors(p, q, mine.labels)
    found = dict(own)
    for name in MEASURES:
        found |= {f"{name}.difference": own[name] - reference[name], f"{name}.error": errors[name]}
    return strict(found)


def effects(rows: list[dict[str, Any]], arm: str, measure: str, at: str = MEANS, sign: int = +1) -> list[Effect]:
    """How far an arm lies from the reference in percent points (of NLL: hundredths of a nat), one effect a seed.

    Args:
        sign: -1 where the paper says that the measure falls.
    """
    return [
        Effect(row["seed"], 100 * sign * row[f"{measure}.difference"], 100 * row[f"{measure}.error"])
        for row in rows
        if (row["arm"], row["at"]) == (arm, at)
    ]
