"""Both scores from one forward pass at the means: the oddness exactly, the uncertainty predicted by a small head.

Each image has a profile: its cosines with the most alike of the usual reference images, in falling order. How close
together they lie says how easily a draw of the weights changes their order, so the head is a ridge regression on a few
statistics of the profile, and on the distance to the nearest. It is fitted to the reference images' own uncertainty
over draws, which is computed once and kept with the run. docs/score.md has how well it predicts; regressions on the
features themselves do worse, most of all on images of another kind.

    scorer = FastScorer(byov.load("runs/mine"))
    scorer.scores(images)                     # as `Scorer`, at the cost of one forward pass
    OnePass(bank, "combined", draws=8)        # the same as a module, which `byov export --with-uncertainty` writes
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from byov._core.callbacks import Say, say_on_stderr
from byov.data.resample import resized
from byov.inference.features import BATCH, features_of
from byov.inference.inputs import spread
from byov.inference.load import Run
from byov.inference.reference import ReferenceSet
from byov.metrics.correlation import spearman
from byov.scoring.scorer import (
    DEFAULT_AT_MEANS,
    DRAWS,
    NEAR_PARTS,
    NEIGHBOURS,
    ODD_PART,
    ODDNESS,
    Scorer,
    part_of,
    reference_scores,
    usual_images,
)

POINTS = 12  # cosines of the profile that the head sees, evenly on a logarithmic scale
PROFILE_PART = 1.5 * max(NEAR_PARTS)  # of the usual images: the profile reaches beyond the largest neighbourhood
WIDTHS = (0.03, 0.06, 0.12, 0.25)  # of the soft boundaries, in the reference set's median length of a profile
PENALTY = 0.01  # of the ridge regression; from 0.0001 to 0.01 the correlation is the same to 0.005 (docs/score.md)
ROUNDING = 1e-5  # of a statistic: less spread than this is float32's rounding
SAME = 1 - 2e-6  # cosine from which, in a file without byov, an image is taken to be the reference image itself


class Neighbourhood(NamedTuple):
    """How an image lies among the reference images, at the means."""

    profile: Tensor
    """(images, depth): the largest cosines with usual reference images, in falling order."""
    distance: Tensor
    """(images,): 1 - mean of the NEIGHBOURS largest cosines with these, of features centred on all of them."""
    oddness: Tensor
    """(images,): as `score.ODDNESS`."""


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
    mean: Tensor
    lengths: Tensor
    offsets: Tensor
    points: Tensor
    sharpness: Tensor
    centre: Tensor
    scale: Tensor
    weights: Tensor
    level: Tensor

    def __init__(self, bank: ReferenceSet, uncertainty: str, draws: int, most: int | None = None) -> None:
        super().__init__()
        features = bank.means.features
        is_usual = torch.zeros(len(features), dtype=torch.bool)
        is_usual[usual_images(bank)] = True
        chosen = spread(len(features), most or len(features))
        chosen = torch.cat([chosen[is_usual[chosen]], chosen[~is_usual[chosen]]])  # usual images first: a slice of all
        self.usual = int(is_usual[chosen].sum())
        self.odd = part_of(len(chosen), ODD_PART)
        self.near = sorted({part_of(self.usual, part) for part in NEAR_PARTS})
        self.depth = min(max(part_of(self.usual, PROFILE_PART), max(self.near)), max(1, self.usual - 1))
        points = sorted({round(k) - 1 for k in np.geomspace(1, self.depth, POINTS)})
        self.register_buffer("points", torch.tensor(points))
        self.places = torch.full((len(features),), -1).scatter_(0, chosen, torch.arange(len(chosen)))
        """Of all reference images, among those chosen; -1: it is not."""
        self._set_reference(features[chosen], bank.means.moments.mean)
        self.predicts = uncertainty not in EXACT
        self._exact = EXACT.get(uncertainty)
        self.agreement: float | None = None
        """Spearman correlation of the head with what it predicts, leaving one reference image out at a time."""
        if self.predicts:
            own = torch.arange(len(features))
            rows = bank.cached(
                f"neighbourhoods-{len(chosen)}-{self.depth}",
                lambda: torch.cat([part.view(len(own), -1) for part in self.neighbourhood(features, own)], dim=1),
            )
            known = Neighbourhood(rows[:, :-2], rows[:, -2], rows[:, -1])
            self._fit(
                known,
                bank.cached(f"reference-{uncertainty}-{draws}", lambda: reference_scores(bank, uncertainty, draws)),
            )

    def _set_reference(self, features: Tensor, mean: Tensor) -> None:
        """What both kinds of cosines are made of by one product of matrices (`neighbourhood`)."""
        centred, norms = features - mean.float(), features.double().norm(dim=1).clamp(min=1e-12)
        offsets = torch.stack([torch.ones_like(norms), (features.double() - mean) @ mean]) / norms
        self.register_buffer("reference", normalize(centred, dim=1))
        self.register_buffer("mean", mean.float())
        self.register_buffer("lengths", (centred.double().norm(dim=1) / norms).float())
        self.register_buffer("offsets", offsets.float())

    def _fit(self, known: Neighbourhood, targets: Tensor) -> None:
        length = max(float((known.profile[:, 0] - known.profile[:, -1]).median()), ROUNDING)
        self.register_buffer("sharpness", 1 / (length * torch.tensor(WIDTHS)[:, None]))
        head = fit(self.statistics(known).double(), targets)
        for name in ("centre", "scale", "weights", "level"):
            self.register_buffer(name, getattr(head, name).float())
        self.agreement = float(spearman(head.left_out, targets))

    def neighbourhood(self, features: Tensor, own: Tensor | None = None) -> Neighbourhood:
        """Where images lie among the reference images.

        `own` gives each image's position in the reference set (`ReferenceSet.own`). If None, an image that cannot be
        distinguished from a reference image is taken to be that image. Either way it is compared with the others.

        The cosines come from those of centred features: <x, b> = <x - m, b - m> + <x, m> + <b, m> - <m, m>. The other
        way round would lose digits.
        """
        centred, norm = features - self.mean, features.norm(dim=1, keepdim=True).clamp(min=1e-12)
        near = normalize(centred, dim=1) @ self.reference.T
        shift = torch.cat([(features @ self.mean).unsqueeze(1), torch.ones_like(norm)], dim=1) / norm
        cosines = near * self.lengths * (centred.norm(dim=1, keepdim=True) / norm) + shift @ self.offsets
        if own is None:
            return self._ranked(near, cosines, itself=1)
        own = torch.where(own >= 0, self.places[own], -1)
        rows = (own >= 0).nonzero()[:, 0]
        for values in (cosines, near):
            values.index_put_((rows, own[rows]), torch.tensor(-torch.inf))
        return self._ranked(near, cosines)

    def _ranked(self, near: Tensor, cosines: Tensor, itself: int = 0) -> Neighbourhood:
        """The neighbourhood from both kinds of cosines with all reference images.

        With `itself`, a cosine of 1 is that of the image with itself, and is passed over.
        """
        ranked = []
        for values, count, k in (
            (cosines, self.usual, self.depth),
            (near, self.usual, min(NEIGHBOURS, self.usual - 1)),
            (cosines, len(self.reference), self.odd),
        ):  # narrow, not slices: fewer operations in ONNX
            more = min(itself, count - k)
            found = values.narrow(1, 0, count).topk(k + more, dim=1).values
            if more:
                is_itself = found.narrow(1, 0, 1) > SAME
                found = torch.where(is_itself, found.narrow(1, more, k), found.narrow(1, 0, k))
            ranked.append(found)
        profile, nearest, odd = ranked
        return Neighbourhood(profile, 1 - nearest.mean(1), 1 - odd.select(1, self.odd - 1))

    def statistics(self, of: Neighbourhood) -> Tensor:
        """What the head sees: (images, statistics).

        Some of the cosines; how sharp the boundaries of the neighbourhoods are: if a draw moved each cosine by noise of
        some width, how much two draws would disagree on who is inside; and the distance.
        """
        profile, soft = of.profile, []
        for size in self.near:
            boundary = profile.narrow(1, size - 1, min(2, self.depth - size + 1)).mean(1, keepdim=True)
            inside = torch.sigmoid((profile - boundary).unsqueeze(1) * self.sharpness)
            both, total = inside.square().sum(2), inside.sum(2)
            soft += [(total - both) / size, 1 - both / total]
        return torch.cat([profile.index_select(1, self.points), *soft, of.distance.unsqueeze(1)], dim=1)

    def forward(self, features: Tensor, own: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Oddness and uncertainty, (images,) each, in float32."""
        of = self.neighbourhood(features, own)
        if self._exact is not None:
            return of.oddness, self._exact(of)
        return of.oddness, (self.statistics(of) - self.centre) / self.scale @ self.weights + self.level


