"""Images of another kind (`--ood`): whether each uncertainty tells them from the test images."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from torch import Tensor

from byov._core.callbacks import Say
from byov._core.errors import BadInput
from byov.config import same_source
from byov.data.sources import open_source
from byov.evaluation.labelled import Subject
from byov.evaluation.named_metrics import Measures, Scores, below, ood_measures
from byov.evaluation.per_image_uncertainty import pass_draws, scores_at_means
from byov.inference.inputs import in_channels, spread
from byov.inference.load import Run

OOD_IMAGES = 2000  # at most, of a source: an AUROC of .9 is then known to .005


def plain_name(spec: str) -> str:
    """A source's name as a part of a key or of a file's name."""
    return re.sub(r"\W+", "-", spec).strip("-")


def of_source(run: Run, data: str) -> str:
    """What the name of a file about this source ends in: nothing for the run's own."""
    return "" if same_source(data, run.config.data) else f"-{plain_name(data)}"


def check_sources(specs: Sequence[str], side: int) -> None:
    """Asked first: a name that does not exist should not cost the evaluation before it."""
    for spec in specs:
        open_source(spec, side)
    names = [plain_name(spec) for spec in specs]
    twice = next((spec for spec, name in zip(specs, names, strict=True) if names.count(name) > 1), None)
    if twice is not None:
        raise BadInput(f"--ood {twice} cannot be told from another one by its name: give it once, or rename it.")


def outside_images(subject: Subject, spec: str, say: Say) -> Tensor:
    """Images of a source (its test images, where it has some), of the run's channels."""
    run, source = subject.run, open_source(spec, subject.side)
    images = source.load(source.default, subject.progress, say).images
    images, converted = in_channels(run, images[spread(len(images), OOD_IMAGES)])
    run.check(images)
    if converted:
        say(f"{spec}: {converted}, as {run.folder} takes them.")
    return images


def outside_measures(subject: Subject, spec: str, images: Tensor, draws: int, inside: Mapping[str, Tensor]) -> Measures:
    """`ood.NAME.SCORE.*`, from these images' scores and those of the test images."""
    scores: Scores = scores_at_means(subject, subject.features(images, f"images of {spec}"))
    if draws:
        scores |= pass_draws(subject, images, draws, spec).scores()
    return below(f"ood.{plain_name(spec)}.", ood_measures(inside, scores) | {"images": len(images)})
