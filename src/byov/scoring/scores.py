"""Two label-free scores per image, both computed from how it lies among the reference images of a run.

`oddness`: how unlike the folder the image is. It is the cosine distance to the k-th nearest reference image at the
means, with k about 6% of the reference set. A group of similar odd images cannot hide itself unless it is larger.
`uncertainty`: how unreliable the image's representation is. It is the share of the image's nearest reference images on
which two weight draws disagree, times the distance to the ten nearest. Both factors use usual reference images only.
Higher is odder, or less certain.

    scorer = Scorer(byov.load("runs/mine"))
    for chunk in chunks:
        scores = scorer.scores(chunk)      # .oddness, .uncertainty, a percentile of each, .embedding

Both are candidates: ODDNESS, and DEFAULT or DEFAULT_AT_MEANS for the uncertainty. docs/score.md compares all of them.
A candidate is a function of a few terms. A term is a function of one weight draw (`OneDraw`), averaged over draws. So
every candidate is streaming, and one pass over the draws serves as many candidates as needed (`TermSums`).

Within a draw, features are aligned: standardised on the reference set, then given the reference set's moments at the
means. An image that belongs to the reference set is compared with the others there. Otherwise it would look more
certain than similar images only because it was chosen as a reference.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import normalize

from byov._core.callbacks import Say, say_on_stderr
from byov._core.errors import BadInput
from byov.data.transforms import resized
from byov.inference.inputs import in_channels
from byov.inference.run import BATCH, Moments, ReferenceSet, Run, aligned, at_draw, at_this_draw, before_draws, constant

NEIGHBOURS = 10  # reference images that an image is compared with, for candidates based on distances
ODD_SHARE = 0.06  # of the reference set: the rank of the neighbour whose distance is the oddness
CONSISTENT_SHARE = 0.02  # of the reference set: the neighbours on which draws may agree
NEAR_SHARES = (0.005, 0.01, 0.02, 0.04)  # the same at several sizes: the size of a folder's groups is not known
FENCE = 0.5  # interquartile ranges above the upper quartile of oddness: reference images beyond it are not usual
TEMPERATURE = 0.1  # of the soft assignment to the reference images, on cosines
SHRINKAGE = 0.1  # of correlations towards zero: there may be fewer reference images than features
BLOCK = 1024  # images at a time: bounds the terms that hold a number for each reference image


def neighbour_count(images: int, share: float) -> int:
    """Return how many neighbours a share of the reference images is: at least NEIGHBOURS where there are that many."""
    return max(1, min(max(NEIGHBOURS, round(share * images)), images - 1))


class OneDraw:
    """Images and reference images at one weight draw; what several terms need is computed once.

    Args:
        reference: The reference set.
        raw: Features of the images at this draw.
        k: The draw, or None for the means.
        own: Position of each image in the reference set, -1 if it is not in it (`ReferenceSet.own`); None: none is.
        among: The reference set whose usual images count, if not this one: that of an ensemble's first run.
    """

    def __init__(
        self,
        reference: ReferenceSet,
        raw: Tensor,
        k: int | None,
        own: Tensor | None = None,
        among: ReferenceSet | None = None,
    ) -> None:
        self.raw = raw
        rows = torch.empty(0, dtype=torch.int64) if own is None else (own >= 0).nonzero()[:, 0]
        self._selves = (rows, rows if own is None else own[rows])
        features, moments = reference.at(k)
        spread = reference.means.moments.std
        self._located = reference.aligned(raw, k), reference.aligned(features, k)
        centred = Moments(torch.zeros_like(spread), spread)
        self.images = aligned(raw, moments, centred)
        self.reference = aligned(features, moments, centred)
        self.spread = torch.where(constant(reference.means.moments), 1.0, spread).to(raw.dtype)  # 1: a dead feature
        self._among = among or reference

    @cached_property
    def usual(self) -> Tensor:
        """Positions of the reference images that are not odd themselves."""
        return usual_images(self._among)

    @cached_property
    def cosines(self) -> Tensor:
        """(images, reference): cosines of centred features; -inf for an image with itself."""
        found = normalize(self.images, dim=1) @ normalize(self.reference, dim=1).T
        return found.index_put_(self._selves, torch.tensor(-torch.inf, dtype=found.dtype))

    @cached_property
    def nearest(self) -> tuple[Tensor, Tensor]:
        """Distances to the nearest reference images, and their positions: (images, NEIGHBOURS) each."""
        ours, theirs = self.images.square().sum(1, keepdim=True), self.reference.square().sum(1)
        squares = torch.addmm(theirs + ours, self.images, self.reference.T, alpha=-2)
        squares.index_put_(self._selves, torch.tensor(torch.inf, dtype=squares.dtype))
        found, which = squares.topk(min(NEIGHBOURS, len(self.reference) - 1), dim=1, largest=False)
        return found.clamp_(min=0).sqrt_(), which

    @cached_property
    def likeness(self) -> Tensor:
        """(images, reference): cosines of features that are not centred; -inf for an image with itself."""
        images, reference = (normalize(located, dim=1) for located in self._located)
        found: Tensor = images @ reference.T
        return found.index_put_(self._selves, torch.tensor(-torch.inf, dtype=found.dtype))

    @cached_property
    def assignment(self) -> Tensor:
        """(images, reference): soft assignment; rows sum to 1."""
        return (self.cosines / TEMPERATURE).softmax(1)


# --------------------------------------------------------------------------------------------------- terms of one draw


def _votes(which: Tensor, reference: int) -> Tensor:
    """(images, reference): 1 for the nearest."""
    return torch.zeros(len(which), reference).scatter_(1, which, 1.0)


def _most_alike(draw: OneDraw) -> Tensor:
    """(images, CONSISTENT_SHARE): positions of the most similar reference images."""
    return draw.likeness.topk(neighbour_count(len(draw.reference), CONSISTENT_SHARE), dim=1).indices


def _usual_votes(draw: OneDraw) -> Tensor:
    """(images, NEAR_SHARES, usual reference images): 1 for the most similar."""
    count = len(draw.usual)
    sizes = [neighbour_count(count, share) for share in NEAR_SHARES]
    which = draw.likeness[:, draw.usual].topk(max(sizes), dim=1).indices
    return torch.stack([_votes(which[:, :size], count) for size in sizes], dim=1)


def _usual_distance(draw: OneDraw) -> Tensor:
    """Mean cosine distance to the nearest of the usual reference images, centred."""
    nearest = min(NEIGHBOURS, len(draw.usual) - 1)
    return 1 - draw.cosines[:, draw.usual].topk(nearest, dim=1).values.mean(1)


def _kth_cosine(draw: OneDraw) -> Tensor:
    return 1 - draw.likeness.topk(neighbour_count(len(draw.reference), ODD_SHARE), dim=1).values[:, -1]


def _whitened_norm(draw: OneDraw) -> Tensor:
    """Mahalanobis distance to the centre of the reference set, on standardised features with shrunk correlations."""
    reference = (draw.reference / draw.spread).double()
    correlations = reference.T @ reference * ((1 - SHRINKAGE) / len(reference))
    shrunk = torch.eye(reference.shape[1], dtype=reference.dtype) * SHRINKAGE + correlations
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
    "distance": lambda draw: draw.nearest[0].mean(1),
    "votes": lambda draw: _votes(draw.nearest[1], len(draw.reference)),
    "kth_cosine": _kth_cosine,
    "cosine_votes": lambda draw: _votes(_most_alike(draw), len(draw.reference)),
    "usual_votes": _usual_votes,
    "usual_distance": _usual_distance,
    "whitened_norm": _whitened_norm,
}
"""What is averaged over draws: a number per image, or a row per image."""


# ---------------------------------------------------------------------------------------------------------- candidates


class Candidate(NamedTuple):
    """A score: its terms, and a function of their averages over draws (in order) and the number of draws."""

    terms: tuple[str, ...]
    score: Callable[[list[Tensor], int], Tensor]
    least_draws: int = 1
    """0: computed at the means, without draws."""


def _first(terms: list[Tensor], draws: int) -> Tensor:
    return terms[0]


def _variance(terms: list[Tensor], draws: int) -> Tensor:
    mean, square = terms
    return (square - mean.square()).clamp(min=0).mean(1) * (draws / (draws - 1))


def _dispersion(terms: list[Tensor], draws: int) -> Tensor:
    """1 - length of the mean unit vector."""
    return 1 - terms[0].square().sum(1).sqrt()


def _mutual_information(terms: list[Tensor], draws: int) -> Tensor:
    """Between assignment and weights, in nats."""
    mean, entropy = terms
    return torch.clamp(torch.special.entr(mean).sum(1) - entropy, min=0)


def _disagreement(terms: list[Tensor], draws: int) -> Tensor:
    """1 - the share of neighbours that two draws have in common, averaged over all pairs of draws (and over sizes).

    A reference image with v votes is common to v (v - 1) of the ordered pairs. Each draw gives equally many votes.
    """
    votes = terms[0] * draws
    apart = 1 - (votes * (votes - 1)).sum(-1) / (votes.sum(-1) * (draws - 1))
    return apart if apart.dim() == 1 else apart.mean(1)


def _distance_times_disagreement(terms: list[Tensor], draws: int) -> Tensor:
    return terms[0] * _disagreement(terms[1:], draws)


def _product(terms: list[Tensor], draws: int) -> Tensor:
    """Distance times mutual information: ranks like the sum of their logarithms, whatever their scales."""
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
"""Every candidate by name; docs/score.md compares them."""
AT_MEANS = tuple(name for name, candidate in CANDIDATES.items() if not candidate.least_draws)
OVER_DRAWS = tuple(name for name, candidate in CANDIDATES.items() if candidate.least_draws)

ODDNESS = "kth_cosine"
DEFAULT, DEFAULT_AT_MEANS = "combined", "knn_cosine"  # the uncertainty of a run with a posterior, and of others


# --------------------------------------------------------------------------------------------------- sums over draws


class TermSums:
    """Sums over draws of the terms that some candidates need, in float64.

    Args:
        names: Keys of CANDIDATES.
        totals: Sums so far, by term; None: none yet.
    """

    def __init__(self, names: Iterable[str], totals: dict[str, Tensor] | None = None) -> None:
        self.names = tuple(names)
        self.totals = {} if totals is None else totals

    def add(
        self,
        reference: ReferenceSet,
        features: Tensor,
        k: int | None,
        own: Tensor | None = None,
        among: ReferenceSet | None = None,
    ) -> None:
        """Add the terms at draw `k` (None: at the means), from the images' features; the rest as for `OneDraw`."""
        parts: dict[str, list[Tensor]] = {term: [] for name in self.names for term in CANDIDATES[name].terms}
        for rows in torch.split(torch.arange(len(features)), BLOCK) if parts else ():
            draw = OneDraw(reference, features[rows], k, None if own is None else own[rows], among)
            for term, values in parts.items():
                values.append(TERMS[term](draw))
        self.merge({term: torch.cat(values) for term, values in parts.items()})

    def merge(self, totals: Mapping[str, Tensor]) -> None:
        """Add sums over other draws."""
        for term, value in totals.items():
            self.totals[term] = self.totals[term].add_(value) if term in self.totals else value.double()

    def scores(self, draws: int) -> dict[str, Tensor]:
        """Score the images from their terms after this many draws; 0: at the means."""
        means = {term: total / max(draws, 1) for term, total in self.totals.items()}
        chosen = {name: CANDIDATES[name] for name in self.names}
        return {name: each.score([means[term] for term in each.terms], draws) for name, each in chosen.items()}


