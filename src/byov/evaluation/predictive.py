"""What outputs do over weight draws: class probabilities, levels of the network, and every uncertainty of an image.

Memory is flat in the draws. Each draw passes all images, so a draw is one function. It depends on the run's seed and
its number alone, so a long stream may come in chunks, one call each. Outputs are taken as they come and aligned on the
reference set, both from the same forward pass. Stopped work resumes after its last saved draw.

Under torchrun or srun every process runs the same code on the same images (`Run.processes`). Process r of n passes the
draws r, r + n, ...; at the end of a pass all merge their accumulators in the order of ranks, so all have the same.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol, Self, TypeVar

import torch
from torch import Tensor

from byov._core.cache import Cache, Entry, digest
from byov._core.callbacks import Progress
from byov._core.errors import BadInput
from byov._core.files import without_prefix
from byov.evaluation.probe import Probe, Subject
from byov.inference.inputs import at_side
from byov.inference.run import BATCH, Moments, ReferenceSet, aligned, at_draw, features_of, moments_of, outputs_of
from byov.metrics import Predictive, energy, entropy, knn_distance, mahalanobis, max_softmax
from byov.metrics.over_draws import OverDraws
from byov.posterior import Posterior
from byov.runs.folder import RunFolder
from byov.scoring.scores import AT_MEANS, CANDIDATES, OVER_DRAWS, TermSums
from byov.training.distributed.processes import Processes
from byov.training.learners import Bare, Classifier, Student

LEVELS = {Student: ("encoder", "projector", "predictor"), Classifier: ("encoder", "classifier"), Bare: ("encoder",)}
LABEL_FREE = "label_free_"  # before the names of CANDIDATES, some of which are also names of baselines
SAVE_SECONDS = 30.0  # between two saved states of work that can be resumed

Scores = dict[str, Tensor]
"""Uncertainties (images,) by name: higher means less certain."""
Advance = Callable[[int], None]
"""Called with the number of images that have passed since the last call."""


class Accumulator(Protocol):
    """What is accumulated over draws: it can be saved, sent, and merged with another over other draws."""

    def merge(self, other: Any) -> Self: ...
    def state(self) -> dict[str, Tensor]: ...
    @classmethod
    def from_state(cls, state: dict[str, Tensor]) -> Self: ...


A = TypeVar("A", bound=Accumulator)
T = TypeVar("T")


# -------------------------------------------------------------------------------------------------------- uncertainties


def below(prefix: str, measures: Mapping[str, T]) -> dict[str, T]:
    """Return the measures with a prefix before their names."""
    return {prefix + name: value for name, value in measures.items()}


def predictive_scores(predictive: Predictive) -> Scores:
    """Return the uncertainties that class probabilities over draws give."""
    return {
        "max_softmax": max_softmax(predictive.mean),
        "entropy": predictive.entropy,
        "expected_entropy": predictive.expected_entropy,
        "mutual_information": predictive.mutual_information,
        "predictive_std": predictive.predictive_std,
        "predictive_std_classes": predictive.predictive_std_classes,
    }


def scores_at_means(subject: Subject, images: Tensor, features: Tensor) -> Scores:
    """Return the baselines, which use the training images and labels, and the label-free scores without draws."""
    logits = subject.probe.logits(features)
    probabilities = logits.softmax(1)
    known, labels = subject.train_features, subject.data.train_labels
    found: Scores = {
        "max_softmax": max_softmax(probabilities),
        "entropy": entropy(probabilities),
        "energy": energy(logits),
        "knn_distance": knn_distance(features, known),
        "mahalanobis": mahalanobis(features, known, labels),
    }
    if subject.reference is not None:
        sums = TermSums(AT_MEANS)
        sums.add(subject.reference, features, None, subject.reference.own(at_side(images, subject.side)))
        found |= below(LABEL_FREE, sums.scores(0))
    return found


# -------------------------------------------------------------------------------------------------- class probabilities


class Drawn:
    """What is accumulated over draws of the same images."""

    def __init__(self, aligned: Predictive, unaligned: Predictive, sums: TermSums) -> None:
        self.aligned, self.unaligned = aligned, unaligned
        """Class probabilities by the probe, from features aligned on the reference set, and as they are."""
        self.sums = sums
        """Of the terms of the label-free scores; empty without them."""

    @classmethod
    def nothing(cls, images: int, classes: int, label_free: bool = True) -> Self:
        sums = TermSums(OVER_DRAWS if label_free else ())
        return cls(Predictive(images, classes), Predictive(images, classes), sums)

    def update(
        self, reference: ReferenceSet, probe: Probe, features: Tensor, k: int, own: Tensor | None = None
    ) -> None:
        """Add draw k, from its features of all images; `own`: their positions in the reference set."""
        self.aligned.update(probe.probabilities(reference.aligned(features, k)))
        self.unaligned.update(probe.probabilities(features))
        self.sums.add(reference, features, k, own)

    def merge(self, other: Drawn) -> Self:
        self.aligned.merge(other.aligned)
        self.unaligned.merge(other.unaligned)
        self.sums.merge(other.sums.totals)
        return self

    def state(self) -> dict[str, Tensor]:
        both = below("aligned.", self.aligned.state()) | below("unaligned.", self.unaligned.state())
        return both | below("total.", self.sums.totals)

    @classmethod
    def from_state(cls, state: dict[str, Tensor]) -> Self:
        aligned, unaligned, totals = (without_prefix(state, p) for p in ("aligned.", "unaligned.", "total."))
        sums = TermSums(OVER_DRAWS if totals else (), totals)
        return cls(Predictive.from_state(aligned), Predictive.from_state(unaligned), sums)

    def label_free_scores(self) -> Scores:
        """Return those that this many draws allow."""
        draws = self.aligned.draws
        allowed = [name for name in OVER_DRAWS if draws >= CANDIDATES[name].least_draws]
        return below(LABEL_FREE, TermSums(allowed, self.sums.totals).scores(draws))

    def scores(self) -> Scores:
        """Return the label-free scores, and those of the class probabilities as `draws_NAME`."""
        return self.label_free_scores() | below("draws_", predictive_scores(self.aligned))


def predict_classes(
    reference: ReferenceSet,
    probe: Probe,
    images: Tensor,
    draws: int,
    *,
    label_free: bool = False,
    batch_size: int = BATCH,
    resumable: bool = False,
    progress: Progress = lambda what, done, total: None,
) -> Drawn:
    """Predict classes by a probe, fitted at the means, from the features at each draw.

    With `label_free`, label-free scores are accumulated too. With `resumable`, stopped work resumes in the next call
    with the same run, probe and images.
    """
    images, run = _seen(reference, images, draws), reference.run
    own = reference.own(images) if label_free else None

    def take(found: dict[str, Drawn], k: int, advance: Advance) -> None:
        with at_draw(run.encoder, run.config.seed, k):
            features = features_of(run.encoder, images, batch_size, advance)
        found["all"].update(reference, probe, features, k, own)

    start = {"all": Drawn.nothing(len(images), len(probe.bias), label_free)}
    work = f"{'draws' if label_free else 'classes'}-{digest(images, *probe.tensors())}" if resumable else None
    return over_draws(reference, draws, start, take, len(images), work, progress)["all"]


def pass_draws(subject: Subject, images: Tensor, draws: int, what: str) -> Drawn:
    """Pass images through all draws, with label-free scores; stopped work resumes in the next call."""
    assert subject.reference is not None, "draws are the run's own encoder's"

    def progress(_: str, done: int, total: int) -> None:
        subject.progress(f"{what}: {len(images):,} images through {draws} draws", done, total)

    return predict_classes(
        subject.reference, subject.probe, images, draws, label_free=True, resumable=True, progress=progress
    )


class ProbePredictions(NamedTuple):
    """The class probabilities of a subject's test images by its probe."""

    means: Tensor
    """(images, classes), float32, at the means."""
    draws: Drawn | None
    """Over draws; None for a deterministic run."""


