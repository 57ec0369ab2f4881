"""Two label-free scores of an image, both from how it lies among the reference images (the bank).

`oddness`: how unlike the folder it is. Cosine distance to the k-th nearest reference image, at the means, with k about
6% of the reference set: a group of odd images that are alike cannot hide itself unless it is larger than that.
`uncertainty`: how unreliable its representation is. The share of its nearest reference images on which two weight draws
disagree, times the distance to the ten nearest. Both compare with the usual reference images only: those that are odd
themselves are left out, since a group of odd images would find itself there, and look certain.
Higher is odder, and less certain.

These two are the winners among the candidates (docs/score.md); the others are kept for comparison. A candidate is a
function of a few terms, each a function of one draw and averaged over draws; so all of them are streaming, and one pass
over the draws serves as many as one likes. Within a draw, features are aligned (standardised on the bank, then given
back the bank's moments at the means). An image that is in the bank itself is compared with the others there: it would
otherwise be more certain than its like, for no reason but that it was chosen.

    scorer = Scorer(byov.load("runs/mine"))
    for chunk in chunks:
        scores = scorer.scores(chunk)      # .oddness, .uncertainty, a percentile of each, .embedding
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import normalize

from byov._core.callbacks import Progress, Say, say_on_stderr
from byov._core.errors import BadInput
from byov.data.resample import resized
from byov.inference.features import BATCH, at_this_draw, before_draws
from byov.inference.inputs import in_channels
from byov.inference.load import Run
from byov.inference.reference import Moments, ReferenceSet, aligned, at_draw, constant

NEIGHBOURS = 10  # bank images an image is compared with, by the candidates that distances make
ODD_PART = 0.06  # of the bank: which neighbour's distance is the oddness
CONSISTENT_PART = 0.02  # of the bank: the neighbours on which draws may agree
NEAR_PARTS = (0.005, 0.01, 0.02, 0.04)  # the same at several sizes: that of a folder's groups is not known
FENCE = 0.5  # interquartile ranges above the upper quartile of the bank's oddness: its images beyond are not usual
SHARPNESS = 0.1  # temperature of the soft assignment to the bank, on cosines
SHRINKAGE = 0.1  # of the bank's correlations towards none: a bank may have fewer images than features
DRAWS = 8  # of the weights, where the user does not say: docs/score.md has what more of them gain
BLOCK = 1024  # images at a time: bounds the terms that hold a number for each bank image
ODDNESS = "kth_cosine"
DEFAULT, DEFAULT_AT_MEANS = "combined", "knn_cosine"  # uncertainty, for a run that has a posterior, and for others


def part_of(bank: int, part: float) -> int:
    """How many neighbours a part of the bank is: at least NEIGHBOURS, as far as there are so many."""
    return max(1, min(max(NEIGHBOURS, round(part * bank)), bank - 1))


class OneDraw:
    """Images and bank as one draw sees them; what several terms need is computed once.

    `own`: where in the bank each image stands itself (`ReferenceSet.own`), -1 if it does not; unset: none does.
    """

    def __init__(self, bank: ReferenceSet, raw: Tensor, k: int | None, own: Tensor | None = None) -> None:
        self.raw = raw
        rows = torch.empty(0, dtype=torch.int64) if own is None else (own >= 0).nonzero()[:, 0]
        self._selves = (rows, rows if own is None else own[rows])
        of, spread = bank.at(k).moments, bank.means.moments.std
        self._located = bank.aligned(raw, k), bank.aligned(bank.at(k).features, k)
        centred = Moments(torch.zeros_like(spread), spread)
        self.images = aligned(raw, of, centred)
        self.bank = aligned(bank.at(k).features, of, centred)
        self.spread = torch.where(constant(bank.means.moments), 1.0, spread).to(raw.dtype)  # 1: dead over the bank
        self._bank = bank

    @cached_property
    def usual(self) -> Tensor:
        """Which bank images are not odd themselves."""
        return usual_images(self._bank)

    @cached_property
    def cosines(self) -> Tensor:
        """(images, bank); of an image with itself -inf."""
        found = normalize(self.images, dim=1) @ normalize(self.bank, dim=1).T
        return found.index_put_(self._selves, torch.tensor(-torch.inf, dtype=found.dtype))

    @cached_property
    def nearest(self) -> tuple[Tensor, Tensor]:
        """Distances to the nearest bank images, and which these are: (images, NEIGHBOURS) each."""
        ours, theirs = self.images.square().sum(1, keepdim=True), self.bank.square().sum(1)
        squares = torch.addmm(theirs + ours, self.images, self.bank.T, alpha=-2)
        squares.index_put_(self._selves, torch.tensor(torch.inf, dtype=squares.dtype))
        found, which = squares.topk(min(NEIGHBOURS, len(self.bank) - 1), dim=1, largest=False)
        return found.clamp_(min=0).sqrt_(), which

    @cached_property
    def likeness(self) -> Tensor:
        """(images, bank): cosines of features that are not centred; of an image with itself -inf."""
        images, bank = (normalize(located, dim=1) for located in self._located)
        found: Tensor = images @ bank.T
        return found.index_put_(self._selves, torch.tensor(-torch.inf, dtype=found.dtype))

    @cached_property
    def assignment(self) -> Tensor:
        """(images, bank): soft assignment, rows sum to 1."""
        return (self.cosines / SHARPNESS).softmax(1)


# --------------------------------------------------------------------------------------------------- terms of one draw


def _distance(draw: OneDraw) -> Tensor:
    return draw.nearest[0].mean(1)


def _votes(which: Tensor, bank: int) -> Tensor:
    """(images, bank): 1 for the nearest."""
    return torch.zeros(len(which), bank).scatter_(1, which, 1.0)


def _alike(draw: OneDraw) -> Tensor:
    """Which bank images are the most alike: (images, CONSISTENT_PART)."""
    return draw.likeness.topk(part_of(len(draw.bank), CONSISTENT_PART), dim=1).indices


def _usual_votes(draw: OneDraw) -> Tensor:
    """(images, parts, usual bank images): votes for the most alike, for each of NEAR_PARTS."""
    count = len(draw.usual)
    sizes = [part_of(count, part) for part in NEAR_PARTS]
    which = draw.likeness[:, draw.usual].topk(max(sizes), dim=1).indices
    return torch.stack([_votes(which[:, :size], count) for size in sizes], dim=1)


def _usual_distance(draw: OneDraw) -> Tensor:
    """Mean cosine distance to the nearest of the usual bank images, centred."""
    nearest = min(NEIGHBOURS, len(draw.usual) - 1)
    return 1 - draw.cosines[:, draw.usual].topk(nearest, dim=1).values.mean(1)


def _whitened_norm(draw: OneDraw) -> Tensor:
    """Mahalanobis distance to the bank's centre, on standardised features with shrunk correlations."""
    bank = (draw.bank / draw.spread).double()
    shrunk = torch.eye(bank.shape[1], dtype=bank.dtype) * SHRINKAGE + bank.T @ bank * ((1 - SHRINKAGE) / len(bank))
    factor = torch.linalg.cholesky(shrunk)
    images = (draw.images / draw.spread).double()
    white: Tensor = torch.linalg.solve_triangular(factor, images.T, upper=False)
    return white.square().sum(0).sqrt()


