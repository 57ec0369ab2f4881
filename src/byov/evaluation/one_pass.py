"""Both scores from one forward pass at the means: the oddness exactly, the uncertainty predicted by a small head.

Each image has a profile: its cosines with the most alike reference images, in falling order. The k-th of them is the
oddness. How close together they lie says how easily a draw of the weights changes their order, so the head is a ridge
regression on a few statistics of the profile. It is fitted to the reference images' own uncertainty over draws, which
is computed once and kept with the run. docs/score.md has how well it predicts; regressions on the features themselves
do worse, most of all on images of another kind.

    scorer = FastScorer(byov.load("runs/mine"))
    scorer.scores(images)                     # as `Scorer`, at the cost of one forward pass
    OnePass(bank, "consistency", draws=8)     # the same as a module, which `byov export --with-uncertainty` writes
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from byov.data.decoded import Say, say_on_stderr
from byov.data.resample import resized
from byov.evaluation.features import BATCH, features_of
from byov.evaluation.reference import Bank
from byov.evaluation.run import Run
from byov.evaluation.score import (
    CONSISTENT_PART,
    DRAWS,
    NEIGHBOURS,
    ODD_PART,
    ODDNESS,
    Scorer,
    part_of,
    reference_scores,
)
from byov.evaluation.subject import spread
from byov.metrics.correlation import spearman

POINTS = 12  # cosines of the profile that the head sees, evenly on a logarithmic scale
WIDTHS = (0.03, 0.06, 0.12, 0.25)  # of the soft boundaries, in the reference set's median length of a profile
PENALTY = 0.01  # of the ridge regression; from 0.0001 to 0.01 the correlation is the same to 0.005 (docs/score.md)
ROUNDING = 1e-5  # of a statistic: less spread than this is float32's rounding
SAME = 1 - 2e-6  # cosine from which, in a file without byov, an image is taken to be the reference image itself

EXACT: Mapping[str, Callable[[Tensor, int], Tensor]] = {
    "knn_cosine": lambda profile, odd: 1 - profile.narrow(1, 0, min(NEIGHBOURS, profile.shape[1])).mean(1),
    ODDNESS: lambda profile, odd: 1 - profile.select(1, odd - 1),
}
"""Candidates that the profile gives without a head, such as the uncertainty of runs without random weights."""


class OnePass(nn.Module):
    """Oddness and uncertainty from features at the means.

    Args:
        bank: the reference images of a run.
        uncertainty: the candidate to predict (`score.CANDIDATES`).
        draws: weight draws of the score that is predicted.
        most: compare with this many reference images at most, evenly chosen; unset: with all, and the oddness is the
            Scorer's. The neighbours are the same part of them.
    """

    reference: Tensor
    points: Tensor
    sharpness: Tensor
    centre: Tensor
    scale: Tensor
    weights: Tensor
    offset: Tensor

    def __init__(self, bank: Bank, uncertainty: str, draws: int, most: int | None = None) -> None:
        super().__init__()
        features = bank.means.features
        chosen = spread(len(features), most or len(features))
        count = len(chosen)
        self.odd, self.near = part_of(count, ODD_PART), part_of(count, CONSISTENT_PART)
        self.depth = min(max(self.odd, 3 * self.near), max(1, count - 1))
        points = sorted({round(k) - 1 for k in np.geomspace(1, self.depth, POINTS)})
        self.register_buffer("points", torch.tensor(points))
        self.register_buffer("reference", normalize(features[chosen], dim=1))
        self.places = torch.full((len(features),), -1).scatter_(0, chosen, torch.arange(count))
        """Of all reference images, among those chosen; -1: it is not."""
        self.exact = EXACT.get(uncertainty)
        self.agreement: float | None = None
        """Spearman correlation of the head with what it predicts, leaving one reference image out at a time."""
        if self.exact is None:
            own = torch.arange(len(features))
            profiles = bank.kept(f"profiles-{count}-{self.depth}", lambda: self.profile(features, own))
            scores = bank.kept(f"scores-{uncertainty}-{draws}", lambda: reference_scores(bank, uncertainty, draws))
            self._fit(profiles, scores)

    def _fit(self, profiles: Tensor, targets: Tensor) -> None:
        length = max(float((profiles[:, 0] - profiles[:, -1]).median()), ROUNDING)
        self.register_buffer("sharpness", 1 / (length * torch.tensor(WIDTHS)[:, None]))
        head = fit(self.statistics(profiles).double(), targets)
        for name in ("centre", "scale", "weights", "offset"):
            self.register_buffer(name, getattr(head, name).float())
        self.agreement = float(spearman(head.left_out, targets))

    def profile(self, features: Tensor, own: Tensor | None = None) -> Tensor:
        """Cosines with the most alike reference images, in falling order: (images, depth).

        `own` is where each image stands in the bank (`Bank.own`). Unset, an image that cannot be told from a reference
        image is taken to be that image. Either way it is compared with the others.
        """
        cosines = normalize(features, dim=1) @ self.reference.T
        if own is None:
            shift = min(1, len(self.reference) - self.depth)  # narrow, not slices: fewer operations in ONNX
            found = cosines.topk(self.depth + shift, dim=1).values
            itself = found.narrow(1, 0, 1) > SAME
            return torch.where(itself, found.narrow(1, shift, self.depth), found.narrow(1, 0, self.depth))
        own = torch.where(own >= 0, self.places[own], -1)
        rows = (own >= 0).nonzero()[:, 0]
        cosines.index_put_((rows, own[rows]), torch.tensor(-torch.inf))
        return cosines.topk(self.depth, dim=1).values

    def statistics(self, profile: Tensor) -> Tensor:
        """What the head sees of a profile: (images, statistics).

        Some of the cosines, and how sharp the boundary behind the nearest part is: if a draw moved each cosine by noise
        of some width, how much two draws would disagree on who is in front of it.
        """
        boundary = profile.narrow(1, self.near - 1, min(2, self.depth - self.near + 1)).mean(1, keepdim=True)
        inside = torch.sigmoid((profile - boundary).unsqueeze(1) * self.sharpness)
        both, total = inside.square().sum(2), inside.sum(2)
        return torch.cat([profile.index_select(1, self.points), (total - both) / self.near, 1 - both / total], dim=1)

    def forward(self, features: Tensor, own: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Oddness and uncertainty, (images,) each, in float32."""
        profile = self.profile(features, own)
        oddness = EXACT[ODDNESS](profile, self.odd)
        if self.exact is not None:
            return oddness, self.exact(profile, self.odd)
        return oddness, (self.statistics(profile) - self.centre) / self.scale @ self.weights + self.offset


