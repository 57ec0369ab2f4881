"""The teacher: the exponential moving average of the student's means (the MAP), never of a draw."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from byov.posterior import Posterior
from byov.posterior.segments import Flattened, Where
from byov.training.networks import Student


class Teacher(Flattened):
    """A copy of the student that follows its means: mean_T <- tau * mean_T + (1 - tau) * mean.

    Only its encoder and projector ever run; its predictor is there because the teacher priors need an average of the
    predictor's means too. BatchNorm statistics are its own. With `moments` it also keeps the running variance of the
    student's means, for the prior `teacher_moments`.
    """

    variance: Tensor | None

    def __init__(self, student: Student, where: Where, moments: bool = False) -> None:
        super().__init__(copy.deepcopy(student), where)
        self.requires_grad_(False)
        self.register_buffer("variance", torch.zeros_like(self.means) if moments else None)

    def flats(self) -> dict[str, Tensor]:
        return super().flats() | ({} if self.variance is None else {"variance": self.variance})

    @torch.no_grad()
    def forward(self, images: Tensor, after_trunk: bool = False) -> Tensor:
        """The projection of images (or of what the frozen trunk made of them), without gradient."""
        student: Any = self.module
        features = student.encoder.after_trunk(images) if after_trunk else student.encoder(images)
        return student.projector(features)  # type: ignore[no-any-return]

    @torch.no_grad()
    def update(self, posterior: Posterior, tau: float) -> None:
        """Moves the teacher by 1 - tau of the way to the student's means."""
        if self.variance is not None:
            # v <- tau (v + (1 - tau)(mean - mean_T)^2) with mean_T from before: E[mean^2] - E[mean]^2, never negative.
            gap = posterior.means - self.means
            self.variance.addcmul_(gap, gap, value=1 - tau).mul_(tau)
        self.means.lerp_(posterior.means, 1 - tau)
        own, others = list(self.module.parameters()), list(posterior.module.parameters())  # what is not random
        if own:
            torch._foreach_lerp_(tuple(own), tuple(others), 1 - tau)

    @torch.no_grad()
    def distance(self, posterior: Posterior) -> float:
        """How far the student's means are away, relative to the teacher's own norm."""
        own = [self.means, *self.module.parameters()]
        others = [posterior.means, *posterior.module.parameters()]
        gap = nn.utils.get_total_norm([a - b for a, b in zip(own, others, strict=True)])
        return float(gap / nn.utils.get_total_norm(own))