TERMS: Mapping[str, Callable[[OneDraw], Tensor]] = {
    "raw": lambda draw: draw.raw.double(),
    "raw_square": lambda draw: draw.raw.double().square(),
    "direction": lambda draw: normalize(draw.raw, dim=1),
    "aligned": lambda draw: (draw.images / draw.spread).double(),
    "aligned_square": lambda draw: (draw.images / draw.spread).double().square(),
    "assignment": lambda draw: draw.assignment,
    "assignment_entropy": lambda draw: torch.special.entr(draw.assignment.double()).sum(1),
    "distance": _distance,
    "votes": lambda draw: _votes(draw.nearest[1], len(draw.bank)),
    "kth_cosine": lambda draw: 1 - draw.likeness.topk(part_of(len(draw.bank), ODD_PART), dim=1).values[:, -1],
    "cosine_votes": lambda draw: _votes(_alike(draw), len(draw.bank)),
    "usual_votes": _usual_votes,
    "usual_distance": _usual_distance,
    "whitened_norm": _whitened_norm,
}
"""What is averaged over draws, for each image: one number, or a row of them."""


# ---------------------------------------------------------------------------------------------------------- candidates


class Candidate(NamedTuple):
    """A score: its terms, and what is made of their averages over draws (a tensor a term, in order) and the draws."""

    terms: tuple[str, ...]
    score: Callable[[list[Tensor], int], Tensor]
    least_draws: int = 1
    """0: at the means, without draws."""


