"""Schedules as pure functions of `progress`, the fraction of the run that is done: k / K at step k of K."""

from __future__ import annotations

import math


def half_cosine(progress: float, start: float, end: float) -> float:
    """Interpolate along half a cosine cycle.

    Args:
        progress: Fraction of the run that is done; clamped to 0 to 1.
        start: Value at progress 0.
        end: Value at progress 1.

    Returns:
        The value at `progress`.

    Examples:
        >>> from byov import schedules
        >>> schedules.half_cosine(0.5, start=0.0, end=1.0)
        0.5
    """
    return end + (start - end) * (1 + math.cos(math.pi * min(max(progress, 0.0), 1.0))) / 2


def beta(progress: float, start: float = 0.0, end: float = 1.0) -> float:
    """Anneal the weight of the KL along half a cosine cycle, as in the paper.

    Args:
        progress: Fraction of the run that is done.
        start: Weight at the start; equal to `end` for a constant weight.
        end: Weight at the end.

    Returns:
        The weight at `progress`.

    Examples:
        >>> from byov import schedules
        >>> [round(schedules.beta(k / 4), 2) for k in range(5)]
        [0.0, 0.15, 0.5, 0.85, 1.0]
    """
    return half_cosine(progress, start, end)


def tau(progress: float, start: float) -> float:
    """Raise the teacher's decay from `start` to 1 along a cosine (BYOL): 1 - (1 - start)(cos(pi progress) + 1) / 2.

    Args:
        progress: Fraction of the run that is done.
        start: Decay at the start.

    Returns:
        The decay at `progress`.

    Examples:
        >>> from byov import schedules
        >>> round(schedules.tau(0.5, start=0.99), 4)
        0.995
    """
    return half_cosine(progress, start, 1.0)


def learning_rate(progress: float, peak: float, warmup: float) -> float:
    """Raise the learning rate linearly from 0 during warmup, then lower it to 0 along a cosine.

    Args:
        progress: Fraction of the run that is done.
        peak: Largest learning rate.
        warmup: Fraction of the run in which it rises.

    Returns:
        The learning rate at `progress`.

    Examples:
        >>> from byov import schedules
        >>> [round(schedules.learning_rate(k / 4, peak=1.0, warmup=0.25), 2) for k in range(5)]
        [0.0, 1.0, 0.75, 0.25, 0.0]
    """
    if progress < warmup:
        return peak * progress / warmup
    return half_cosine((progress - warmup) / max(1.0 - warmup, 1e-12), peak, 0.0)


def log_variance_rate(steps: int, softplus: bool = False) -> float:
    """Choose the peak learning rate of the log-variances for a run of this many steps.

    Where the data say little about a weight, the KL always pulls in the same direction, and Adam follows by a whole
    learning rate per step (by more while beta rises). A log-variance then moves by about the sum of the rates, half of
    peak x steps. This is 4 here, a factor of 7 for sigma, for a run of any length. softplus(rho) is exp(rho) for small
    sigmas, where ours is exp(log_variance / 2).

    Args:
        steps: Number of steps of the run.
        softplus: Whether the optimizer updates rho with sigma = softplus(rho), instead of the log-variance.

    Returns:
        The peak learning rate.

    Examples:
        >>> from byov import schedules
        >>> schedules.log_variance_rate(steps=1000)
        0.008
    """
    return (4.0 if softplus else 8.0) / steps