def score_features(
    reference: ReferenceSet,
    at_means: Tensor,
    features_at: Callable[[int], Tensor],
    own: Tensor,
    names: Iterable[str],
    draws: int,
) -> dict[str, Tensor]:
    """Score images with the named candidates, from their features at the means and at each draw."""
    names = tuple(names)
    still = TermSums(name for name in names if name in AT_MEANS)
    moving = TermSums(name for name in names if name in OVER_DRAWS)
    still.add(reference, at_means, None, own)
    for k in range(draws if moving.names else 0):
        moving.add(reference, features_at(k), k, own)
    return still.scores(0) | moving.scores(draws)


def reference_scores(reference: ReferenceSet, name: str, draws: int) -> Tensor:
    """Score the reference images with a candidate, each compared with the others, from their cached features."""
    features = reference.means.features
    found = [
        score_features(reference, features[own], lambda k: reference.at(k).features[own], own, [name], draws)[name]  # noqa: B023
        for own in torch.split(torch.arange(len(features)), BLOCK)
    ]
    return torch.cat(found)


def usual_images(reference: ReferenceSet) -> Tensor:
    """Return the positions of the usual reference images, those whose oddness is within FENCE; cached with the run.

    Images are compared with the usual ones only: a group of odd images would find itself among the others, and look
    certain. The fence uses quartiles, since any number of reference images may be odd.
    """

    def make() -> Tensor:
        oddness = reference_scores(reference, ODDNESS, 0)
        lower, upper = oddness.quantile(torch.tensor([0.25, 0.75], dtype=oddness.dtype))
        usual: Tensor = oddness <= upper + FENCE * (upper - lower)
        return usual.nonzero()[:, 0]

    return reference.cached("usual", make)