def _first(terms: list[Tensor], draws: int) -> Tensor:
    return terms[0]


def _variance(terms: list[Tensor], draws: int) -> Tensor:
    mean, square = terms
    return (square - mean.square()).clamp(min=0).mean(1) * (draws / (draws - 1))


def _dispersion(terms: list[Tensor], draws: int) -> Tensor:
    """1 - length of the mean unit vector."""
    return 1 - terms[0].square().sum(1).sqrt()


def _mutual_information(terms: list[Tensor], draws: int) -> Tensor:
    """Of the assignment and the weights, in nats."""
    mean, entropy = terms
    return torch.clamp(torch.special.entr(mean).sum(1) - entropy, min=0)


def _disagreement(terms: list[Tensor], draws: int) -> Tensor:
    """1 - the part that two draws' neighbours have in common, averaged over all pairs of draws (and over sizes).

    A bank image with v votes is in common to v (v - 1) of the ordered pairs; neighbours have as many votes a draw.
    """
    votes = terms[0] * draws
    apart = 1 - (votes * (votes - 1)).sum(-1) / (votes.sum(-1) * (draws - 1))
    return apart if apart.dim() == 1 else apart.mean(1)


def _distance_times_disagreement(terms: list[Tensor], draws: int) -> Tensor:
    return terms[0] * _disagreement(terms[1:], draws)


def _product(terms: list[Tensor], draws: int) -> Tensor:
    """Distance times mutual information: ranks as the sum of their logarithms does, whatever their scales."""
    return terms[0] * _mutual_information(terms[1:], draws)


CANDIDATES: Mapping[str, Candidate] = {
    "variance": Candidate(("raw", "raw_square"), _variance, 2),  # at the encoder
    "direction": Candidate(("direction",), _dispersion, 2),
    "aligned_variance": Candidate(("aligned", "aligned_square"), _variance, 2),
    "assignment": Candidate(("assignment", "assignment_entropy"), _mutual_information, 2),
    "neighbours": Candidate(("distance",), _first),
    "disagreement": Candidate(("votes",), _disagreement, 2),
    "consistency": Candidate(("cosine_votes",), _disagreement, 2),
    "combined": Candidate(("usual_distance", "usual_votes"), _distance_times_disagreement, 2),
    "neighbours_cosine": Candidate(("usual_distance",), _first),
    "mahalanobis": Candidate(("whitened_norm",), _first),
    "product": Candidate(("distance", "assignment", "assignment_entropy"), _product, 2),
    "knn": Candidate(("distance",), _first, 0),
    "knn_cosine": Candidate(("usual_distance",), _first, 0),
    "kth_cosine": Candidate(("kth_cosine",), _first, 0),
    "mahalanobis_at_means": Candidate(("whitened_norm",), _first, 0),
}
"""All that were tried, by name; `docs/score.md` says how they did."""