EXACT: Mapping[str, Callable[[Neighbourhood], Tensor]] = {
    DEFAULT_AT_MEANS: lambda of: of.distance,
    ODDNESS: lambda of: of.oddness,
}
"""Candidates that need no head: that of runs without random weights is one of them."""


class Head(NamedTuple):
    """A ridge regression on standardised statistics."""

    centre: Tensor
    scale: Tensor
    weights: Tensor
    level: Tensor
    left_out: Tensor
    """What it predicts for each image when fitted to all others."""


def fit(statistics: Tensor, targets: Tensor, penalty: float = PENALTY) -> Head:
    """Fits a head in float64; the predictions for images left out come in closed form from the same decomposition."""
    deviation, centre = torch.std_mean(statistics, dim=0, correction=0)
    scale = deviation.clamp(min=ROUNDING)
    inputs, level = (statistics - centre) / scale, targets.mean()
    left, singular, right = torch.linalg.svd(inputs, full_matrices=False)
    shrunk = singular.square() + penalty * len(inputs)
    along = left.T @ (targets - level)
    weights = right.T @ (singular / shrunk * along)
    leverage = left.square() @ (singular.square() / shrunk) + 1 / len(inputs)
    residuals = targets - level - inputs @ weights
    return Head(centre, scale, weights, level, targets - residuals / (1 - leverage).clamp(min=ROUNDING))


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
        return OnePass(self.reference, self.uncertainty, self.draws, self.most)

    def sentence(self) -> str:
        """How the uncertainty was made, and what it is worth."""
        if not self.model.predicts:
            return "one forward pass per image; this run's uncertainty needs no weight draws"
        return (
            f"one forward pass per image; the uncertainty is predicted (Spearman correlation with that of "
            f"{self.draws} draws, on reference images left out of the fit: {self.model.agreement:.2f})"
        )

    def _score(self, images: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        run = self.reference.run
        images = resized(images, run.image_shape[-1])
        embedding = features_of(run.encoder, images, self.batch_size)
        oddness, uncertainty = self.model(embedding, self.reference.own(images))
        return oddness.double(), uncertainty.double(), embedding

    def _calibration_scores(self) -> Tensor:
        features = self.reference.cached("calibration", self._calibration_features)
        return torch.stack(self.model(features, torch.full((len(features),), -1))).double()

    def _calibration_features(self) -> Tensor:
        return features_of(self.reference.run.encoder, self.reference.calibration_images(), self.batch_size)
