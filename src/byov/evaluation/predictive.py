"""The posterior predictive: what the outputs for each image do over weight draws, in memory that is flat in the draws.

Each draw passes all images, so that a draw is one function; it is keyed by the run's seed and its number alone, so
that a long stream may come chunk by chunk, in one call each. Draws are looked at as they come and aligned on the
reference bank, both from the same forward. Work that was stopped goes on after its last saved draw, and the processes
that have opened the run together (`Run.processes`) share the draws.
"""

from __future__ import annotations

import contextlib
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Generic, NamedTuple, Protocol, Self, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from byov._core.callbacks import Progress
from byov._core.errors import BadInput
from byov._core.files import without_prefix, write_atomically
from byov.data.transforms import resized
from byov.evaluation.partial_results import digest
from byov.evaluation.probe import Probe
from byov.inference.features import BATCH, features_of, outputs_of
from byov.inference.reference import Moments, ReferenceSet, aligned, at_draw, moments_of
from byov.metrics.over_draws import OverDraws, Predictive
from byov.posterior import Posterior
from byov.runs.folder import RunFolder
from byov.training.distributed.processes import Processes
from byov.training.networks import Bare, Classifier, Student

LEVELS = {Student: ("encoder", "projector", "predictor"), Classifier: ("encoder", "classifier"), Bare: ("encoder",)}
SAVE_SECONDS = 30.0  # between two saved states of work that can be resumed


class Accumulator(Protocol):
    """What goes over draws: it can be saved, sent, and joined with another over other draws."""

    def merge(self, other: Any) -> Self: ...
    def state(self) -> dict[str, Tensor]: ...
    @classmethod
    def from_state(cls, state: dict[str, Tensor]) -> Self: ...


A = TypeVar("A", bound=Accumulator)
Advance = Callable[[int], None]


@dataclass(frozen=True)
class Pass(ABC, Generic[A]):
    """What is made of images over draws. It can be sent to another process."""

    images: Tensor
    """As the network sees them."""

    @abstractmethod
    def nothing(self) -> dict[str, A]:
        """Before the first draw."""

    @abstractmethod
    def take(self, bank: ReferenceSet, k: int, found: dict[str, A], advance: Advance) -> None:
        """Takes in draw k; `advance` is told of images that have passed."""


# ------------------------------------------------------------------------------------------------ class probabilities


class ClassPredictions(NamedTuple):
    """The class probabilities of all images over the same draws."""

    aligned: Predictive
    unaligned: Predictive


def predict_classes(
    bank: ReferenceSet,
    probe: Probe,
    images: Tensor,
    draws: int,
    *,
    batch_size: int = BATCH,
    resumable: bool = False,
    progress: Progress = lambda what, done, total: None,
) -> ClassPredictions:
    """What a probe that was fitted at the means makes of the draws' features.

    With `resumable`, what is stopped goes on in the next call for the same run, probe and images.
    """
    _check_draws(draws)
    images = _seen(bank, images)
    work = work_key(bank, "classes", images, probe.weights, probe.bias, probe.mean, probe.std) if resumable else None
    return ClassPredictions(**over_draws(bank, draws, _Classes(images, probe, batch_size), work, progress))


@dataclass(frozen=True)
class _Classes(Pass[Predictive]):
    """The pass of `predict_classes`."""

    probe: Probe
    batch_size: int

    def nothing(self) -> dict[str, Predictive]:
        return {name: Predictive(len(self.images), len(self.probe.bias)) for name in ClassPredictions._fields}

    def take(self, bank: ReferenceSet, k: int, found: dict[str, Predictive], advance: Advance) -> None:
        run, probe = bank.run, self.probe
        with at_draw(run.encoder, run.config.seed, k):
            features = features_of(run.encoder, self.images, self.batch_size, advance)
        found["aligned"].update(probe.probabilities(bank.aligned(features, k)))
        found["unaligned"].update(probe.probabilities(features))


# ------------------------------------------------------------------------------------------------------ without labels


class Level(NamedTuple):
    """The outputs of one part of the network over draws."""

    raw: OverDraws
    aligned: OverDraws


def predict_levels(
    bank: ReferenceSet,
    images: Tensor,
    draws: int,
    *,
    batch_size: int = BATCH,
    resumable: bool = False,
    progress: Progress = lambda what, done, total: None,
) -> dict[str, Level]:
    """Mean and variance over draws of the whole network, after its encoder, projector and predictor (or classifier)."""
    _check_draws(draws)
    images, network = _seen(bank, images), bank.run.learner.posterior
    names = LEVELS[type(network.module)]
    outputs = _outputs(network, bank.run.config.seed, None, bank.images[:2], batch_size)
    widths = {name: output.shape[1] for name, output in zip(names, outputs, strict=True)}
    at_means = _level_moments(bank, None, list(widths.values()), batch_size)
    work = work_key(bank, "levels", images) if resumable else None
    found = over_draws(bank, draws, _Levels(images, widths, at_means, batch_size), work, progress)
    return {name: Level(*(found[f"{name}.{kind}"] for kind in Level._fields)) for name in names}