class Head(NamedTuple):
    """A ridge regression on standardised statistics."""

    centre: Tensor
    scale: Tensor
    weights: Tensor
    offset: Tensor
    left_out: Tensor
    """What it predicts for each image when fitted to all others."""


def fit(statistics: Tensor, targets: Tensor, penalty: float = PENALTY) -> Head:
    """Fits a head in float64; the predictions for images left out come in closed form from the same decomposition."""
    deviation, centre = torch.std_mean(statistics, dim=0, correction=0)
    scale = deviation.clamp(min=ROUNDING)
    inputs, offset = (statistics - centre) / scale, targets.mean()
    left, singular, right = torch.linalg.svd(inputs, full_matrices=False)
    shrunk = singular.square() + penalty * len(inputs)
    along = left.T @ (targets - offset)
    weights = right.T @ (singular / shrunk * along)
    leverage = left.square() @ (singular.square() / shrunk) + 1 / len(inputs)
    residuals = targets - offset - inputs @ weights
    return Head(centre, scale, weights, offset, targets - residuals / (1 - leverage).clamp(min=ROUNDING))


def percentiles(values: Tensor, usual: Tensor) -> Tensor:
    """The part of the usual scores that are below, and half of those equal: as in `Scorer`, in operations of ONNX."""
    values = values.unsqueeze(1)
    return ((usual < values).float() + (usual <= values).float()).sum(1) * (50.0 / len(usual))


class FastScorer(Scorer):
    """A `Scorer` of one forward pass per image; `most` as for `OnePass`.

    What the head learns from takes the weight draws once, over the reference images; it is kept with the run.
    """

    fast = True

    def __init__(
        self,
        run: Run,
        uncertainty: str | None = None,
        draws: int = DRAWS,
        *,
        most: int | None = None,
        batch_size: int = BATCH,
        say: Say = say_on_stderr,
    ) -> None:
        super().__init__(run, uncertainty, draws, batch_size=batch_size, say=say)
        self.most = most

    @cached_property
    def model(self) -> OnePass:
        """The head and the reference features."""
        return OnePass(self.bank, self.uncertainty, self.draws, self.most)

    def sentence(self) -> str:
        """How the uncertainty was made, and what it is worth."""
        if self.model.exact is not None:
            return "one forward pass per image; this run's uncertainty needs no weight draws"
        return (
            f"one forward pass per image; the uncertainty is predicted (Spearman correlation with that of "
            f"{self.draws} draws, on reference images left out of the fit: {self.model.agreement:.2f})"
        )

    def usual(self) -> dict[str, Tensor]:
        """The calibration images' scores by name, each sorted; none where there are no such images."""
        found = {"oddness": self._usual_oddness, "uncertainty": self._usual_uncertainty}
        return {name: values for name, values in found.items() if values is not None}

    def _score(self, images: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        run = self.bank.run
        images = resized(images, run.image_shape[-1])
        embedding = features_of(run.encoder, images, self.batch_size)
        oddness, uncertainty = self.model(embedding, self.bank.own(images))
        return oddness.double(), uncertainty.double(), embedding

    @cached_property
    def _calibration(self) -> tuple[Tensor, Tensor]:
        features = self.bank.kept("calibration", self._calibration_features)
        oddness, uncertainty = self.model(features, torch.full((len(features),), -1))
        return oddness.double().sort().values, uncertainty.double().sort().values

    def _calibration_features(self) -> Tensor:
        return features_of(self.bank.run.encoder, self.bank.calibration_images(), self.batch_size)

    def _usual(self, name: str, draws: int) -> Tensor | None:
        return self._calibration[0 if name == ODDNESS else 1] if self.bank.calibrates else super()._usual(name, draws)
