"""The paper's claims as rules to judge rows by. Each rule is fixed in code before the runs it judges.

A claim is about an effect, signed so that positive means "as the paper says". A run of BYOV is compared with the run of
BYOL that has the same seed, on the same test images: one effect per seed. Seeds and images are crossed random effects:
every seed is measured on every image, and another seed or another image would each give another number.

    effect of seed s on image i = mean + seed_s + image_i + rest_si
    variance of the estimate    = (variance over seeds) / seeds + covariance over images of two seeds

The first term estimates what seeds and the rest add, the second what the images add that all seeds share: the
covariance of two seeds' bootstrap replicates, averaged over pairs (both resample the same images). Where rows hold no
replicates, the mean squared error over images takes its place. That counts the rest twice, so the interval is too wide.

The 95% interval is Student's t. Only the variance over seeds is estimated from few values, so the degrees of freedom
follow Welch and Satterthwaite: seeds - 1 where the images add nothing, more where they do. Then

    directional:  above 0: shown; below 0: opposite; else, wholly below the paper's size: not shown; else: cannot tell
    "no difference":  within +-size: shown; wholly outside: opposite; else: cannot tell
    room:  where "not shown" or "cannot tell" is due to an effect that could not be as large as the paper's: no room

With fewer than two seeds every verdict is "cannot tell" (or "no room"). "Not shown" is a finding: an effect of the
paper's size would have been detected.

The room is the largest effect that could have been observed. A BYOL with an ECE of 1.2 points, of which .9 are due to
the number of test images, can be improved by .3 points: a claim of 2.83 could not be shown there, whatever is true.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import mean, variance
from typing import Any

import numpy as np
from scipy.stats import t as student

from byov.studies.framework.replicates import REPLICATES, unpacked

SHOWN, OPPOSITE, NOT_SHOWN, NO_ROOM, CANNOT_TELL = "shown", "opposite", "not shown", "no room", "cannot tell"
WORDS = (SHOWN, OPPOSITE, NOT_SHOWN, NO_ROOM, CANNOT_TELL)
LEVEL = 0.95
NO_NUMBER = "no number"

Row = dict[str, Any]
Rows = list[Row]
"""What a study measures: a flat dictionary per run and setting, written as JSON and CSV."""


@dataclass(frozen=True)
class Effect:
    """The effect that one seed found: positive means as the paper says."""

    seed: int
    value: float
    error: float = 0.0
    """Standard error over images (paired bootstrap); 0 where no images are sampled."""
    replicates: tuple[float, ...] | None = None
    """The effect's deviation on each resample of the images, the same resamples for all seeds; None: not saved."""


Effects = Callable[[Rows], list[Effect]]
"""A rule: from a study's rows to one effect per seed."""


@dataclass(frozen=True)
class Claim:
    """A sentence of the paper, and the rule to judge it by."""

    where: str
    """Its place in the paper: "4.1, Figure 2"."""
    says: str
    """The claim, in one plain sentence."""
    paper: str
    """The number as printed, or NO_NUMBER."""
    unit: str
    """ "points of ECE", "points of top-1", "correlation", ..."""
    size: float
    """The paper's effect in that unit, positive; without a printed number, the smallest effect that would matter."""
    effects: Effects
    equal: bool = False
    """Whether the claim is "no difference"."""
    room: Effects | None = None
    """A rule for the largest effect that each seed could have shown; None: without bound."""
    caveats: Callable[[Rows], list[str]] = lambda rows: []
    """What a reader must know about the rows to read the verdict, such as a condition that they do not meet."""


@dataclass(frozen=True)
class Verdict:
    """The judgement over all seeds."""

    word: str
    """One of WORDS."""
    seeds: int
    estimate: float | None = None
    """Mean over seeds; None without seeds."""
    low: float | None = None
    high: float | None = None
    """Ends of the 95% interval; None with fewer than two seeds."""
    image_error: float = 0.0
    """The part of the standard error that is due to the choice of images; the only part that one seed can show."""
    crossed: bool = True
    """Whether that part was separated from the rest by replicates; else it is an upper bound."""
    room: float | None = None
    """The largest effect that could have been observed, mean over seeds; None: without bound."""
    caveats: tuple[str, ...] = ()

    @property
    def half_width(self) -> float | None:
        """The smallest effect that could have been distinguished from 0."""
        return None if self.low is None or self.high is None else (self.high - self.low) / 2


def verdict(claim: Claim, rows: Rows) -> Verdict:
    """Judge a claim by the rows of its study."""
    found = judge(claim.effects(rows), claim.size, claim.equal)
    if claim.room is not None and (room := claim.room(rows)):
        found = with_room(found, claim.size, mean(effect.value for effect in room))
    return replace(found, caveats=tuple(claim.caveats(rows)) if found.seeds else ())


