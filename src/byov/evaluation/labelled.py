"""What is evaluated: an encoder on a source with labels, with the features and the probe that several sections need."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor, nn

from byov._core.callbacks import Progress, Say, say_on_stderr
from byov._core.errors import BadInput
from byov.config import same_source
from byov.data.images import SPLITS, ImageSet
from byov.data.sources import Source, open_source
from byov.evaluation.probe import Probe, fit_probe
from byov.inference.features import features_of
from byov.inference.inputs import at_side, in_channels
from byov.inference.load import Run
from byov.inference.reference import ReferenceSet
from byov.runs.split import divide


@dataclass(frozen=True)
class Labelled:
    """A source with labels, in the run's channels, with only the training images that the run saw."""

    name: str
    train: ImageSet
    test: ImageSet
    train_ids: Tensor
    """Indices of `train` among the source's training images."""
    flips: bool
    """Whether a mirrored image keeps its class."""
    converted: str | None
    """How the channels were converted; None: not at all."""

    @property
    def train_labels(self) -> Tensor:
        assert self.train.labels is not None
        return self.train.labels

    @property
    def test_labels(self) -> Tensor:
        assert self.test.labels is not None
        return self.test.labels

    @cached_property
    def classes(self) -> int:
        return 1 + int(max(self.train_labels.max(), self.test_labels.max()))


def load_labelled(run: Run, name: str, progress: Progress, say: Say = say_on_stderr) -> Labelled:
    """Load a source to probe a run with; bad input if it has no labels, or its images are not square."""
    source = open_source(name, run.image_shape[-1])
    test, train = (source.load(split, progress, say) for split in reversed(SPLITS))  # test first: it may be missing
    if train.labels is None or test.labels is None:
        where = " (a folder has them if all images are in class folders)" if name.startswith("folder:") else ""
        raise BadInput(f"{name} has no labels to evaluate with{where}: give a source that has some, with --data.")
    return as_labelled(run, name, source, train, test, say)


def as_labelled(run: Run, name: str, source: Source, train: ImageSet, test: ImageSet, say: Say) -> Labelled:
    """Convert images to the run's channels, and select the training images that the run saw."""
    ids = torch.arange(len(train))
    own = same_source(name, run.config.data)
    if own and run.fingerprint not in (None, train.fingerprint()):
        say(f"{name} has changed since {run.folder} was trained: the probe may see other images than the encoder did.")
    if own and run.config.images is not None and run.config.images < len(train):
        ids = divide(len(train), run.config.images, 0).trained
        train = train.subset(ids)
    (train_images, converted), (test_images, _) = (in_channels(run, each.images) for each in (train, test))
    run.check(train_images)
    run.check(test_images)
    if converted:
        say(f"{name}: {converted}, as {run.folder} takes them.")
    train, test = replace(train, images=train_images), replace(test, images=test_images)
    return Labelled(name, train, test, ids, source.flips, converted)


def plain_name(spec: str) -> str:
    """Return a source's name as a part of a key or of a file name."""
    return re.sub(r"\W+", "-", spec).strip("-")


def of_source(run: Run, data: str) -> str:
    """Return the ending of file names about this source: empty for the run's own."""
    return "" if same_source(data, run.config.data) else f"-{plain_name(data)}"


@dataclass(frozen=True)
class Subject:
    """An encoder on a source. Features and probe are computed at first use."""

    run: Run
    encoder: nn.Module
    data: Labelled
    side: int
    """Side of the images that the encoder takes, in pixels."""
    progress: Progress
    reference: ReferenceSet | None = None
    """The run's reference set, if the encoder is the run's own."""

    @cached_property
    def test_images(self) -> Tensor:
        return at_side(self.data.test.images, self.side)

    @cached_property
    def train_features(self) -> Tensor:
        return self.features(self.data.train.images, "training images")

    @cached_property
    def test_features(self) -> Tensor:
        return self.features(self.test_images, "test images")

    @cached_property
    def probe(self) -> Probe:
        """The linear probe, fitted to all training images."""
        return self.fit(self.train_features, self.data.train_labels)

    def fit(self, features: Tensor, labels: Tensor) -> Probe:
        """Fit a linear probe on some of the features."""
        what = f"fitting a probe to {len(labels):,} images"
        self.progress(what, 0, 0)  # its duration is unknown
        probe = fit_probe(features, labels, classes=self.data.classes)
        self.progress(what, 1, 1)
        return probe

    def features(self, images: Tensor, what: str) -> Tensor:
        """Compute features of images of any side."""
        done = 0

        def advance(count: int) -> None:
            nonlocal done
            done += count
            self.progress(f"features of {len(images):,} {what}", done, len(images))

        return features_of(self.encoder, images, advance=advance, size=self.side)


def subject_of(
    run: Run,
    progress: Progress = lambda what, done, total: None,
    say: Say = say_on_stderr,
    source: str | None = None,
) -> Subject:
    """Return a run's encoder at its means, on its own source or on another."""
    data = load_labelled(run, source or run.config.data, progress, say)
    return Subject(run, run.encoder, data, run.image_shape[-1], progress)