def candidate_scores(
    run: Run,
    images: Tensor,
    draws: int = 20,
    names: Iterable[str] | None = None,
    *,
    batch_size: int = BATCH,
    progress: Progress = lambda what, done, total: None,
) -> dict[str, Tensor]:
    """Several candidates (all that the run allows, if none are named) for all images, in one pass over the draws."""
    if names is None:
        names = [n for n, c in CANDIDATES.items() if not c.least_draws or not is_deterministic(run)]
    for name in (names := list(names)):
        _check(run, name, draws)
    run.check(images)
    bank = ReferenceSet(run)
    parts: list[dict[str, Tensor]] = []
    for i, block in enumerate(torch.split(images, BLOCK)):
        parts.append(_score_block(bank, block, names, draws, batch_size)[0])
        progress(f"scoring {len(images):,} images", i * BLOCK + len(block), len(images))
    return {name: torch.cat([part[name] for part in parts]) for name in names}


def _score_block(
    bank: ReferenceSet, images: Tensor, names: list[str], draws: int, batch_size: int
) -> tuple[dict[str, Tensor], Tensor]:
    """The named candidates for a block of images, and their features at the means."""
    run = bank.run
    images = resized(images, run.image_shape[-1])
    before = before_draws(run.encoder, images, run.image_shape[-1], batch_size)

    def features_at(k: int | None) -> Tensor:
        with at_draw(run.encoder, run.config.seed, k):
            return at_this_draw(run.encoder, before, batch_size)

    embedding = features_at(None)
    return _score_features(bank, embedding, features_at, bank.own(images), names, draws), embedding


def reference_scores(bank: ReferenceSet, name: str, draws: int) -> Tensor:
    """A candidate for the reference images, each compared with the others; from their cached features."""
    places = torch.split(torch.arange(len(bank.means.features)), BLOCK)
    found = [
        _score_features(bank, bank.means.features[own], lambda k: bank.at(k).features[own], own, [name], draws)[name]  # noqa: B023
        for own in places
    ]
    return torch.cat(found)


def usual_images(bank: ReferenceSet) -> Tensor:
    """Places in the bank of its usual images, those whose oddness is within FENCE; kept with the run.

    Quartiles, since any number of bank images may be odd themselves.
    """

    def make() -> Tensor:
        oddness = reference_scores(bank, ODDNESS, 0)
        lower, upper = oddness.quantile(torch.tensor([0.25, 0.75], dtype=oddness.dtype))
        usual: Tensor = oddness <= upper + FENCE * (upper - lower)
        return usual.nonzero()[:, 0]

    return bank.cached("usual", make)


def _score_features(
    bank: ReferenceSet,
    at_means: Tensor,
    features_at: Callable[[int], Tensor],
    own: Tensor,
    names: list[str],
    draws: int,
) -> dict[str, Tensor]:
    """The named candidates for images of which the features at each draw can be had."""
    chosen = {name: CANDIDATES[name] for name in names}
    still = {term for c in chosen.values() if not c.least_draws for term in c.terms}
    moving = {term for c in chosen.values() if c.least_draws for term in c.terms}
    means = OneDraw(bank, at_means, None, own)
    fixed = {term: TERMS[term](means).double() for term in still}
    totals: dict[str, Tensor] = {}
    for k in range(draws if moving else 0):
        draw = OneDraw(bank, features_at(k), k, own)
        for term in moving:
            value = TERMS[term](draw)
            totals[term] = totals[term].add_(value) if term in totals else value.double()
    averages = {term: total.div_(draws) for term, total in totals.items()}
    return {
        name: c.score([(averages if c.least_draws else fixed)[term] for term in c.terms], draws)
        for name, c in chosen.items()
    }


# -------------------------------------------------------------------------------------------------------------- scorer


class Scores(NamedTuple):
    """What is known of images without labels; on the CPU. Percentiles are None where no images calibrate them."""

    oddness: Tensor
    """(images,), float64: higher is more unlike the reference images."""
    oddness_percentile: Tensor | None
    """(images,), float64, 0 to 100: how many of the calibration images are less odd."""
    uncertainty: Tensor
    """(images,), float64: higher is less certain."""
    uncertainty_percentile: Tensor | None
    """(images,), float64, 0 to 100: how many of the calibration images are more certain."""
    embedding: Tensor
    """(images, width), float32: features at the means."""
    paths: tuple[str, ...] | None = None
    """The images' files, where `Run.score` was given files or a folder."""


