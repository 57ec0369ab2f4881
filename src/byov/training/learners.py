"""What a method trains: networks, teacher and loss. One learner for BYOV and BYOL, one for supervised methods.

All have the same interface: `posterior`, `teacher` (or None), `prior` (None if nothing is random), `loss(batch, key)`.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from byov._core.errors import BadInput
from byov._core.randomness import RandomStream, fold, generator
from byov.backbones import Encoder, build_encoder, vit
from byov.config import SUPERVISED, Config, Model
from byov.data.views import two_views, view
from byov.posterior import Posterior, Prior, priors
from byov.posterior.segments import Flattened, Where

# ------------------------------------------------------------------------------------------------------------- networks

ENCODER = "encoder."  # prefix of an encoder's parameter names in Student and Classifier


def encoder_of(network: nn.Module) -> Encoder:
    """Return the encoder of a student, a teacher or a classifier."""
    encoder = network.get_submodule(ENCODER[:-1])
    assert isinstance(encoder, Encoder)
    return encoder


def head(inputs: int, outputs: int, layers: int, config: Model) -> nn.Sequential:
    """Build BYOL's head: (Linear, norm, ReLU) for each hidden layer, then a Linear without bias."""
    norms: dict[str, Callable[[int], nn.Module]] = {
        "batch": nn.BatchNorm1d,
        "layer": nn.LayerNorm,
        "none": lambda width: nn.Identity(),
    }
    hidden = config.head_hidden
    parts: list[nn.Module] = []
    for _ in range(layers - 1):
        parts += [nn.Linear(inputs, hidden), norms[config.head_norm](hidden), nn.ReLU(inplace=True)]
        inputs = hidden
    network = nn.Sequential(*parts, nn.Linear(inputs, outputs, bias=False))
    return network.apply(partial(vit.initialise, weights=config.weight_init))


class Outputs(NamedTuple):
    features: Tensor
    projection: Tensor
    prediction: Tensor


class Student(nn.Module):
    """Encoder, projector and predictor.

    Args:
        encoder: The encoder; its output width is ``encoder.features``.
        config: Widths, layers and norm of the two heads.

    Example:
        >>> model = byov.Model(width=16, depth=1, heads=2)
        >>> student = byov.Student(byov.build_encoder(model, (1, 8, 8)), model)
        >>> student(torch.rand(4, 1, 8, 8)).features.shape
        torch.Size([4, 16])
    """

    def __init__(self, encoder: Encoder, config: Model) -> None:
        super().__init__()
        self.encoder = encoder
        self.projector = head(encoder.features, config.head_output, config.projector_layers, config)
        self.predictor = head(config.head_output, config.head_output, config.predictor_layers, config)

    def forward(self, images: Tensor, after_trunk: bool = False) -> Outputs:
        """Of images; with `after_trunk` of what the encoder's frozen trunk made of them."""
        features = self.encoder.after_trunk(images) if after_trunk else self.encoder(images)
        projection = self.projector(features)
        return Outputs(features, projection, self.predictor(projection))


class Bare(nn.Module):
    """Only an encoder, for methods that train nothing."""

    def __init__(self, encoder: Encoder) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, images: Tensor) -> tuple[Tensor]:
        """Return the features."""
        return (self.encoder(images),)


class Classifier(nn.Module):
    """An encoder and a linear layer."""

    def __init__(self, encoder: Encoder, classes: int) -> None:
        super().__init__()
        self.encoder = encoder
        self.classifier = nn.Linear(encoder.features, classes).apply(vit.initialise)

    def forward(self, images: Tensor, after_trunk: bool = False) -> tuple[Tensor, Tensor]:
        """Return features and logits of images; with `after_trunk` of what the encoder's frozen trunk made of them."""
        features = self.encoder.after_trunk(images) if after_trunk else self.encoder(images)
        return features, self.classifier(features)


class Teacher(Flattened):
    """A copy of the student that follows its means: mean_T <- tau * mean_T + (1 - tau) * mean.

    Only its encoder and projector run; it has a predictor because the teacher priors need an average of the predictor's
    means too. It has its own BatchNorm statistics.

    Args:
        student: The network to follow; it is copied.
        where: The student's random parameters, as given to `Posterior`.
        moments: Also track the running variance of the student's means, for the prior `teacher_moments`.

    Example:
        >>> model = byov.Model(width=16, depth=1, heads=2)
        >>> student = byov.Student(byov.build_encoder(model, (1, 8, 8)), model)
        >>> teacher, posterior = byov.Teacher(student, "all"), byov.Posterior(student)
        >>> teacher.update(posterior, byov.schedules.tau(0.5, 0.99))
    """

    variance: Tensor | None

    def __init__(self, student: Student, where: Where, moments: bool = False) -> None:
        super().__init__(copy.deepcopy(student), where)
        self.requires_grad_(False)
        self.register_buffer("variance", torch.zeros_like(self.means) if moments else None)

    def flats(self) -> dict[str, Tensor]:
        return super().flats() | ({} if self.variance is None else {"variance": self.variance})

    @torch.no_grad()
    def forward(self, images: Tensor, after_trunk: bool = False) -> Tensor:
        """Project images, or the frozen trunk's activations of them, without gradient."""
        student: Any = self.module
        features = student.encoder.after_trunk(images) if after_trunk else student.encoder(images)
        return student.projector(features)  # type: ignore[no-any-return]

    @torch.no_grad()
    def update(self, posterior: Posterior, tau: float) -> None:
        """Move the teacher towards the student's means by 1 - tau of the gap."""
        if self.variance is not None:
            # v <- tau (v + (1 - tau)(mean - mean_T)^2) with mean_T from before: E[mean^2] - E[mean]^2, never negative.
            gap = posterior.means - self.means
            self.variance.addcmul_(gap, gap, value=1 - tau).mul_(tau)
        self.means.lerp_(posterior.means, 1 - tau)
        own, others = list(self.module.parameters()), list(posterior.module.parameters())  # those that are not random
        if own:
            torch._foreach_lerp_(tuple(own), tuple(others), 1 - tau)

    @torch.no_grad()
    def distance(self, posterior: Posterior) -> float:
        """Return the distance to the student's means, relative to the norm of the teacher."""
        own = [self.means, *self.module.parameters()]
        others = [posterior.means, *posterior.module.parameters()]
        gap = nn.utils.get_total_norm([a - b for a, b in zip(own, others, strict=True)])
        return float(gap / nn.utils.get_total_norm(own))