def probe_predictions(
    subject: Subject, draws: int, progress: Progress = lambda what, done, total: None
) -> ProbePredictions:
    """Classify the test images by the probe: at the means, and over aligned and unaligned draws."""
    means = subject.probe.probabilities(subject.test_features)
    if subject.run.deterministic:
        return ProbePredictions(means, None)
    reference = subject.reference or ReferenceSet(subject.run)
    return ProbePredictions(
        means, predict_classes(reference, subject.probe, subject.test_images, draws, progress=progress)
    )


# ------------------------------------------------------------------------------------------------ levels of the network


class Level(NamedTuple):
    """The outputs of one part of the network over draws."""

    raw: OverDraws
    aligned: OverDraws


def predict_levels(
    reference: ReferenceSet,
    images: Tensor,
    draws: int,
    *,
    batch_size: int = BATCH,
    resumable: bool = False,
    progress: Progress = lambda what, done, total: None,
) -> dict[str, Level]:
    """Compute mean and variance over draws after the encoder, the projector and the predictor (or the classifier)."""
    images, network, seed = _seen(reference, images, draws), reference.run.learner.posterior, reference.run.config.seed
    names = LEVELS[type(network.module)]
    widths = [output.shape[1] for output in _outputs(network, seed, None, reference.images[:2], batch_size)]
    at_means = _level_moments(reference, None, widths, batch_size)
    start = {
        f"{name}.{kind}": OverDraws(len(images), width)
        for name, width in zip(names, widths, strict=True)
        for kind in Level._fields
    }

    def take(found: dict[str, OverDraws], k: int, advance: Advance) -> None:
        at_k = _level_moments(reference, k, widths, batch_size)
        outputs = _outputs(network, seed, k, images, batch_size, advance)
        for name, output, of, to in zip(names, outputs, at_k, at_means, strict=True):
            found[f"{name}.raw"].update(output)
            found[f"{name}.aligned"].update(aligned(output, of, to))

    work = f"levels-{digest(images)}" if resumable else None
    found = over_draws(reference, draws, start, take, len(images), work, progress)
    return {name: Level(*(found[f"{name}.{kind}"] for kind in Level._fields)) for name in names}


