"""Temperature scaling (Guo et al. 2017): one number, fitted on held-out images, that makes confidence honest.

The baseline for calibration: (logits / temperature).softmax(1) keeps every ranking of classes, so the accuracy too.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from byov.metrics.checks import checked_labels, checked_logits

COLDEST, HOTTEST = 0.01, 100.0  # where the optimum lies beyond (all held-out images right; logits that know nothing)


def fit_temperature(logits: Tensor, labels: Tensor) -> float:
    """The temperature with the least NLL on these images, from 0.01 to 100.

    NLL is convex in 1 / temperature, so its slope there has one root at most. Images whose label has logit -inf are
    left out: no temperature helps them.
    """
    from scipy.optimize import brentq  # here: importing scipy takes most of a second

    z = checked_logits(logits)
    own = z.gather(1, checked_labels(labels, z)[:, None])
    possible = own[:, 0] > -math.inf
    if not possible.any():
        raise ValueError("every label has logit -inf, so no temperature can be fitted; give images of known classes.")
    z = (z - own)[possible]
    finite = z.clamp(min=torch.finfo(z.dtype).min)  # 0 times -inf would be NaN

    def slope(log_temperature: float) -> float:
        """Of the NLL, in 1 / temperature: mean over images of E_p[logit] - own logit."""
        p = (z * math.exp(-log_temperature)).softmax(1)
        return float((p * finite).sum(1).mean())

    low, high = math.log(COLDEST), math.log(HOTTEST)
    if slope(low) <= 0:
        return COLDEST
    if slope(high) >= 0:
        return HOTTEST
    return math.exp(brentq(slope, low, high, xtol=1e-10))
