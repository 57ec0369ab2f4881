"""Mean and variance over weight draws of what each image gets, in constant memory."""

from __future__ import annotations

from typing import Self

import torch
from torch import Tensor


class OverDraws:
    """Streaming mean and variance over draws of outputs (images, width).

    Sums are float64 and on the CPU (not every device has float64); Welford's update and Chan's merge never subtract
    large numbers from each other, as a sum of squares would.
    """

    def __init__(self, images: int, width: int) -> None:
        self.draws = 0
        self.mean = torch.zeros(images, width, dtype=torch.float64)
        self.squares = torch.zeros_like(self.mean)
        """(images, width): sum over draws of the squared distance to the mean."""

    def update(self, outputs: Tensor) -> Self:
        """Takes in one draw's outputs for all images."""
        self._check_shape(outputs)
        self.draws += 1
        delta = outputs.double() - self.mean
        self.mean.add_(delta, alpha=1 / self.draws)
        self.squares.addcmul_(delta, delta, value=1 - 1 / self.draws)  # outputs - new mean = delta - delta / draws
        return self

    def merge(self, other: Self) -> Self:
        """Takes in what another has seen of the same images over other draws (another process, say)."""
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
        """(images, width), with draws - 1 below as `Posterior.predict` has it."""
        return self.squares / max(self.draws - 1, 1)

    @property
    def std(self) -> Tensor:
        """(images, width): standard deviation over draws."""
        return self.variance.sqrt()

    def state(self) -> dict[str, Tensor]:
        """All of it as tensors (its own, not copies), to save or to send; `from_state` makes it whole again."""
        return {"draws": torch.tensor(self.draws), "mean": self.mean, "squares": self.squares}

    @classmethod
    def from_state(cls, state: dict[str, Tensor]) -> Self:
        """A copy of the one whose `state` this is: updating it leaves the given tensors alone."""
        made = cls(*state["mean"].shape)
        made.draws = int(state["draws"])
        for name, tensor in made.state().items():
            if name != "draws":
                tensor.copy_(state[name])
        return made

    def _check_shape(self, outputs: Tensor) -> None:
        if outputs.shape != self.mean.shape:
            raise ValueError(f"outputs {tuple(outputs.shape)} do not go with those before, {tuple(self.mean.shape)}.")
