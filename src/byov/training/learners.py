"""What a method trains: its networks and its loss on a batch. One class for BYOV and BYOL, one for supervised methods.

All have the same interface: `posterior`, `teacher` (or None), `prior` (None if nothing is random), `loss(batch, key)`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from byov._core.errors import BadInput
from byov._core.randomness import RandomStream, fold, generator
from byov.backbones import build_encoder
from byov.config import SUPERVISED, Config
from byov.data.views import two_views, view
from byov.objectives import byol, negatives, supervised
from byov.posterior import Posterior, Prior, priors
from byov.training.networks import ENCODER, Bare, Classifier, Student, encoder_of
from byov.training.teacher import Teacher


class Batch(NamedTuple):
    images: Tensor | None  # uint8 (B, C, H, W); None if `activations` replace them
    ids: Tensor  # their indices in the training set: the key of their views
    labels: Tensor | None
    epoch: int
    activations: tuple[Tensor, Tensor] | None = None  # of the two views, after the frozen trunk (view_cache.py)


class Loss(NamedTuple):
    nll: Tensor
    features: Tensor  # of the first view, for the monitors
    projection: Tensor | None


class Learner(Protocol):
    @property
    def posterior(self) -> Posterior: ...
    @property
    def teacher(self) -> Teacher | None: ...
    @property
    def prior(self) -> Prior | None: ...

    masks: Mapping[str, Tensor]  # of pruned parameters, by name (training/masks.py)

    def loss(self, batch: Batch, key: tuple[int, ...]) -> Loss:
        """Compute the loss without the KL, at the draw that `key` names."""
        ...


class SelfSupervised:
    """BYOV, and BYOL, which is the same without random weights."""

    def __init__(self, config: Config, student: Student, image_size: int) -> None:
        assert config.posterior.where is not None, "resolve the config first"
        self.config = config
        self.image_size = image_size
        where, prior = config.posterior.where, config.posterior.prior
        self.teacher = Teacher(student, where, moments=prior == "teacher_moments")
        self.posterior = Posterior(student, where, config.posterior.init_log_variance)
        self.prior = build_prior(config, self.posterior, self.teacher)
        self.masks: Mapping[str, Tensor] = {}

    def loss(self, batch: Batch, key: tuple[int, ...]) -> Loss:
        views, after_trunk = self._views(batch)
        targets = [self.teacher(v, after_trunk) for v in views]
        if self.config.posterior.draw == "view":
            outputs = []
            for i, v in enumerate(views):
                with self.posterior.sampled(generator(*key, i)):
                    outputs.append(self.posterior(v, after_trunk))
        else:
            with self.posterior.sampled(generator(*key), flipout=signs_of(batch, self.config, key)):
                outputs = [self.posterior(v, after_trunk) for v in views]
        nll = self._objective(outputs[0].prediction, outputs[1].prediction, targets[0], targets[1])
        return Loss(nll, outputs[0].features.detach(), outputs[0].projection.detach())

    def _views(self, batch: Batch) -> tuple[tuple[Tensor, Tensor], bool]:
        """Return the two views, and whether they are activations after the trunk, which student and teacher share."""
        if batch.activations is not None:
            return batch.activations, True
        assert batch.images is not None
        seed, dtype = fold(RandomStream.VIEWS, self.config.seed), self.posterior.means.dtype
        with torch.autocast(batch.images.device.type, enabled=False):  # views are computed in full precision
            pair = two_views(batch.images, batch.ids, self.config.views, self.image_size, seed, batch.epoch)
        first, second = (v.to(dtype) for v in pair)
        encoder = encoder_of(self.posterior.module)
        if not (encoder.has_trunk and encoder.frozen_statistics):
            return (first, second), False
        with torch.no_grad():
            return (encoder.trunk(first), encoder.trunk(second)), True

    def _objective(self, prediction1: Tensor, prediction2: Tensor, target1: Tensor, target2: Tensor) -> Tensor:
        how = self.config.objective
        if how.name == "byol":
            return byol.loss(prediction1, prediction2, target1, target2)
        weight, temperature = how.negatives_weight, how.negatives_temperature
        return negatives.loss(prediction1, prediction2, target1, target2, weight, temperature)


class Supervised:
    """Supervised Bayes by Backprop, and plain supervised training: the first view and a classifier."""

    teacher = None

    def __init__(self, config: Config, classifier: Classifier, image_size: int) -> None:
        assert config.posterior.where is not None, "resolve the config first"
        self.config = config
        self.image_size = image_size
        self.posterior = Posterior(classifier, config.posterior.where, config.posterior.init_log_variance)
        self.prior = build_prior(config, self.posterior, None)
        self.masks: Mapping[str, Tensor] = {}

    def loss(self, batch: Batch, key: tuple[int, ...]) -> Loss:
        assert batch.labels is not None and batch.images is not None
        seed = fold(RandomStream.VIEWS, self.config.seed)
        with torch.autocast(batch.images.device.type, enabled=False):
            images = view(batch.images, batch.ids, self.config.views.first, self.image_size, seed, batch.epoch, 0)
        with self.posterior.sampled(generator(*key), flipout=signs_of(batch, self.config, key)):
            features, logits = self.posterior(images.to(self.posterior.means.dtype))
        return Loss(supervised.loss(logits, batch.labels), features.detach(), None)


class PostHoc:
    """An encoder that is not trained; the width of its posterior is found by forward passes (scoring/posthoc.py)."""

    teacher = None
    prior = None

    def __init__(self, config: Config, network: Bare, image_size: int) -> None:
        assert config.posterior.where is not None, "resolve the config first"
        self.config = config
        self.image_size = image_size
        self.posterior = Posterior(network, config.posterior.where, config.posterior.init_log_variance)
        self.masks: Mapping[str, Tensor] = {}

    def loss(self, batch: Batch, key: tuple[int, ...]) -> Loss:
        raise BadInput("a posthoc run has no loss to train on: use --method byov.")


def signs_of(batch: Batch, config: Config, key: tuple[int, ...]) -> torch.Generator | bool:
    """Return the generator of flipout's signs, or False. Micro-batches and processes may share a draw, never signs."""
    if config.posterior.draw != "flipout":
        return False
    return generator(RandomStream.SIGNS, *key, int(batch.ids[0]), device=batch.ids.device)


