"""Check without labels whether a run's encoder is worth trusting: does it find an image from an augmented view of it?

Each view (crop, flip and colour jitter of the run's own views) is looked up among the reference images, by cosine of
features centred on the reference images. Recall@1 is the share of views whose original is nearest.
The encoder has to beat the same encoder untrained and raw pixels: a necessary condition, not a sufficient one. Recall@1
is stricter than the mean rank, by which a weak encoder passed. docs/score.md has the numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from byov._core.callbacks import Progress
from byov._core.randomness import RandomStream
from byov.config import View
from byov.data.transforms import resized
from byov.data.views import view
from byov.inference.inputs import spread
from byov.inference.run import ReferenceSet, Run, features_of
from byov.runs import checkpoints
from byov.runs.folder import RunFolder

QUERIES = 300  # views that are looked up: a recall of 0.3 is then known to 0.03
REFERENCES = 1000  # images among which the original is looked for, at most: recall depends on their number
ENOUGH_HELD_OUT = 50  # calibration images; with fewer, images of the reference set are looked up
LEAST = 20  # images without which there is no verdict
PIXELS = 32  # side of the raw pixels, at most
CACHE = "encoder-check-1"  # counted up when anything above changes

Encode = Callable[[Tensor], Tensor]
Interval = tuple[float, float]


class EncoderCheck(NamedTuple):
    """Recall@1 of an encoder and of what it has to beat, on the same views."""

    encoder: float
    untrained: float
    """Of the same encoder with random weights."""
    pixels: float
    over_untrained: Interval
    """95% interval of the difference, over images."""
    over_pixels: Interval
    images: int
    views: int
    held_out: bool
    """Whether the images were kept out of training."""

    @property
    def trusted(self) -> bool:
        """Whether the encoder is better than both, and not by chance."""
        return self.images >= LEAST and self.over_untrained[0] > 0 and self.over_pixels[0] > 0

    def recalls(self) -> str:
        """Return the recalls as a part of a sentence."""
        seen = "" if self.held_out else ", of images that were not held out"
        return (
            f"finds an image from an augmented view of it in {self.encoder:.0%} of {self.views:,} cases{seen} "
            f"(untrained: {self.untrained:.0%}, raw pixels: {self.pixels:.0%})"
        )

    def sentence(self, pretrained: bool = False) -> str:
        """Return what a user should know; a warning if the encoder is not to be trusted.

        `pretrained`: the run started from pretrained weights, so they are not advised.
        """
        if self.trusted:
            return f"encoder check: it {self.recalls()}."
        if self.images < LEAST:
            return (
                f"warning: there are only {self.images} images to check this encoder on, too few to tell whether its "
                "scores mean anything: train on more images."
            )
        advice = ["train longer", "use more images"]
        advice += [] if pretrained else ["start from pretrained weights (--init lite0)"]
        return (
            f"warning: this encoder {self.recalls()}: {self._consequence()}; "
            f"{', '.join(advice[:-1])}{',' * (len(advice) > 2)} or {advice[-1]}."
        )

    def _consequence(self) -> str:
        if self.over_untrained[0] <= 0:
            return "it has learned little, and its scores mean little"
        if self.over_pixels[1] < 0:
            return "its scores mean little"
        return "its scores may mean no more than those of raw pixels"


def check_encoder(reference: ReferenceSet, progress: Progress = lambda what, done, total: None) -> EncoderCheck:
    """Check a run's encoder at its means on images that were set aside, or on its reference set where these are few.

    The result is cached with the run's reference features, until its weights change.

    Args:
        reference: The run's reference set.
        progress: Called with the progress; not called if the result is cached.

    Returns:
        The recalls, and how certain the differences are.

    Raises:
        BadInput: If the images are not saved with the run, and its source is gone.
    """

    def make() -> Tensor:
        run, held_out = reference.run, reference.calibration_images() if reference.has_calibration_images else None
        enough = held_out is not None and len(held_out) >= ENOUGH_HELD_OUT
        images = held_out if held_out is not None and enough else reference.images
        some = spread(len(reference.images), REFERENCES)
        hits = _all_hits(run, run.encoder, images, reference.images[some], progress, reference.means.features[some])
        return torch.cat([hits, torch.full((len(hits), 1), float(enough), dtype=hits.dtype)], 1)

    found = reference.cached(CACHE, make)
    return _summary(found[:, :3], held_out=bool(found[0, 3]))


def check_on_images(
    run: Run,
    encoder: nn.Module,
    images: Tensor,
    held_out: bool,
    progress: Progress = lambda what, done, total: None,
) -> EncoderCheck:
    """Check an encoder of a run on given uint8 images (N, C, H, W), of the run's channels; nothing is cached."""
    references = resized(images[spread(len(images), REFERENCES)], run.image_shape[-1])
    return _summary(_all_hits(run, encoder, references, references, progress), held_out)