class Scorer:
    """Scores images of a run, a chunk at a time; nothing is carried from one chunk to the next.

    Args:
        run: an opened run.
        uncertainty: a name of CANDIDATES; unset: the default for the run.
        draws: weight draws, each of which passes all images; not used by scores at the means.
        say: told where percentiles cannot be had.
    """

    fast = False
    """Whether the uncertainty is predicted from one forward pass (`one_pass.FastScorer`)."""

    def __init__(
        self,
        run: Run,
        uncertainty: str | None = None,
        draws: int = DRAWS,
        *,
        batch_size: int = BATCH,
        say: Say = say_on_stderr,
    ) -> None:
        self.uncertainty = uncertainty or (DEFAULT_AT_MEANS if is_deterministic(run) else DEFAULT)
        _check(run, self.uncertainty, draws)
        self.draws = draws if CANDIDATES[self.uncertainty].least_draws else 0
        self.reference, self.batch_size, self.say = ReferenceSet(run), batch_size, say

    def scores(self, images: Tensor) -> Scores:
        """Scores of uint8 or [0, 1] images (N, C, H, W), converted to the channels and side of the run's."""
        images, _ = in_channels(self.reference.run, images)
        self.reference.run.check(images)
        parts = [self._score(block) for block in torch.split(images, BLOCK)]
        oddness, uncertainty, embedding = (torch.cat(column) for column in zip(*parts, strict=True))
        usual = self.usual
        return Scores(
            oddness,
            self._percentiles(oddness, usual.get("oddness")),
            uncertainty,
            self._percentiles(uncertainty, usual.get("uncertainty")),
            embedding,
        )

    def _score(self, images: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Oddness, uncertainty and embedding of a block."""
        found, embedding = _score_block(
            self.reference, images, [ODDNESS, self.uncertainty], self.draws, self.batch_size
        )
        return found[ODDNESS], found[self.uncertainty], embedding

    @staticmethod
    def _percentiles(values: Tensor, usual: Tensor | None) -> Tensor | None:
        """The part of the calibration images that are below; of those equal, a half."""
        if usual is None:
            return None
        below = torch.searchsorted(usual, values) + torch.searchsorted(usual, values, right=True)
        return below * (50.0 / len(usual))

    @cached_property
    def usual(self) -> dict[str, Tensor]:
        """The calibration images' scores by name, each sorted; none where there are no such images."""
        run = self.reference.run
        if not self.reference.calibrates:
            self.say(
                f"no percentiles: {run.folder} has set no images of {run.config.data} aside to calibrate on; "
                "train with --calibration to have them."
            )
            return {}
        both = self._calibration_scores().sort(1).values
        return {"oddness": both[0].contiguous(), "uncertainty": both[1].contiguous()}

    def _calibration_scores(self) -> Tensor:
        """(2, images): oddness and uncertainty of the calibration images; kept with the run."""

        def make() -> Tensor:
            parts = [self._score(block)[:2] for block in torch.split(self.reference.calibration_images(), BLOCK)]
            return torch.stack([torch.cat(column) for column in zip(*parts, strict=True)])

        return self.reference.cached(f"calibration-{self.uncertainty}-{self.draws}", make)


def is_deterministic(run: Run) -> bool:
    """Whether nothing in the run's encoder is random."""
    return run.encoder.means.numel() == 0


def _check(run: Run, name: str, draws: int) -> None:
    if name not in CANDIDATES:
        raise BadInput(f"there is no score {name!r}: use one of {', '.join(CANDIDATES)}.")
    least = CANDIDATES[name].least_draws
    if least and is_deterministic(run):
        still = ", ".join(n for n, c in CANDIDATES.items() if not c.least_draws)
        raise BadInput(f"the score {name} needs weight draws, but {run.folder} has nothing random: use {still}.")
    if draws < least:
        raise BadInput(f"the score {name} needs at least {least} draw{'s' * (least > 1)}, not {draws}.")
