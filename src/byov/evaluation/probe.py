"""The linear probe: images with labels, an encoder's features of them, and the classifier fitted to the features.

The classifier is multinomial logistic regression on frozen, standardised features, solved to its optimum. A probe
stopped early measures its optimiser as much as the features. The objective is convex, and `gradient_norm` shows how
near the optimum is. It minimises

    mean over images of -log p(label)  +  l2 / 2 * |weights|^2      (no penalty on the bias)

by L-BFGS in the coordinates in which the features are nearly white (`_Whitening`), warm-started from the strongest L2
to the weakest. Written by hand because it is measured faster than scikit-learn's LogisticRegression(lbfgs): one fit of
10,000 x 192 synthetic correlated features, 10 classes, l2 1e-4, one core, until the gradient is below 1e-5: 0.25 s
against 5.5 s. (scikit-learn's C is 1 / (l2 * images).)
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import minimize
from torch import Tensor, nn

from byov._core.callbacks import Progress, Say, say_on_stderr
from byov._core.errors import BadInput
from byov._core.randomness import permutation
from byov.config import same_source
from byov.data.images import SPLITS, ImageSet
from byov.data.sources import Source, open_source
from byov.inference.inputs import at_side, in_channels
from byov.inference.run import ReferenceSet, Run, features_of
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


GRID = tuple(10.0 ** (-half / 2) for half in range(13))  # 1 to 1e-6, two per decade, strongest first
FALLBACK_L2 = 1e-2  # if there are too few images to hold any out
PATIENCE = 3  # weaker L2s tried after the best: the held-out NLL has one valley along the grid
TOLERANCE = 1e-5  # largest entry of the gradient at the optimum; scikit-learn stops at 1e-4
COARSE = 1e-4  # the same in float32, which is less precise
ROTATED = 1024  # up to this width the whitening is exact; above, only along this many / 4 main directions
DOUBLE = 1 << 25  # numbers of features up to which fits run in float64 (256 MiB); above, in float32
BLOCK = 1 << 22  # numbers of features at a time in `logits`
ITERATIONS = 1000  # at most; fits took up to 22


@dataclass(frozen=True)
class Probe:
    """A fitted probe. A class without a training image has bias -inf: probability 0."""

    weights: Tensor
    """(classes, width), float64, on standardised features."""
    bias: Tensor
    """(classes,), float64."""
    mean: Tensor
    """(width,), of the training features."""
    std: Tensor
    """(width,), of the training features; 1 where a feature is constant."""
    l2: float
    """The chosen strength."""
    gradient_norm: float
    """Largest entry of the objective's gradient where the fit ended."""
    converged: bool
    """Whether that is below the tolerance."""

    @cached_property
    def _folded(self) -> tuple[Tensor, Tensor]:
        """Weights and bias for raw features."""
        weights = self.weights / self.std
        return weights.T, self.bias - weights @ self.mean

    def tensors(self) -> tuple[Tensor, ...]:
        """All that predictions depend on."""
        return self.weights, self.bias, self.mean, self.std

    def logits(self, features: Tensor) -> Tensor:
        """Return (images, classes), float64, of features as the encoder returns them."""
        if features.ndim != 2 or features.shape[1] != len(self.mean):
            raise ValueError(f"the probe was fitted on {len(self.mean)} features, not on {tuple(features.shape)}.")
        weights, bias = self._folded
        rows = max(1, BLOCK // features.shape[1])
        return torch.cat([block.detach().cpu().double() @ weights + bias for block in torch.split(features, rows)])

    def probabilities(self, features: Tensor) -> Tensor:
        """Return (images, classes), float32; rows sum to 1."""
        return self.logits(features).softmax(1).float()


def fit_probe(features: Tensor, labels: Tensor, seed: int = 0, classes: int | None = None) -> Probe:
    """Choose L2 on a held-out fifth of the images (by NLL, one-standard-error rule), then fit all of them.

    `classes`: their number, if some have no label here.
    """
    _check(features, labels, classes)
    labels = labels.detach().cpu()
    present, targets = torch.unique(labels, return_inverse=True)
    kept, held = _split(targets, seed)
    dtype = torch.float64 if features.numel() <= DOUBLE else torch.float32
    l2, start = FALLBACK_L2, None
    if len(held):
        l2, start = _choose_l2(features, targets, kept, held, dtype)
    mean, std = _moments(features)
    problem = _Problem(_standardised(features, mean, std, dtype), targets, len(present))
    found, gradient_norm = problem.solve(l2, start)
    total = max(int(present[-1]) + 1, classes or 0)
    weights = torch.zeros(total, features.shape[1], dtype=torch.float64)
    bias = torch.full((total,), -torch.inf, dtype=torch.float64)
    weights[present], bias[present] = found[:, :-1], found[:, -1]
    return Probe(weights, bias, mean, std, l2, gradient_norm, gradient_norm <= problem.tolerance)


def _check(features: Tensor, labels: Tensor, classes: int | None) -> None:
    if features.ndim != 2 or labels.ndim != 1 or len(features) != len(labels) or features.shape[1] == 0:
        raise BadInput(
            f"the probe needs features (images, width) and one label per image, "
            f"not {tuple(features.shape)} and {tuple(labels.shape)}."
        )
    if labels.dtype != torch.int64 or (len(labels) and int(labels.min()) < 0):
        raise BadInput("the probe needs int64 labels from 0 on.")
    if len(torch.unique(labels)) < 2:
        raise BadInput("the probe needs images of at least two classes; give a source with more labels.")
    if classes is not None and int(labels.max()) >= classes:
        raise BadInput(f"the probe was given classes={classes}, but a label is {int(labels.max())}.")
    if not bool(features.isfinite().all()):
        raise BadInput("some features are not finite: the encoder has diverged, so train it again.")


def _split(targets: Tensor, seed: int) -> tuple[Tensor, Tensor]:
    """Split into kept and held-out images: a fifth of every class is held out, none of a class of one or two."""
    held = torch.zeros(len(targets), dtype=torch.bool)
    for c in range(int(targets.max()) + 1):
        of_class = (targets == c).nonzero()[:, 0]
        held[of_class[permutation(len(of_class), seed, c)[: round(len(of_class) / 5)]]] = True
    return (~held).nonzero()[:, 0], held.nonzero()[:, 0]


def _choose_l2(
    features: Tensor, targets: Tensor, kept: Tensor, held: Tensor, dtype: torch.dtype
) -> tuple[float, Tensor]:
    """The strongest L2 that is not worse than the best by more than a standard error of the held-out NLL, and its fit.

    The held-out NLL is flat around its minimum, where rounding would choose, and change the calibration. The error is
    that of the difference, paired by image.
    """
    mean, std = _moments(features[kept])
    problem = _Problem(_standardised(features[kept], mean, std, dtype), targets[kept], int(targets.max()) + 1)
    held_out = _Problem(_standardised(features[held], mean, std, dtype), targets[held], problem.classes)
    tried: list[tuple[float, Tensor, Tensor]] = []
    best, found = 0, None
    for l2 in GRID:
        found, _ = problem.solve(l2, found)
        tried.append((l2, found, held_out.nlls(found)))
        if float(tried[-1][2].mean()) < float(tried[best][2].mean()):
            best = len(tried) - 1
        if len(tried) - 1 - best == PATIENCE:
            break
    for l2, fit, nlls in tried[:best]:
        worse = nlls - tried[best][2]
        if len(worse) > 1 and float(worse.mean()) <= float(worse.std()) / len(worse) ** 0.5:
            return l2, fit
    return tried[best][0], tried[best][1]


def _moments(features: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of every feature, in float64, in blocks; a constant feature gets 1."""
    rows = max(1, BLOCK // features.shape[1])
    blocks = [block.detach().cpu() for block in torch.split(features, rows)]
    mean = torch.stack([block.double().sum(0) for block in blocks]).sum(0) / len(features)
    variance = torch.stack([(block.double() - mean).square().sum(0) for block in blocks]).sum(0) / len(features)
    std = variance.sqrt()
    constant = std <= torch.finfo(torch.float32).eps * mean.abs()
    return mean, torch.where(constant, torch.ones_like(std), std)


def _standardised(features: Tensor, mean: Tensor, std: Tensor, dtype: torch.dtype) -> Tensor:
    """Standardised features, block by block."""
    rows = max(1, BLOCK // features.shape[1])
    out = torch.empty(features.shape, dtype=dtype)
    for block, into in zip(torch.split(features, rows), torch.split(out, rows), strict=True):
        into.copy_((block.detach().cpu().double() - mean) / std)
    return out


class _Problem:
    """The objective on one set of standardised images, solved for one L2 after another.

    Parameters are (classes, width + 1), the bias last. Logits are stored as (classes, images): with few classes,
    the two products take 1.7 (float64) to 5 (float32) times less than as (images, classes), 10,000 x 192, one core.
    """

    def __init__(self, features: Tensor, targets: Tensor, classes: int) -> None:
        self.features, self.classes = features, classes
        self.truth = targets, torch.arange(len(targets))
        self.tolerance = TOLERANCE if features.dtype == torch.float64 else COARSE

    @cached_property
    def whitening(self) -> _Whitening:
        return _Whitening(self.features, self.classes)

    def log_p(self, parameters: Tensor) -> Tensor:
        logits = parameters[:, :-1].to(self.features.dtype) @ self.features.T
        return (logits.double() + parameters[:, -1:]).log_softmax(0)

    def nlls(self, parameters: Tensor) -> Tensor:
        """The NLL of every image."""
        return -self.log_p(parameters)[self.truth]

    def value_and_gradient(self, parameters: Tensor, l2: float) -> tuple[float, Tensor]:
        weights = parameters[:, :-1]
        log_p = self.log_p(parameters)
        value = float(-log_p[self.truth].mean() + l2 / 2 * weights.square().sum())
        residual = log_p.exp_()
        residual[self.truth] -= 1
        residual /= len(self.features)
        of_weights = (residual.to(self.features.dtype) @ self.features).double() + l2 * weights
        return value, torch.cat([of_weights, residual.sum(1, keepdim=True)], 1)

    def solve(self, l2: float, start: Tensor | None) -> tuple[Tensor, float]:
        """The optimum and the largest entry of the gradient there."""
        if start is None:
            start = torch.zeros(self.classes, self.features.shape[1] + 1, dtype=torch.float64)
        shape = start.shape

        def objective(u: NDArray[np.float64]) -> tuple[float, NDArray[np.float64]]:
            value, gradient = self.value_and_gradient(self.whitening.apply(torch.from_numpy(u).view(shape), l2), l2)
            return value, self.whitening.apply(gradient, l2).flatten().numpy()

        u = self.whitening.apply(start, l2, inverse=True).flatten().numpy()
        # ftol 0: stop by the gradient alone
        options = {"gtol": self.tolerance, "ftol": 0, "maxiter": ITERATIONS, "maxfun": 2 * ITERATIONS}
        u = minimize(objective, u, jac=True, method="L-BFGS-B", options=options).x
        found = self.whitening.apply(torch.from_numpy(u).view(shape), l2)
        return found, float(self.value_and_gradient(found, l2)[1].abs().max())


class _Whitening:
    """Coordinates u of the parameters in which the objective is about equally curved in all directions.

    The Hessian is near h * covariance + l2 (h: the softmax's curvature at even odds), so its inverse square root is
    known along the covariance's eigenvectors. Correlated features are far from white, even standardised: without
    this, the fit timed at the top of this file took 607 iterations instead of 18.
    """

    def __init__(self, features: Tensor, classes: int) -> None:
        width = features.shape[1]
        self.curvature = (1 - 1 / classes) / classes
        if width <= ROTATED:
            values, vectors = torch.linalg.eigh((features.T @ features).double() / len(features))
            rest = 0.0
        else:
            # An approximation is enough: the main directions of some of the images
            some = features[:: max(1, len(features) // ROTATED)]
            values, vectors = torch.linalg.eigh((some @ some.T).double() / len(some))  # those of the images' products
            values, vectors = values[-ROTATED // 4 :], vectors[:, -ROTATED // 4 :]
            vectors = some.double().T @ vectors / (values.clamp(min=1e-9) * len(some)).sqrt()
            rest = max(0.0, 1 - float(values.sum()) / width)
        self.values: Tensor = values.clamp(min=0.0)
        self.vectors: Tensor = vectors
        self.rest = rest

    def apply(self, rows: Tensor, l2: float, inverse: bool = False) -> Tensor:
        """u -> parameters (and gradients by parameters -> gradients by u: it is symmetric), or back."""
        power = 0.5 if inverse else -0.5
        along = (self.curvature * self.values + l2) ** power
        across = (self.curvature * self.rest + l2) ** power
        weights = rows[:, :-1]
        weights = across * weights + ((weights @ self.vectors) * (along - across)) @ self.vectors.T
        return torch.cat([weights, rows[:, -1:] * self.curvature**power], 1)
