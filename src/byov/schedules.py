"""Schedules as pure functions. `progress` is the part of the run that is over: k / K at step k of K, from 0 to 1."""

from __future__ import annotations

import math


def half_cosine(progress: float, start: float, end: float) -> float:
    """One half-cycle of a cosine from start to end."""
    return end + (start - end) * (1 + math.cos(math.pi * min(max(progress, 0.0), 1.0))) / 2


def beta(progress: float, start: float = 0.0, end: float = 1.0) -> float:
    """Weight of the KL: the paper anneals it from 0 to 1 by one cosine half-cycle; start == end is constant."""
    return half_cosine(progress, start, end)


def tau(progress: float, start: float) -> float:
    """The teacher's decay: 1 - (1 - start)(cos(pi progress) + 1) / 2, from `start` to 1 (BYOL)."""
    return half_cosine(progress, start, 1.0)


def learning_rate(progress: float, peak: float, warmup: float) -> float:
    """Linear from 0 over the first `warmup` part of the run, then a cosine to 0."""
    if progress < warmup:
        return peak * progress / warmup
    return half_cosine((progress - warmup) / max(1.0 - warmup, 1e-12), peak, 0.0)


def log_variance_rate(steps: int, softplus: bool = False) -> float:
    """Peak learning rate of the log-variances for a run of this many steps.

    Where the data say little about a weight the KL always pulls the same way, and Adam follows by a whole learning rate
    a step (by more while beta rises). What a log-variance travels is then about the sum of the rates, half of peak x
    steps, which is 4 here, a factor of 7 for sigma, whatever the run's length. softplus(rho) is exp(rho) for small
    sigmas, where ours is exp(log_variance / 2).
    """
    return (4.0 if softplus else 8.0) / steps


def scale_learning_rate(lr: float, batch_factor: float, rule: str = "linear") -> float:
    """The learning rate for a batch `batch_factor` times as large: linear (SGD, LARS), or square root (Adam)."""
    if rule not in ("linear", "sqrt"):
        raise ValueError(f"rule={rule!r} is not known; use 'linear' or 'sqrt'.")
    return lr * (batch_factor if rule == "linear" else math.sqrt(batch_factor))


def scale_tau(tau: float, batch_factor: float) -> float:
    """The teacher's decay for a batch `batch_factor` times as large: it then moves as far for each image."""
    return float(tau**batch_factor)