def judge(effects: Sequence[Effect], size: float, equal: bool = False) -> Verdict:
    """Apply the rule at the top of this file, without the room."""
    values, seeds = [effect.value for effect in effects], len(effects)
    if len({effect.seed for effect in effects}) < seeds:
        raise ValueError("there is more than one effect per seed: average them first.")
    if not seeds:
        return Verdict(CANNOT_TELL, 0)
    estimate = mean(values)
    if seeds < 2:
        return Verdict(CANNOT_TELL, seeds, estimate, image_error=effects[0].error)
    over_images, crossed = shared_variance(effects)
    over_seeds = variance(values) / seeds
    error = math.sqrt(over_seeds + over_images)
    freedom = (seeds - 1) * (error**2 / over_seeds) ** 2 if over_seeds else math.inf
    half = float(student.ppf((1 + LEVEL) / 2, freedom)) * error
    low, high = estimate - half, estimate + half
    word = _equal(low, high, size) if equal else _directional(low, high, size)
    return Verdict(word, seeds, estimate, low, high, math.sqrt(over_images), crossed)


def shared_variance(effects: Sequence[Effect]) -> tuple[float, bool]:
    """Return the variance over images that all seeds share, and whether it is an estimate or an upper bound.

    The estimate is the mean over pairs of seeds of the covariance of their replicates, or 0 if that is negative.
    """
    if all(effect.error == 0 for effect in effects):
        return 0.0, True
    known = [effect.replicates for effect in effects if effect.replicates is not None]
    if len(known) < len(effects) or len({len(each) for each in known}) > 1:
        return mean(effect.error**2 for effect in effects), False
    covariances = np.cov(np.array(known))
    pairs = covariances[np.triu_indices(len(known), k=1)]
    return max(0.0, float(pairs.mean())), True


def with_room(found: Verdict, size: float, room: float) -> Verdict:
    """Say "no room" instead of "not shown" and "cannot tell" where an effect of the paper's size was impossible."""
    word = NO_ROOM if found.word in (NOT_SHOWN, CANNOT_TELL) and size > room else found.word
    return replace(found, word=word, room=room)


def _directional(low: float, high: float, size: float) -> str:
    if low > 0:
        return SHOWN
    if high < 0:
        return OPPOSITE
    return NOT_SHOWN if high < size else CANNOT_TELL


def _equal(low: float, high: float, size: float) -> str:
    if -size <= low and high <= size:
        return SHOWN
    return OPPOSITE if low > size or high < -size else CANNOT_TELL


# --------------------------------------------------------------------------------------------------- effects from rows


def select(rows: Rows, **values: Any) -> Rows:
    """Return the rows whose columns have these values."""
    return [row for row in rows if all(row[key] == value for key, value in values.items())]


def differences(rows: Rows, measure: str, sign: int = +1, **values: Any) -> list[Effect]:
    """Read effects in percentage points from `MEASURE.difference` of the selected rows, with their errors.

    `sign` is -1 where the paper says that the measure falls.
    """
    return [
        _effect(row, measure, 100 * sign * row[f"{measure}.difference"], 100 * sign) for row in select(rows, **values)
    ]


def statistics(rows: Rows, name: str, scale: float = 1, offset: float = 0, **values: Any) -> list[Effect]:
    """Read effects `offset + scale * NAME` with their errors; rows where either is undefined are skipped."""
    return [
        _effect(row, name, offset + scale * row[name], scale)
        for row in select(rows, **values)
        if None not in (row[name], row[f"{name}.error"])
    ]


def _effect(row: Row, name: str, value: float, scale: float) -> Effect:
    error, packed = row[f"{name}.error"], row.get(f"{name}{REPLICATES}")
    found = None if packed is None else tuple(scale * error * z for z in unpacked(packed))
    return Effect(row["seed"], value, abs(scale) * error, found)


def rooms(rows: Rows, measure: str, sign: int = +1, **values: Any) -> list[Effect]:
    """Return the largest effects that `differences` could have found: from the reference to the end of the scale.

    The lower end is 0, or `MEASURE.floor`, which sampling alone gives. (Rows from before 2026-11-18 have no floor:
    there 0 is assumed, so the room is an upper bound.)
    """
    found = []
    for row in select(rows, **values):
        reference = row[measure] - row[f"{measure}.difference"]
        end = HIGHEST[measure.rpartition(".")[2]] if sign > 0 else row.get(f"{measure}.floor", 0.0)
        found.append(Effect(row["seed"], 100 * sign * (end - reference)))
    return found


HIGHEST = {
    "auroc": 1.0,
    "top1": 1.0,
    "top5": 1.0,
    "ece": 1.0,
    "brier": 2.0,
    "reliability": 2.0,
    "resolution": 1.0,
    "nll": math.inf,
}
"""The upper end of each measure."""


def at_most(room: float, **values: Any) -> Effects:
    """Make the rule for a room that is the same for every seed of the selected rows."""

    def same(rows: Rows) -> list[Effect]:
        return [Effect(seed, room) for seed in sorted({row["seed"] for row in select(rows, **values)})]

    return same


def best_of_other_seeds(options: Iterable[list[Effect]]) -> list[Effect]:
    """Return for each seed the effect of the option that is best on average over the other seeds.

    The largest of a seed's own effects would be positive by chance alone. All seeds share the test images, so a little
    of that chance remains. A single seed takes its own best.
    """
    tables = [{effect.seed: effect for effect in option} for option in options]
    seeds = sorted({seed for table in tables for seed in table})

    def elsewhere(table: dict[int, Effect], seed: int) -> float:
        return mean(effect.value for other, effect in table.items() if other != seed or len(seeds) == 1)

    return [max((t for t in tables if seed in t), key=lambda t: elsewhere(t, seed))[seed] for seed in seeds]
