"""What is evaluated: a run's encoder (or another), its source with labels, and what several measures need of both."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor, nn

from byov._core.callbacks import Progress, Say, say_on_stderr
from byov._core.errors import BadInput
from byov.config import same_source
from byov.data.images import SPLITS, ImageSet
from byov.data.sources import open_source
from byov.evaluation.probe import Probe, fit_probe
from byov.inference.features import features_of
from byov.inference.inputs import at_side, in_channels
from byov.inference.load import Run
from byov.inference.reference import ReferenceSet
from byov.runs.split import divide


@dataclass(frozen=True)
class Labelled:
    """A source with labels as a run takes it: of its channels, and with the training images that the run saw."""

    name: str
    train: ImageSet
    test: ImageSet
    train_ids: Tensor
    """Which of the source's training images `train` holds."""
    flips: bool
    """Whether a mirrored image is still one of its kind."""
    converted: str | None
    """What was done to the channels."""

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
    """A source to probe a run with; bad input where it has no labels, or its images are not square."""
    source = open_source(name, run.image_shape[-1])
    test, train = (source.load(split, progress, say) for split in reversed(SPLITS))  # test first: it may be missing
    if train.labels is None or test.labels is None:
        where = " (a folder has them where all images lie in class folders)" if name.startswith("folder:") else ""
        raise BadInput(f"{name} has no labels to evaluate with{where}: give a source that has, with --data.")
    ids = torch.arange(len(train))
    own = same_source(name, run.config.data)
    if own and run.fingerprint not in (None, train.fingerprint()):
        say(f"{name} has changed since {run.folder} was trained: the probe may see other images than the encoder did.")
    if own and run.config.images is not None and run.config.images < len(train):
        ids = divide(len(train), run.config.images, 0).trained  # the probe sees the images that the encoder saw
        train = train.subset(ids)
    (train_images, converted), (test_images, _) = (in_channels(run, each.images) for each in (train, test))
    run.check(train_images)
    run.check(test_images)
    if converted:
        say(f"{name}: {converted}, as {run.folder} takes them.")
    train, test = replace(train, images=train_images), replace(test, images=test_images)
    return Labelled(name, train, test, ids, source.flips, converted)


@dataclass(frozen=True)
class Subject:
    """An encoder on a source. Features and probe are made when first asked for."""

    run: Run
    encoder: nn.Module
    data: Labelled
    side: int
    """In pixels, at which the encoder sees the images."""
    progress: Progress
    bank: ReferenceSet | None = None
    """The run's reference bank, where the encoder is the run's own."""

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
        """A linear probe on some of the features."""
        what = f"fitting a probe to {len(labels):,} images"
        self.progress(what, 0, 0)  # no telling how long it takes
        probe = fit_probe(features, labels, classes=self.data.classes)
        self.progress(what, 1, 1)
        return probe

    def features(self, images: Tensor, what: str) -> Tensor:
        """Features of images of any side."""
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
    """A run's own encoder on its own source, or on another."""
    data = load_labelled(run, source or run.config.data, progress, say)
    return Subject(run, run.encoder, data, run.image_shape[-1], progress)