def is_pretrained(run: Run) -> bool:
    """Whether the run started from given weights."""
    return run.config.init not in (None, "none")


def unfinished(run: Run) -> str | None:
    """Return a warning if the run's training was stopped early or is still running; None if it has finished."""
    state = checkpoints.state(RunFolder(run.folder).checkpoint)
    step, total = state["step"], state.get("total", state["step"])
    if step >= total:
        return None
    return (
        f"warning: the training of {run.folder} has not finished: this is step {step:,} of {total:,}; "
        f"resume it with `byov train --resume --out {run.folder}`."
    )


# ------------------------------------------------------------------------------------------------------------ retrieval


def own_ranks(views: Tensor, originals: Tensor, references: Tensor, copies: Tensor | None = None) -> Tensor:
    """(views,) int64: the rank of each view's original among it and the references, 1 is the nearest.

    By cosine of features centred on the references' mean. Of equally near ones the original comes last: an encoder
    that maps all images to one point finds none.

    Args:
        views: Features of views, shape ``(V, width)``.
        originals: Features of the image behind each view, shape ``(V, width)``.
        references: Features of other images, shape ``(R, width)``.
        copies: bool ``(V, R)``: references with the original's own pixels, which are left out.
    """
    mean = references.double().mean(0)
    seen, own, others = (normalize(t.double() - mean, dim=1) for t in (views, originals, references))
    nearer = seen @ others.T >= (seen * own).sum(1, keepdim=True) - 1e-12  # sums in another order are still ties
    if copies is not None:
        nearer &= ~copies
    return 1 + nearer.sum(1)


def _all_hits(
    run: Run,
    encoder: nn.Module,
    images: Tensor,
    references: Tensor,
    progress: Progress,
    known: Tensor | None = None,
) -> Tensor:
    """(images, 3): the share of an image's views that find it, by the encoder, the untrained one and raw pixels.

    `known`: the encoder's features of the references.
    """
    images = images[spread(len(images), QUERIES)]
    repeats, side, ids = max(1, QUERIES // len(images)), run.image_shape[-1], torch.arange(len(images))
    setting = _setting(run.config.views.first)
    views = torch.cat(
        [view(images, ids, setting, side, RandomStream.ENCODER_CHECK, repeat) for repeat in range(repeats)]
    )
    copies = _copies(images, references).repeat(repeats, 1)
    untrained = run.untrained_encoder()
    encoders: list[Encode] = [lambda x: features_of(encoder, x), lambda x: features_of(untrained, x), _pixels]
    columns = []
    for number, encode in enumerate(encoders):
        progress("checking the encoder", number, len(encoders))
        others = known if known is not None and number == 0 else encode(references)
        ranks = own_ranks(encode(views), encode(images).repeat(repeats, 1), others, copies)
        columns.append((ranks == 1).double().view(repeats, -1).mean(0))
    progress("checking the encoder", len(encoders), len(encoders))
    return torch.stack(columns, 1)


def _setting(first: View) -> View:
    """The run's first view without blur and solarisation; never flipped where the run does not."""
    return replace(first, flip=first.flip or 0.0, blur=0.0, solarise=0.0)


def _pixels(images: Tensor) -> Tensor:
    small = resized(images, min(PIXELS, images.shape[-1])).flatten(1).float()
    return small / 255 if images.dtype == torch.uint8 else small


def _copies(images: Tensor, references: Tensor) -> Tensor:
    """(images, references) bool: whether the pixels are the same."""
    ours, theirs = (torch.tensor([hash(each.numpy().tobytes()) for each in part]) for part in (images, references))
    return ours[:, None] == theirs


# -------------------------------------------------------------------------------------------------------------- summary


def _summary(hits: Tensor, held_out: bool) -> EncoderCheck:
    encoder, untrained, pixels = hits.double().unbind(1)
    views = len(hits) * max(1, QUERIES // len(hits))
    return EncoderCheck(
        encoder=float(encoder.mean()),
        untrained=float(untrained.mean()),
        pixels=float(pixels.mean()),
        over_untrained=paired_interval(encoder - untrained),
        over_pixels=paired_interval(encoder - pixels),
        images=len(hits),
        views=views,
        held_out=held_out,
    )


def paired_interval(differences: Tensor) -> Interval:
    """95% interval of a mean of paired differences from -1 to 1, one per image.

    Agresti and Min (2005): two images more, half a win and half a loss and one draw, so that few images that all agree
    do not have an interval of length 0.
    """
    count = len(differences) + 2
    mean = float(differences.sum()) / count
    variance = (float(differences.square().sum()) + 1) / count - mean**2
    reach = 1.96 * math.sqrt(max(variance, 0.0) / count)
    return mean - reach, mean + reach
