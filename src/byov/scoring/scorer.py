"""Two label-free scores per image, both computed from how it lies among the reference images of a run.

`oddness`: how unlike the folder the image is. It is the cosine distance to the k-th nearest reference image at the
means, with k about 6% of the reference set. A group of similar odd images cannot hide itself unless it is larger.
`uncertainty`: how unreliable the image's representation is. It is the share of the image's nearest reference images on
which two weight draws disagree, times the distance to the ten nearest. Both factors use usual reference images only.
Higher is odder, or less certain. `candidates.py` defines both, and the alternatives.

    scorer = Scorer(byov.load("runs/mine"))
    for chunk in chunks:
        scores = scorer.scores(chunk)      # .oddness, .uncertainty, a percentile of each, .embedding
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from byov._core.callbacks import Progress, Say, say_on_stderr
from byov._core.errors import BadInput
from byov.data.transforms import resized
from byov.inference.features import BATCH, at_this_draw, before_draws
from byov.inference.inputs import in_channels
from byov.inference.load import Run
from byov.inference.reference import ReferenceSet, at_draw
from byov.scoring.candidates import (
    AT_MEANS,
    BLOCK,
    CANDIDATES,
    DEFAULT,
    DEFAULT_AT_MEANS,
    ODDNESS,
    score_features,
)

DRAWS = 8  # weight draws by default; docs/score.md shows what more of them gain


class Scores(NamedTuple):
    """Scores of images, on the CPU. Percentiles are None for a run without calibration images."""

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
        found, embedding = _score_block(self.reference, images, names, self.draws, self.batch_size)
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


def candidate_scores(
    run: Run,
    images: Tensor,
    draws: int = 20,
    names: Iterable[str] | None = None,
    *,
    batch_size: int = BATCH,
    progress: Progress = lambda what, done, total: None,
) -> dict[str, Tensor]:
    """Score images with several candidates in one pass over the draws; `names=None`: all that the run allows."""
    if names is None:
        names = AT_MEANS if is_deterministic(run) else CANDIDATES
    for name in (names := list(names)):
        _check(run, name, draws)
    run.check(images)
    reference = ReferenceSet(run)
    parts: list[dict[str, Tensor]] = []
    for i, block in enumerate(torch.split(images, BLOCK)):
        parts.append(_score_block(reference, block, names, draws, batch_size)[0])
        progress(f"scoring {len(images):,} images", i * BLOCK + len(block), len(images))
    return {name: torch.cat([part[name] for part in parts]) for name in names}


def is_deterministic(run: Run) -> bool:
    """Return whether no weight of the run's encoder is random."""
    return run.encoder.means.numel() == 0


def _score_block(
    reference: ReferenceSet, images: Tensor, names: list[str], draws: int, batch_size: int
) -> tuple[dict[str, Tensor], Tensor]:
    """The named candidates for a block of images, and the images' features at the means."""
    run = reference.run
    images = resized(images, run.image_shape[-1])
    before = before_draws(run.encoder, images, run.image_shape[-1], batch_size)

    def features_at(k: int | None) -> Tensor:
        with at_draw(run.encoder, run.config.seed, k):
            return at_this_draw(run.encoder, before, batch_size)

    embedding = features_at(None)
    return score_features(reference, embedding, features_at, reference.own(images), names, draws), embedding


def _check(run: Run, name: str, draws: int) -> None:
    if name not in CANDIDATES:
        raise BadInput(f"there is no score {name!r}: use one of {', '.join(CANDIDATES)}.")
    least = CANDIDATES[name].least_draws
    if least and is_deterministic(run):
        raise BadInput(
            f"the score {name} needs weight draws, but {run.folder} has no random weights: use {', '.join(AT_MEANS)}."
        )
    if draws < least:
        raise BadInput(f"the score {name} needs at least {least} draw{'s' * (least > 1)}, not {draws}.")