def build_prior(config: Config, posterior: Posterior, teacher: Teacher | None) -> Prior | None:
    """Build the prior that the config names; None if nothing is random."""
    settings = config.posterior
    if not posterior.segments.numel:
        return None
    if settings.prior == "standard":
        return priors.Standard()
    if settings.prior == "pretrained":
        return _pretrained_prior(posterior, settings.prior_std)  # --init has set the means before
    assert teacher is not None, "resolve the config first"
    if settings.prior == "teacher_mean":
        return priors.TeacherMean(teacher.means)
    assert teacher.variance is not None
    assert settings.variance_floor is not None, "resolve the config first"
    return priors.TeacherMoments(teacher.means, teacher.variance, settings.variance_floor)


def _pretrained_prior(posterior: Posterior, std: float) -> priors.Pretrained:
    """Build N(weights, std^2) for the encoder, and N(0, 1) for the heads, which are not pretrained."""
    mean, stds = posterior.means.detach().clone(), torch.full_like(posterior.means.detach(), std)
    for segment in posterior.segments:
        if not segment.name.startswith(ENCODER):
            mean[segment.offset : segment.stop] = 0.0
            stds[segment.offset : segment.stop] = 1.0
    return priors.Pretrained(mean, stds)


AnyLearner = SelfSupervised | Supervised | PostHoc
Network = Student | Classifier | Bare


def build_learner(
    config: Config,
    image_shape: tuple[int, int, int],
    classes: int | None,
    device: torch.device | str = "cpu",
    initialise: Callable[[Network], None] = lambda network: None,
) -> AnyLearner:
    """Build the learner of a resolved config, initialised from its seed, then by `initialise` (weights of --init)."""
    dtype = torch.float64 if config.precision == "64-true" else torch.float32
    state = torch.random.get_rng_state()
    torch.manual_seed(fold(RandomStream.INIT, config.seed))
    try:
        encoder = build_encoder(config.model, image_shape)
        if config.method in SUPERVISED:
            if classes is None:
                raise BadInput(f"{config.method} needs labels, but {config.data} has none: use byov or byol.")
            network: Network = Classifier(encoder, classes)
        elif config.method == "posthoc":
            network = Bare(encoder)
        else:
            network = Student(encoder, config.model)
    finally:
        torch.random.set_rng_state(state)
    initialise(network)
    network.to(device, dtype)  # before it is wrapped: the priors alias the flat tensors
    kind = {Classifier: Supervised, Bare: PostHoc, Student: SelfSupervised}[type(network)]
    return kind(config, network, image_shape[-1])  # type: ignore[no-any-return]
