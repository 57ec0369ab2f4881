"""The paper's claims as rules that rows can be judged by, fixed in code before any run.

A claim is about an effect, signed so that positive means "as the paper says". A run of BYOV with one seed is set beside
BYOL with the same seed, on the same test images: one effect a seed. Two things are uncertain in it: the seed, and which
images the test set happens to have. The images are the same for all seeds, so that more seeds do not make up for them:

    variance of the estimate = variance over seeds / seeds + mean over seeds of the squared error over images

and the 95% interval is Student's t. Only the part of the seeds is known from few, so the degrees of freedom are those
of Welch and Satterthwaite: seeds - 1 where the images add nothing, more where they do. Then

    directional:  above 0: shown; below 0: opposite; else, wholly below the paper's size: not shown; else: cannot tell
    "no difference":  within +-size: shown; wholly outside: opposite; else: cannot tell

With fewer than two seeds nothing can be told. "Not shown" thus means that an effect of the paper's size would have been
seen: it is a finding; "cannot tell" is none.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import mean, variance
from typing import Any

from scipy.stats import t as student

SHOWN, OPPOSITE, NOT_SHOWN, CANNOT_TELL = "shown", "opposite", "not shown", "cannot tell"
WORDS = (SHOWN, OPPOSITE, NOT_SHOWN, CANNOT_TELL)
LEVEL = 0.95


@dataclass(frozen=True)
class Effect:
    """What one seed found: positive means as the paper says."""

    seed: int
    value: float
    error: float = 0.0
    """Standard error over images (bootstrap, paired); 0 where no images are sampled."""


@dataclass(frozen=True)
class Claim:
    """A sentence of the paper, and the rule to judge it by."""

    where: str
    """In the paper: "4.1, Figure 2"."""
    says: str
    """The claim, one sentence, plain words."""
    paper: str
    """The number as printed, or "no number"."""
    unit: str
    """ "points of ECE", "points of top-1", "correlation", ..."""
    size: float
    """The paper's effect in that unit, positive; where it prints none: the least effect that would matter."""
    effects: Callable[[list[dict[str, Any]]], list[Effect]]
    """From the study's rows: one effect a seed."""
    equal: bool = False
    """The claim is "no difference"."""


@dataclass(frozen=True)
class Verdict:
    """What the seeds say together."""

    word: str
    """One of WORDS."""
    seeds: int
    estimate: float | None = None
    """Mean over seeds; None where there is no seed."""
    low: float | None = None
    high: float | None = None
    """Ends of the 95% interval; None with fewer than two seeds."""
    image_error: float = 0.0
    """The part of the standard error that is due to the choice of images: all that one seed can tell."""

    @property
    def half_width(self) -> float | None:
        """The least effect that could have been told from 0."""
        return None if self.low is None or self.high is None else (self.high - self.low) / 2


def verdict(claim: Claim, rows: list[dict[str, Any]]) -> Verdict:
    """A claim judged by the rows of its study."""
    return judge(claim.effects(rows), claim.size, claim.equal)


def judge(effects: Sequence[Effect], size: float, equal: bool = False) -> Verdict:
    """The rule at the head of this file."""
    values, seeds = [effect.value for effect in effects], len(effects)
    if len({effect.seed for effect in effects}) < seeds:
        raise ValueError("there is more than one effect of a seed: average them first.")
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
