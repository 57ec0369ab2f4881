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

    Only its encoder and projector run; it has a predictor because the teacher priors need an average of the predictor's
    means too. It has its own BatchNorm statistics. With `moments` it also tracks the running variance of the student's
    means, for the prior `teacher_moments`.
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
        """Project images, or the frozen trunk's activations of them, without gradient."""
        student: Any = self.module
        features = student.encoder.after_trunk(images) if after_trunk else student.encoder(images)
        return student.projector(features)  # type: ignore[no-any-return]

    @torch.no_grad()
    def update(self, posterior: Posterior, tau: float) -> None:
        """Move the teacher towards the student's means by 1 - tau of the gap."""
        if self.variance is not None:
            # v <- tau (v + (1 - tau)(mean - mean_T)^2) with mean_T from before: E[mean^2] - E[mean]^2, never negative.
            gap = posterior.means - self.means
            self.variance.addcmul_(gap, gap, value=1 - tau).mul_(tau)
        self.means.lerp_(posterior.means, 1 - tau)
        own, others = list(self.module.parameters()), list(posterior.module.parameters())  # those that are not random
        if own:
            torch._foreach_lerp_(tuple(own), tuple(others), 1 - tau)

    @torch.no_grad()
    def distance(self, posterior: Posterior) -> float:
        """Return the distance to the student's means, relative to the norm of the teacher."""
        own = [self.means, *self.module.parameters()]
        others = [posterior.means, *posterior.module.parameters()]
        gap = nn.utils.get_total_norm([a - b for a, b in zip(own, others, strict=True)])
        return float(gap / nn.utils.get_total_norm(own))