@dataclass(frozen=True)
class _Levels(Pass[OverDraws]):
    """The pass of `predict_levels`."""

    widths: dict[str, int]
    at_means: list[Moments]
    batch_size: int

    def nothing(self) -> dict[str, OverDraws]:
        kinds = [(f"{name}.{kind}", width) for name, width in self.widths.items() for kind in Level._fields]
        return {name: OverDraws(len(self.images), width) for name, width in kinds}

    def take(self, bank: ReferenceSet, k: int, found: dict[str, OverDraws], advance: Advance) -> None:
        at_k = _level_moments(bank, k, list(self.widths.values()), self.batch_size)
        outputs = _outputs(bank.run.learner.posterior, bank.run.config.seed, k, self.images, self.batch_size, advance)
        for name, output, of, to in zip(self.widths, outputs, at_k, self.at_means, strict=True):
            found[f"{name}.raw"].update(output)
            found[f"{name}.aligned"].update(aligned(output, of, to))


def _level_moments(bank: ReferenceSet, k: int | None, widths: list[int], batch_size: int) -> list[Moments]:
    """The moments over the bank of each level's outputs at draw k, kept as one small tensor."""

    def make() -> Tensor:
        outputs = _outputs(bank.run.learner.posterior, bank.run.config.seed, k, bank.images, batch_size)
        return torch.cat([torch.stack(moments_of(output)) for output in outputs], dim=1)

    both = bank.cached("levels-means" if k is None else f"levels-{k:05d}", make)
    return [Moments(*part) for part in torch.split(both, widths, dim=1)]


def _outputs(
    network: Posterior,
    seed: int,
    k: int | None,
    images: Tensor,
    batch_size: int,
    advance: Advance = lambda count: None,
) -> list[Tensor]:
    """What each level gives out at draw k, in evaluation mode: on the CPU, in float32."""
    with at_draw(network, seed, k):
        parts = [[level.float().cpu() for level in out] for out in outputs_of(network, images, batch_size, advance)]
    return [torch.cat(level) for level in zip(*parts, strict=True)]


# -------------------------------------------------------------------------------------------- over draws and processes


def over_draws(bank: ReferenceSet, draws: int, asked: Pass[A], work: str | None, progress: Progress) -> dict[str, A]:
    """Takes in this process's draws, from the last saved one on; joins the parts of all processes of the run.

    Process r of w takes the draws r, r + w, ...; `work` names the file for what has been done.
    """
    processes = bank.run.processes
    bare = replace(asked, images=asked.images.new_empty(0))  # they are sent apart
    processes.call((bank.run.folder, bank.folder.name, draws, bare, work), asked.images)
    mine = range(processes.rank, draws, processes.world)
    found, images = asked.nothing(), len(asked.images)
    path = None
    done = 0
    if work is not None:
        path = (
            RunFolder(bank.run.folder).results / "partial" / f"{work}-{processes.rank}-of-{processes.world}.safetensors"
        )
        found, done = _read_partial(path, found, len(mine))
    seen = done * images

    def advance(count: int) -> None:
        nonlocal seen
        seen += count
        progress(f"passing {images:,} images through {len(mine)} draws", seen, len(mine) * images)

    saved = time.monotonic()
    for k in mine[done:]:
        asked.take(bank, k, found, advance)
        done += 1
        if path is not None and time.monotonic() - saved >= SAVE_SECONDS:
            write_atomically(path, partial(_write_partial, found, done))
            saved = time.monotonic()
    found = _joined(found, done > 0, processes)
    if path is not None and processes.main:
        for each in path.parent.glob(f"{work}-*-of-*.safetensors"):  # of all processes, however many they once were
            each.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # of another evaluation there may be more in it
            path.parent.rmdir()
    return found


def _write_partial(found: dict[str, A], done: int, path: Path) -> None:
    tensors = {f"{name}/{key}": value for name, a in found.items() for key, value in a.state().items()}
    save_file(tensors, path, metadata={"done": str(done)})


def _read_partial(path: Path, nothing: dict[str, A], most: int) -> tuple[dict[str, A], int]:
    """What was done before, and how many draws that is; nothing if there is no file, or one with too many draws."""
    try:
        with safe_open(path, framework="pt") as file:
            done = int(file.metadata()["done"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError):
        return nothing, 0
    if done > most:
        return nothing, 0
    return {name: type(a).from_state(without_prefix(tensors, f"{name}/")) for name, a in nothing.items()}, done


def _joined(found: dict[str, A], any_draws: bool, processes: Processes) -> dict[str, A]:
    """All processes' parts in one; of processes that are led, the first has it, and the others nothing."""
    if processes.world == 1:
        return found
    whole: dict[str, A] = {}
    for states in processes.in_turn({name: a.state() for name, a in found.items()} if any_draws else {}):
        for name, state in states.items():
            part = type(found[name]).from_state(state)
            whole[name] = whole[name].merge(part) if name in whole else part
    return whole


def work_key(bank: ReferenceSet, what: str, *tensors: Tensor) -> str:
    """A name for the work on these tensors with these weights."""
    return f"{what}-{bank.folder.name}-{digest(*tensors)}"


def _seen(bank: ReferenceSet, images: Tensor) -> Tensor:
    """The images as the network sees them, resized once for all draws."""
    bank.run.check(images)
    return resized(images, bank.run.image_shape[-1])


def _check_draws(draws: int) -> None:
    if draws < 1:
        raise BadInput(f"draws={draws}: give at least 1.")
