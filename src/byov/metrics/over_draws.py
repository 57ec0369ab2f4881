"""Mean, spread and uncertainty of outputs over weight draws, in constant memory.

For a classifier, the entropy of the mean probabilities (total uncertainty) is the mean entropy of the draws (what each
draw finds hard) plus the mutual information of class and weights (what the draws disagree on).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Self

import torch
from torch import Tensor
from torch.special import entr

from byov._core.randomness import generator
from byov.metrics.checks import checked_probabilities


class OverDraws:
    """Streaming mean and variance over draws of outputs (images, width).

    Sums are float64 on the CPU, since not every device has float64. Welford's update and Chan's merge never subtract
    large numbers from each other, as a sum of squares would.
    """

    def __init__(self, images: int, width: int) -> None:
        self.draws = 0
        self.mean = torch.zeros(images, width, dtype=torch.float64)
        self.squares = torch.zeros_like(self.mean)
        """Sum over draws of the squared distance to the mean, shape (images, width)."""

    def update(self, outputs: Tensor) -> Self:
        """Add one draw's outputs for all images."""
        self._check_shape(outputs)
        self.draws += 1
        delta = outputs.double() - self.mean
        self.mean.add_(delta, alpha=1 / self.draws)
        self.squares.addcmul_(delta, delta, value=1 - 1 / self.draws)  # outputs - new mean = delta - delta / draws
        return self

    def merge(self, other: Self) -> Self:
        """Add what another instance has seen of the same images over other draws, such as another process."""
        self._check_shape(other.mean)
        draws = self.draws + other.draws
        if draws:
            delta = other.mean - self.mean
            self.mean.add_(delta, alpha=other.draws / draws)
            self.squares.add_(other.squares).addcmul_(delta, delta, value=self.draws * other.draws / draws)
        self.draws = draws
        return self

    @property
    def variance(self) -> Tensor:
        """Variance over draws, shape (images, width), divided by draws - 1 as in `Posterior.predict`."""
        return self.squares / max(self.draws - 1, 1)

    @property
    def std(self) -> Tensor:
        """Standard deviation over draws, shape (images, width)."""
        return self.variance.sqrt()

    def state(self) -> dict[str, Tensor]:
        """Return everything as tensors (not copies), to save or to send; `from_state` restores it."""
        return {"draws": torch.tensor(self.draws), "mean": self.mean, "squares": self.squares}

    @classmethod
    def from_state(cls, state: dict[str, Tensor]) -> Self:
        """Restore a copy from its `state`; updating it leaves the given tensors unchanged."""
        made = cls(*state["mean"].shape)
        made.draws = int(state["draws"])
        for name, tensor in made.state().items():
            if name != "draws":
                tensor.copy_(state[name])
        return made

    def _check_shape(self, outputs: Tensor) -> None:
        if outputs.shape != self.mean.shape:
            raise ValueError(
                f"outputs {tuple(outputs.shape)} do not match the previous ones, {tuple(self.mean.shape)}."
            )


class Predictive(OverDraws):
    """Streaming mean, spread and entropy over draws of each image's class probabilities.

    `mean` (images, classes) is the posterior predictive; see `OverDraws` for the arithmetic. Memory does not depend on
    the number of draws.

    Args:
        images: Number of images.
        classes: Number of classes.

    Examples:
        >>> import torch
        >>> from byov import metrics
        >>> predictive = metrics.Predictive(images=1, classes=2)
        >>> for draw in (torch.tensor([[0.9, 0.1]]), torch.tensor([[0.5, 0.5]])):
        ...     predictive = predictive.update(draw)
        >>> [round(p, 4) for p in predictive.mean[0].tolist()]
        [0.7, 0.3]
        >>> round(predictive.mutual_information.item(), 4)
        0.1017
    """

    def __init__(self, images: int, classes: int) -> None:
        super().__init__(images, classes)
        self.expected_entropy = torch.zeros(images, dtype=torch.float64)
        """Mean over draws of a draw's entropy, in nats, shape (images,)."""

    def update(self, outputs: Tensor) -> Self:
        """Add one draw's probabilities of all images."""
        p = checked_probabilities(outputs)
        super().update(p)
        self.expected_entropy += (entr(p).sum(1) - self.expected_entropy) / self.draws
        return self

    def merge(self, other: Self) -> Self:
        """Add what another instance has seen of the same images over other draws, such as another process."""
        super().merge(other)
        if self.draws:
            self.expected_entropy += (other.expected_entropy - self.expected_entropy) * (other.draws / self.draws)
        return self

    @property
    def entropy(self) -> Tensor:
        """Entropy of the mean probabilities, in nats, shape (images,)."""
        nats: Tensor = entr(self.mean)
        return nats.sum(1)

    @property
    def mutual_information(self) -> Tensor:
        """Entropy less expected entropy, in nats, shape (images,); negative rounding errors are set to 0."""
        return (self.entropy - self.expected_entropy).clamp(min=0)

    @property
    def predictive_std(self) -> Tensor:
        """Standard deviation over draws of the probability of the predicted class, shape (images,)."""
        return self.std.gather(1, self.mean.argmax(1, keepdim=True)).squeeze(1)

    @property
    def predictive_std_classes(self) -> Tensor:
        """Standard deviation over draws, averaged over classes, shape (images,)."""
        return self.std.mean(1)

    def state(self) -> dict[str, Tensor]:
        return super().state() | {"expected_entropy": self.expected_entropy}


class OfDraws(NamedTuple):
    """The predictive with a given number of draws, over bootstraps."""

    draws: int
    mean: float
    """Mean over images and bootstraps."""
    std: float
    """Standard deviation over bootstraps of the average over images."""
    image_std: float
    """Standard deviation over bootstraps per image, averaged over images."""


def predictive_over_draws(
    probabilities: Tensor, counts: Sequence[int], bootstraps: int = 50, seed: int = 0
) -> list[OfDraws]:
    """Bootstrap the predictive over numbers of draws (the paper's Figure 5).

    The probabilities are (draws, images, classes). Measured is an image's mean probability, over K draws, of the class
    that these K draws predict. Few draws overstate it, since each is certain of its own class. Its noise falls as about
    1 / sqrt(K).
    """
    if probabilities.ndim != 3 or bootstraps < 2 or not counts or min(counts) < 1:
        raise ValueError(
            "give probabilities (draws, images, classes), at least two bootstraps, and counts of at least 1."
        )
    return [_with(probabilities.double(), count, bootstraps, seed) for count in counts]


def _with(probabilities: Tensor, count: int, bootstraps: int, seed: int) -> OfDraws:
    draws = len(probabilities)
    chosen = torch.randint(draws, (bootstraps, count), generator=generator(seed, count))
    weights = torch.zeros(bootstraps, draws, dtype=torch.float64)
    weights.scatter_add_(1, chosen, torch.full(chosen.shape, 1 / count, dtype=torch.float64))
    means = (weights @ probabilities.flatten(1)).view(bootstraps, *probabilities.shape[1:])
    predictive = means.amax(2)
    return OfDraws(
        count, float(predictive.mean()), float(predictive.mean(1).std()), float(predictive.std(dim=0).mean())
    )
