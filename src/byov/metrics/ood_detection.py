"""Telling images of another kind apart by their uncertainty: AUROC, AUPR, FPR at 95% TPR."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from byov.metrics.ranking import auroc, average_precision, fpr_at_tpr


class Ood(NamedTuple):
    """How well an uncertainty tells images out of the distribution from those in it."""

    auroc: float
    """The chance that an image out of the distribution is less certain than one in it."""
    aupr_out: float
    """Average precision with the images out of the distribution as the positive ones, the least certain first."""
    aupr_in: float
    """Average precision with those in it as the positive ones, the surest first. Both depend on how many of each."""
    fpr95: float
    """The part of images out of the distribution that pass where 95% of those in it do; lower is better.

    As in ODIN (Liang, Li and Srikant 2018): a threshold can be set on known images, but not on unknown ones. (Others
    turn the roles round: the numbers differ.)
    """


def ood_detection(inside: Tensor, outside: Tensor) -> Ood:
    """All of them, from the uncertainties of images in the distribution and of images out of it."""
    scores = torch.cat([inside.detach().cpu(), outside.detach().cpu()])
    out = torch.arange(len(scores)) >= len(inside)
    return Ood(
        auroc=auroc(scores, out),
        aupr_out=average_precision(scores, out),
        aupr_in=average_precision(-scores, ~out),
        fpr95=fpr_at_tpr(-scores, ~out, 0.95),
    )
