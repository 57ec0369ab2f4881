"""Both scores from one forward pass at the means: the oddness exactly, the uncertainty predicted by a small head.

Each image has a profile: its cosines with the most similar usual reference images, in falling order. The closer
together they are, the more easily a weight draw changes their order. So the head is a ridge regression on a few
statistics of the profile and on the distance to the nearest images. It is fitted to the reference images' uncertainty
over draws, which is computed once and cached with the run. docs/score.md shows how well it predicts. Regressions on the
features themselves do worse, most of all on out-of-distribution images.

    scorer = FastScorer(byov.load("runs/mine"))
    scorer.scores(images)                         # like `Scorer`, at the cost of one forward pass
    OnePass(reference, "combined", draws=8)       # the same as a module, which `byov export --with-uncertainty` writes
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
from byov.data.transforms import resized
from byov.inference.inputs import spread
from byov.inference.run import BATCH, ReferenceSet, Run, features_of
from byov.metrics.correlation import spearman
from byov.scoring.scores import (
    DEFAULT_AT_MEANS,
    DRAWS,
    NEAR_SHARES,
    NEIGHBOURS,
    ODD_SHARE,
    ODDNESS,
    Scorer,
    neighbour_count,
    reference_scores,
    usual_images,
)

POINTS = 12  # cosines of the profile that the head takes, evenly on a logarithmic scale
PROFILE_SHARE = 1.5 * max(NEAR_SHARES)  # of the usual images: the profile reaches beyond the largest neighbourhood
WIDTHS = (0.03, 0.06, 0.12, 0.25)  # of the soft boundaries, relative to the median range of a profile
PENALTY = 0.01  # of the ridge regression; from 0.0001 to 0.01 the correlation is the same to 0.005 (docs/score.md)
ROUNDING = 1e-5  # of a statistic: less spread than this is float32's rounding
SAME = 1 - 2e-6  # an exported model takes an image with this cosine to be the reference image itself


class Neighbourhood(NamedTuple):
    """How images lie among the reference images, at the means."""

    profile: Tensor
    """(images, depth): the largest cosines with usual reference images, in falling order."""
    distance: Tensor
    """(images,): 1 - mean of the NEIGHBOURS largest cosines with usual images, of centred features."""
    oddness: Tensor
    """(images,): as the candidate ODDNESS."""


class OnePass(nn.Module):
    """Oddness and uncertainty from features at the means.

    Args:
        reference: The reference set of a run.
        uncertainty: The candidate to predict, a key of CANDIDATES.
        draws: Weight draws of the score that is predicted.
        most: Compare with at most this many reference images, spaced evenly; None: with all of them, and the oddness
            equals the Scorer's. The shares of neighbours stay the same.
    """

    reference: Tensor
    mean: Tensor
    lengths: Tensor
    offsets: Tensor
    points: Tensor
    inner: Tensor
    outer: Tensor
    sizes: Tensor
    sharpness: Tensor
    centre: Tensor
    scale: Tensor
    weights: Tensor
    level: Tensor

    def __init__(self, reference: ReferenceSet, uncertainty: str, draws: int, most: int | None = None) -> None:
        super().__init__()
        features = reference.means.features
        is_usual = torch.zeros(len(features), dtype=torch.bool)
        is_usual[usual_images(reference)] = True
        chosen = spread(len(features), most or len(features))
        chosen = torch.cat([chosen[is_usual[chosen]], chosen[~is_usual[chosen]]])  # usual images first: a slice of all
        self.usual = int(is_usual[chosen].sum())
        self.odd = neighbour_count(len(chosen), ODD_SHARE)
        self.near = sorted({neighbour_count(self.usual, share) for share in NEAR_SHARES})
        self.depth = min(max(neighbour_count(self.usual, PROFILE_SHARE), max(self.near)), max(1, self.usual - 1))
        points = sorted({round(k) - 1 for k in np.geomspace(1, self.depth, POINTS)})
        self.register_buffer("points", torch.tensor(points))
        sizes = torch.tensor(self.near)
        self.register_buffer("inner", sizes - 1)  # the last neighbour inside, and the first outside
        self.register_buffer("outer", sizes.clamp(max=self.depth - 1))
        self.register_buffer("sizes", sizes[:, None].float())
        self.places = torch.full((len(features),), -1).scatter_(0, chosen, torch.arange(len(chosen)))
        """Position of each reference image among those chosen; -1 if it is not chosen."""
        self._set_reference(features[chosen], reference.means.moments.mean)
        self.predicts = uncertainty not in EXACT
        self._exact = EXACT.get(uncertainty)
        self.agreement: float | None = None
        """Spearman correlation of the head with what it predicts, over leave-one-out predictions."""
        if self.predicts:
            own = torch.arange(len(features))
            rows = reference.cached(
                f"neighbourhoods-{len(chosen)}-{self.depth}",
                lambda: torch.cat([part.view(len(own), -1) for part in self.neighbourhood(features, own)], dim=1),
            )
            known = Neighbourhood(rows[:, :-2], rows[:, -2], rows[:, -1])
            self._fit(
                known,
                reference.cached(
                    f"reference-{uncertainty}-{draws}", lambda: reference_scores(reference, uncertainty, draws)
                ),
            )

    def _set_reference(self, features: Tensor, mean: Tensor) -> None:
        """Store what `neighbourhood` needs to get both kinds of cosines from one matrix product."""
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
        """Compare images with the reference images.

        `own` gives each image's position in the reference set (`ReferenceSet.own`). If None, an image that cannot be
        distinguished from a reference image is taken to be that image. Such an image is compared with the others only.

        The cosines come from those of centred features: <x, b> = <x - m, b - m> + <x, m> + <b, m> - <m, m>. The
        reverse would lose digits.
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
        """The neighbourhood, from both kinds of cosines with all reference images.

        With `itself` 1, a largest cosine of 1 is taken to be the image's cosine with itself, and is skipped.
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
        """(images, statistics): the inputs of the head.

        They are some of the cosines, the distance, and how sharp the boundaries of the neighbourhoods are: if a draw
        moved each cosine by noise of some width, how much would two draws disagree on which images are inside?
        """
        profile = of.profile
        boundary = (profile.index_select(1, self.inner) + profile.index_select(1, self.outer)) / 2
        inside = torch.sigmoid((profile[:, None, None] - boundary[:, :, None, None]) * self.sharpness)
        both, total = inside.square().sum(3), inside.sum(3)  # (images, sizes, widths)
        soft = torch.cat([(total - both) / self.sizes, 1 - both / total], dim=2).flatten(1)
        return torch.cat([profile.index_select(1, self.points), soft, of.distance.unsqueeze(1)], dim=1)

    def forward(self, features: Tensor, own: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return oddness and uncertainty, (images,) each, in float32."""
        of = self.neighbourhood(features, own)
        if self._exact is not None:
            return of.oddness, self._exact(of)
        return of.oddness, (self.statistics(of) - self.centre) / self.scale @ self.weights + self.level