DRAWS = 8  # weight draws by default; docs/score.md shows what more of them gain


class Scores(NamedTuple):
    """Scores of images, on the CPU. Percentiles are None for a run without calibration images.

    Example:
        >>> scores = byov.load("runs/mine").score(np.zeros((8, 8)), draws=2)
        >>> scores._fields[:4]
        ('oddness', 'oddness_percentile', 'uncertainty', 'uncertainty_percentile')
    """

    oddness: Tensor
    """(images,), float64: higher is more unlike the reference images."""
    oddness_percentile: Tensor | None
    """(images,), float64, 0 to 100: the share of the calibration images that are less odd."""
    uncertainty: Tensor
    """(images,), float64: higher is less certain."""
    uncertainty_percentile: Tensor | None
    """(images,), float64, 0 to 100: the share of the calibration images that are more certain."""
    embedding: Tensor
    """(images, width), float32: features at the means."""
    paths: tuple[str, ...] | None = None
    """The images' files, where `Run.score` was given files or a folder."""


class Scorer:
    """Scores images with a run, a chunk at a time; no state is carried from one chunk to the next.

    Args:
        run: An opened run.
        uncertainty: A key of CANDIDATES; None: the run's default.
        draws: Weight draws, each of which encodes all images; not used by candidates at the means.
        batch_size: Images encoded at a time.
        say: Called with a sentence where percentiles are not available.

    Raises:
        BadInput: If the run does not allow this uncertainty, or its reference images are gone.

    Example:
        >>> scorer = byov.Scorer(byov.load("runs/mine"), draws=2)
        >>> for chunk in byov.open_source("digits").load("test").images.split(200):
        ...     scores = scorer.scores(chunk)
        >>> scores.oddness.shape
        torch.Size([155])
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
        self.uncertainty = uncertainty or (DEFAULT_AT_MEANS if run.deterministic else DEFAULT)
        check_candidate(run, self.uncertainty, draws)
        self.draws = draws if CANDIDATES[self.uncertainty].least_draws else 0
        self.reference, self.batch_size, self.say = ReferenceSet(run), batch_size, say
        self.others: tuple[ReferenceSet, ...] = ()
        """The reference sets of further runs of an ensemble (`ensemble.EnsembleScorer`)."""

    def scores(self, images: Tensor) -> Scores:
        """Score uint8 or [0, 1] images (N, C, H, W), converted to the channels and the side that the run takes."""
        images, _ = in_channels(self.reference.run, images)
        self.reference.run.check(images)
        parts = [self._score(block) for block in torch.split(images, BLOCK)]
        oddness, uncertainty, embedding = (torch.cat(column) for column in zip(*parts, strict=True))
        calibration = self.calibration
        return Scores(
            oddness,
            self._percentiles(oddness, calibration.get("oddness")),
            uncertainty,
            self._percentiles(uncertainty, calibration.get("uncertainty")),
            embedding,
        )

    def _score(self, images: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Oddness, uncertainty and embedding of a block."""
        names = [ODDNESS, self.uncertainty]
        found, embedding = score_block(self.reference, images, names, self.draws, self.batch_size)
        return found[ODDNESS], found[self.uncertainty], embedding

    @staticmethod
    def _percentiles(values: Tensor, calibration: Tensor | None) -> Tensor | None:
        """The share of the calibration images below, plus half of those equal."""
        if calibration is None:
            return None
        below = torch.searchsorted(calibration, values) + torch.searchsorted(calibration, values, right=True)
        return below * (50.0 / len(calibration))

    @cached_property
    def calibration(self) -> dict[str, Tensor]:
        """Scores of the calibration images by name, each sorted; empty for a run without such images."""
        run = self.reference.run
        if not self.reference.has_calibration_images:
            self.say(
                f"no percentiles: {run.folder} has set no images of {run.config.data} aside to calibrate on; "
                "train with --calibration to have them."
            )
            return {}
        both = self._calibration_scores().sort(1).values
        return {"oddness": both[0].contiguous(), "uncertainty": both[1].contiguous()}

    def _calibration_scores(self) -> Tensor:
        """(2, images): oddness and uncertainty of the calibration images; cached with the run."""

        def make() -> Tensor:
            parts = [self._score(block)[:2] for block in torch.split(self.reference.calibration_images(), BLOCK)]
            return torch.stack([torch.cat(column) for column in zip(*parts, strict=True)])

        return self.reference.cached(self._calibration_key(), make)

    def _calibration_key(self) -> str:
        return f"calibration-{self.uncertainty}-{self.draws}"


def score_block(
    reference: ReferenceSet, images: Tensor, names: list[str], draws: int, batch_size: int
) -> tuple[dict[str, Tensor], Tensor]:
    """Score a block of images with the named candidates; also return their features at the means."""
    run = reference.run
    images = resized(images, run.image_shape[-1])
    before = before_draws(run.encoder, images, run.image_shape[-1], batch_size)

    def features_at(k: int | None) -> Tensor:
        with at_draw(run.encoder, run.config.seed, k):
            return at_this_draw(run.encoder, before, batch_size)

    embedding = features_at(None)
    return score_features(reference, embedding, features_at, reference.own(images), names, draws), embedding


def check_candidate(run: Run, name: str, draws: int) -> None:
    if name not in CANDIDATES:
        raise BadInput(f"there is no score {name!r}: use one of {', '.join(CANDIDATES)}.")
    least = CANDIDATES[name].least_draws
    if least and run.deterministic:
        raise BadInput(
            f"the score {name} needs weight draws, but {run.folder} has no random weights: use {', '.join(AT_MEANS)}."
        )
    if draws < least:
        raise BadInput(f"the score {name} needs at least {least} draw{'s' * (least > 1)}, not {draws}.")
