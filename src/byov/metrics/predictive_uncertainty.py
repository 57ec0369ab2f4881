"""The posterior predictive of a classifier: what class probabilities do over weight draws, in constant memory.

The entropy of the mean probabilities (total uncertainty) is the mean entropy of the draws (what each draw finds hard)
plus the mutual information of class and weights (what the draws disagree about).
"""

from __future__ import annotations

from typing import Self

import torch
from torch import Tensor
from torch.special import entr

from byov.metrics.checks import checked_probabilities
from byov.metrics.running_moments import OverDraws


class Predictive(OverDraws):
    """Streaming mean, spread and entropy over draws of each image's class probabilities.

    `mean` (images, classes) is what the draws predict together; see `OverDraws` for the arithmetic.
    """

    def __init__(self, images: int, classes: int) -> None:
        super().__init__(images, classes)
        self.expected_entropy = torch.zeros(images, dtype=torch.float64)
        """(images,): mean over draws of a draw's entropy, in nats."""

    def update(self, outputs: Tensor) -> Self:
        """Takes in one draw's probabilities of all images."""
        p = checked_probabilities(outputs)
        super().update(p)
        self.expected_entropy += (entr(p).sum(1) - self.expected_entropy) / self.draws
        return self

    def merge(self, other: Self) -> Self:
        """Takes in what another has seen of the same images over other draws (another process, say)."""
        super().merge(other)
        if self.draws:
            self.expected_entropy += (other.expected_entropy - self.expected_entropy) * (other.draws / self.draws)
        return self

    @property
    def entropy(self) -> Tensor:
        """(images,): entropy of the mean probabilities, in nats."""
        nats: Tensor = entr(self.mean)
        return nats.sum(1)

    @property
    def mutual_information(self) -> Tensor:
        """(images,): entropy - expected entropy, in nats. Never negative but by rounding, which is cut off."""
        return (self.entropy - self.expected_entropy).clamp(min=0)

    @property
    def predictive_std(self) -> Tensor:
        """(images,): standard deviation over draws of the probability of the class that the mean predicts."""
        return self.std.gather(1, self.mean.argmax(1, keepdim=True)).squeeze(1)

    @property
    def predictive_std_classes(self) -> Tensor:
        """(images,): the standard deviation over draws, averaged over classes."""
        return self.std.mean(1)

    def state(self) -> dict[str, Tensor]:
        return super().state() | {"expected_entropy": self.expected_entropy}
