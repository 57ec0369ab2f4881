"""How far apart two profiles of layers are, and how unsteady a trace of training is. Both free of scale."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import mean, median

Profile = Mapping[str, float]
"""A positive value for each layer."""


def log_ratios(a: Profile, b: Profile) -> dict[str, float]:
    """ln(a / b) of each layer that both have."""
    both = [layer for layer in a if layer in b]
    if not both:
        raise ValueError("the two profiles have no layer in common.")
    if not all(a[layer] > 0 and b[layer] > 0 for layer in both):
        raise ValueError("a profile must be positive: its ratios are compared.")
    return {layer: math.log(a[layer] / b[layer]) for layer in both}


def log_distance(a: Profile, b: Profile) -> float:
    """Mean over the layers of |ln(a / b)|: ln 2 where each layer differs by a factor of two, up or down."""
    return mean(abs(ratio) for ratio in log_ratios(a, b).values())


def largest_rise(values: Sequence[float], before: int = 10) -> float | None:
    """The largest ln(value / median of the `before` values before it): a spike, whatever the scale and slow trend.

    None where the trace is too short, or not positive.
    """
    if len(values) <= before or min(values) <= 0:
        return None
    return max(math.log(values[i] / median(values[i - before : i])) for i in range(before, len(values)))
