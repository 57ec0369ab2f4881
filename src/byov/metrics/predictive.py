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


class Predictive:
    """Streaming mean, spread and entropy over draws of each image's class probabilities.

    Sums are float64 and on the CPU (not every device has float64); Welford's update and Chan's merge never subtract
    large numbers from each other, as a sum of squares would.
    """

    def __init__(self, images: int, classes: int) -> None:
        self.draws = 0
        self.mean = torch.zeros(images, classes, dtype=torch.float64)
        """(images, classes): the probabilities that the draws predict together."""
        self.squares = torch.zeros_like(self.mean)
        """(images, classes): sum over draws of the squared distance to the mean."""
        self.expected_entropy = torch.zeros(images, dtype=torch.float64)
        """(images,): mean over draws of a draw's entropy, in nats."""

    def update(self, probabilities: Tensor) -> Self:
        """Takes in one draw's probabilities of all images."""
        p = checked_probabilities(probabilities)
        self._check_shape(p)
        self.draws += 1
        delta = p - self.mean
        self.mean.add_(delta, alpha=1 / self.draws)
        self.squares.addcmul_(delta, delta, value=1 - 1 / self.draws)
        self.expected_entropy += (entr(p).sum(1) - self.expected_entropy) / self.draws
        return self

    def merge(self, other: Predictive) -> Self:
        """Takes in what another has seen of the same images over other draws (another process, say)."""
        self._check_shape(other.mean)
        draws = self.draws + other.draws
        if draws == 0:
            return self
        share = other.draws / draws
        delta = other.mean - self.mean
        self.mean += delta * share
        self.squares += other.squares + delta.square() * (self.draws * share)
        self.expected_entropy += (other.expected_entropy - self.expected_entropy) * share
        self.draws = draws
        return self

    @property
    def std(self) -> Tensor:
        """(images, classes): standard deviation over draws, with draws - 1 below as `Posterior.predict` has it."""
        return (self.squares / max(self.draws - 1, 1)).sqrt()

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
        """All of it as tensors (its own, not copies), to save or to send; `from_state` makes it whole again."""
        return {
            "draws": torch.tensor(self.draws),
            "mean": self.mean,
            "squares": self.squares,
            "expected_entropy": self.expected_entropy,
        }

    @classmethod
    def from_state(cls, state: dict[str, Tensor]) -> Self:
        """A copy of the one whose `state` this is: updating it leaves the given tensors alone."""
        predictive = cls(*state["mean"].shape)
        predictive.draws = int(state["draws"])
        predictive.mean.copy_(state["mean"])
        predictive.squares.copy_(state["squares"])
        predictive.expected_entropy.copy_(state["expected_entropy"])
        return predictive

    def _check_shape(self, p: Tensor) -> None:
        if p.shape != self.mean.shape:
            raise ValueError(f"probabilities {tuple(p.shape)} do not go with those before, {tuple(self.mean.shape)}.")
