"""The paper's claims as rules to judge rows by. Each rule is fixed in code before the runs it judges.

A claim is about an effect, signed so that positive means "as the paper says". A run of BYOV is compared with the run of
BYOL that has the same seed, on the same test images: one effect per seed. Two things make it uncertain: the seed, and
which images the test set happens to hold. All seeds share the images, so more seeds do not reduce that part:

    variance of the estimate = variance over seeds / seeds + mean over seeds of the squared error over images

The 95% interval is Student's t. Only the variance over seeds is estimated from few values, so the degrees of freedom
follow Welch and Satterthwaite: seeds - 1 where the images add nothing, more where they do. Then

    directional:  above 0: shown; below 0: opposite; else, wholly below the paper's size: not shown; else: cannot tell
    "no difference":  within +-size: shown; wholly outside: opposite; else: cannot tell

With fewer than two seeds every verdict is "cannot tell". "Not shown" is a finding: an effect of the paper's size would
have been detected.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import mean, variance
from typing import Any

from scipy.stats import t as student

SHOWN, OPPOSITE, NOT_SHOWN, CANNOT_TELL = "shown", "opposite", "not shown", "cannot tell"
WORDS = (SHOWN, OPPOSITE, NOT_SHOWN, CANNOT_TELL)
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

    @property
    def half_width(self) -> float | None:
        """The smallest effect that could have been distinguished from 0."""
        return None if self.low is None or self.high is None else (self.high - self.low) / 2


def verdict(claim: Claim, rows: Rows) -> Verdict:
    """Judge a claim by the rows of its study."""
    return judge(claim.effects(rows), claim.size, claim.equal)


def judge(effects: Sequence[Effect], size: float, equal: bool = False) -> Verdict:
    """Apply the rule at the top of this file."""
    values, seeds = [effect.value for effect in effects], len(effects)
    if len({effect.seed for effect in effects}) < seeds:
        raise ValueError("there is more than one effect per seed: average them first.")
    if not seeds:
        return Verdict(CANNOT_TELL, 0)
    images = math.sqrt(mean(effect.error**2 for effect in effects))
    estimate = mean(values)
    if seeds < 2:
        return Verdict(CANNOT_TELL, seeds, estimate, image_error=images)
    over_seeds = variance(values) / seeds
    error = math.sqrt(over_seeds + images**2)
    freedom = (seeds - 1) * (error**2 / over_seeds) ** 2 if over_seeds else math.inf
    half = float(student.ppf((1 + LEVEL) / 2, freedom)) * error
    low, high = estimate - half, estimate + half
    word = _equal(low, high, size) if equal else _directional(low, high, size)
    return Verdict(word, seeds, estimate, low, high, images)


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
    """Read effects in percentage points from `MEASURE.difference` and `MEASURE.error` of the selected rows.

    `sign` is -1 where the paper says that the measure falls.
    """
    return [
        Effect(row["seed"], 100 * sign * row[f"{measure}.difference"], 100 * row[f"{measure}.error"])
        for row in select(rows, **values)
    ]


def statistics(rows: Rows, name: str, scale: float = 1, offset: float = 0, **values: Any) -> list[Effect]:
    """Read effects `offset + scale * NAME` with error `NAME.error`; rows where either is undefined are skipped."""
    return [
        Effect(row["seed"], offset + scale * row[name], abs(scale) * row[f"{name}.error"])
        for row in select(rows, **values)
        if None not in (row[name], row[f"{name}.error"])
    ]


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