EXACT: Mapping[str, Callable[[Neighbourhood], Tensor]] = {
    DEFAULT_AT_MEANS: lambda of: of.distance,
    ODDNESS: lambda of: of.oddness,
}
"""Candidates that need no head, such as the default of runs without random weights."""


class Head(NamedTuple):
    """A ridge regression on standardised statistics."""

    centre: Tensor
    scale: Tensor
    weights: Tensor
    level: Tensor
    left_out: Tensor
    """The prediction for each image when fitted to all others."""


def fit(statistics: Tensor, targets: Tensor, penalty: float = PENALTY) -> Head:
    """Fit a head in float64; leave-one-out predictions come in closed form from the same decomposition."""
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


def percentiles(values: Tensor, calibration: Tensor) -> Tensor:
    """The share of the calibration scores below, plus half of those equal: like `Scorer`, in operations of ONNX."""
    values = values.unsqueeze(1)
    return ((calibration < values).float() + (calibration <= values).float()).sum(1) * (50.0 / len(calibration))


class FastScorer(Scorer):
    """A `Scorer` that predicts the uncertainty from one forward pass per image.

    The head is fitted once, to weight draws over the reference images; these are cached with the run.

    Args:
        run: An opened run.
        uncertainty: A key of CANDIDATES; None: the run's default.
        draws: Weight draws that the head is fitted to.
        most: Reference images that the head uses, at most; None: all (see `OnePass`).
        batch_size: Images encoded at a time.
        say: Called with a sentence where percentiles are not available.

    Raises:
        BadInput: If the run does not allow this uncertainty, or its reference images are gone.

    Example:
        >>> scorer = byov.FastScorer(byov.load("runs/mine"), draws=2)
        >>> scorer.scores(byov.open_source("digits").load("test").images[:5]).uncertainty.shape
        torch.Size([5])
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
        """Describe how the uncertainty was computed, and how well it predicts that over draws."""
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