# --------------------------------------------------------------------------------------------------------------- losses


def byol_loss(prediction1: Tensor, prediction2: Tensor, target1: Tensor, target2: Tensor) -> Tensor:
    """Compute the mean over the batch of (2 - 2 cos(p1, z2')) + (2 - 2 cos(p2, z1')).

    `target1` and `target2` are the teacher's projections of views 1 and 2; no gradient flows into them.
    """
    return (4 - 2 * _cosine(prediction1, target2) - 2 * _cosine(prediction2, target1)).mean()


def _cosine(prediction: Tensor, target: Tensor) -> Tensor:
    return F.cosine_similarity(_precise(prediction), _precise(target.detach()), dim=-1)


def contrastive_loss(
    prediction1: Tensor,
    prediction2: Tensor,
    target1: Tensor,
    target2: Tensor,
    weight: float = 1.0,
    temperature: float = 0.1,
) -> Tensor:
    """Compute BYOL's loss plus the repulsion from the batch's other images, both directions summed.

    This is BYOL's ablation towards SimCLR (Grill et al., 2020, "Ablation to contrastive methods"). Weight 0 is BYOL.
    Weight 1 is, up to a constant, InfoNCE with predictor and teacher, but without the positive in the denominator and
    with negatives of the other view only (SimCLR has both views').
    """
    attraction = byol_loss(prediction1, prediction2, target1, target2)
    return attraction + weight * (
        repulsion(prediction1, target2, temperature) + repulsion(prediction2, target1, temperature)
    )


def repulsion(prediction: Tensor, target: Tensor, temperature: float) -> Tensor:
    """Compute the mean over i of 2 T log mean_{j != i} exp(cos(p_i, z'_j) / T), a soft maximum of the others' 2 cos."""
    if len(prediction) < 2:
        raise ValueError("a batch of one image has no negatives: give at least two.")
    p, z = (F.normalize(_precise(t), dim=-1) for t in (prediction, target.detach()))
    others = (p @ z.T / temperature).masked_fill(torch.eye(len(p), dtype=torch.bool, device=p.device), -torch.inf)
    return 2 * temperature * (others.logsumexp(1) - math.log(len(p) - 1)).mean()


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Compute the mean negative log-likelihood of the labels."""
    return F.cross_entropy(_precise(logits), labels)


def _precise(values: Tensor) -> Tensor:
    """Convert lower precision, such as bfloat16, to float32."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


# ------------------------------------------------------------------------------------------------------------- learners


class Batch(NamedTuple):
    images: Tensor | None  # uint8 (B, C, H, W); None if `activations` replace them
    ids: Tensor  # their indices in the training set, on the CPU: the key of their views
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
            with self.posterior.sampled(
                generator(*key), flipout=signs_of(batch, self.config, key, self.posterior.means.device)
            ):
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
            return byol_loss(prediction1, prediction2, target1, target2)
        weight, temperature = how.negatives_weight, how.negatives_temperature
        return contrastive_loss(prediction1, prediction2, target1, target2, weight, temperature)


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
        assert batch.labels is not None
        seen, after_trunk = self._view(batch)
        with self.posterior.sampled(
            generator(*key), flipout=signs_of(batch, self.config, key, self.posterior.means.device)
        ):
            features, logits = self.posterior(seen, after_trunk)
        return Loss(cross_entropy(logits, batch.labels), features.detach(), None)

    def _view(self, batch: Batch) -> tuple[Tensor, bool]:
        """Return the first view, and whether it is activations after the trunk."""
        if batch.activations is not None:
            return batch.activations[0], True
        assert batch.images is not None
        seed = fold(RandomStream.VIEWS, self.config.seed)
        with torch.autocast(batch.images.device.type, enabled=False):
            images = view(batch.images, batch.ids, self.config.views.first, self.image_size, seed, batch.epoch, 0)
        return images.to(self.posterior.means.dtype), False


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


def signs_of(batch: Batch, config: Config, key: tuple[int, ...], device: torch.device) -> torch.Generator | bool:
    """Return the generator of flipout's signs, or False. Micro-batches and processes may share a draw, never signs."""
    if config.posterior.draw != "flipout":
        return False
    return generator(RandomStream.SIGNS, *key, int(batch.ids[0]), device=device)


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