def _level_moments(reference: ReferenceSet, k: int | None, widths: list[int], batch_size: int) -> list[Moments]:
    """The moments over the reference set of each level's outputs at draw k, cached as one small tensor."""

    def make() -> Tensor:
        outputs = _outputs(reference.run.learner.posterior, reference.run.config.seed, k, reference.images, batch_size)
        return torch.cat([torch.stack(moments_of(output)) for output in outputs], dim=1)

    both = reference.cached("levels-means" if k is None else f"levels-{k:05d}", make)
    return [Moments(*part) for part in torch.split(both, widths, dim=1)]


def _outputs(
    network: Posterior,
    seed: int,
    k: int | None,
    images: Tensor,
    batch_size: int,
    advance: Advance = lambda count: None,
) -> list[Tensor]:
    """The outputs of each level at draw k, in evaluation mode, on the CPU, in float32."""
    with at_draw(network, seed, k):
        parts = [[level.float().cpu() for level in out] for out in outputs_of(network, images, batch_size, advance)]
    return [torch.cat(level) for level in zip(*parts, strict=True)]


# -------------------------------------------------------------------------------------------- over draws and processes


def over_draws(
    reference: ReferenceSet,
    draws: int,
    start: dict[str, A],
    take: Callable[[dict[str, A], int, Advance], None],
    images: int,
    work: str | None = None,
    progress: Progress = lambda what, done, total: None,
) -> dict[str, A]:
    """Accumulate this process's draws, from the last saved one on, and merge with the other processes.

    Args:
        reference: The run's reference set.
        draws: Number of draws, over all processes.
        start: Empty accumulators by name.
        take: Adds draw k to the accumulators: `take(found, k, advance)`.
        images: Number of images, for the progress.
        work: Names the saved state of stopped work; None: it starts again.
        progress: Called with the images passed by this process.

    Returns:
        The accumulators over all draws, the same in every process.
    """
    processes = reference.run.processes
    if len(set(processes.in_turn(reference.folder.name))) > 1:
        raise BadInput(
            f"{reference.run.folder} is not the same for all processes: was it trained on? Repeat the command."
        )
    mine = range(processes.rank, draws, processes.world)
    cache = Cache(RunFolder(reference.run.folder).results / "partial", reference.folder.name)
    name = f"{work}-{processes.rank}-of-{processes.world}"
    found, done = start, 0
    if work is not None and (entry := cache.read(name)) is not None and entry.header <= len(mine):
        found, done = _from_states(start, entry.tensors), entry.header
    seen, saved = done * images, time.monotonic()

    def advance(count: int) -> None:
        nonlocal seen
        seen += count
        progress(f"passing {images:,} images through {len(mine)} draws", seen, len(mine) * images)

    for k in mine[done:]:
        take(found, k, advance)
        done += 1
        if work is not None and time.monotonic() - saved >= SAVE_SECONDS:
            cache.write(name, Entry(_states(found), done))
            saved = time.monotonic()
    found = _merged(start, found, bool(mine), processes)
    if work is not None and processes.main:
        cache.clear(f"{work}-*-of-*")  # of all processes, also where there were more or fewer before
    return found


def _merged(start: dict[str, A], found: dict[str, A], any_draws: bool, processes: Processes) -> dict[str, A]:
    """The accumulators of all processes in one, in the order of ranks."""
    if processes.world == 1:
        return found
    whole: dict[str, A] = {}
    for states in processes.in_turn(_states(found) if any_draws else {}):
        for name, part in (_from_states(start, states) if states else {}).items():
            whole[name] = whole[name].merge(part) if name in whole else part
    return whole


def _states(found: dict[str, A]) -> dict[str, Tensor]:
    return {f"{name}/{key}": value for name, a in found.items() for key, value in a.state().items()}


def _from_states(like: dict[str, A], states: Mapping[str, Tensor]) -> dict[str, A]:
    return {name: type(a).from_state(without_prefix(states, f"{name}/")) for name, a in like.items()}


def _seen(reference: ReferenceSet, images: Tensor, draws: int) -> Tensor:
    """The images as the network sees them, resized once for all draws."""
    if draws < 1:
        raise BadInput(f"draws={draws}: give at least 1.")
    reference.run.check(images)
    return at_side(images, reference.run.image_shape[-1])
