"""What a command will take, estimated before it begins: memory, time and disk.

Networks are built on torch's `meta` device, where tensors have shapes but no memory. A pass through such a network
tells how much autograd stores. Estimated memory is that of the whole process, and within a factor of two of what was
measured (tests/training/test_estimate.py). Time is measured: a few passes of a real network, times their number.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from byov._core import memory
from byov._core.errors import BadInput
from byov.backbones import build_encoder
from byov.config import SUPERVISED, Config, Model
from byov.runs.split import MOST_PIXELS
from byov.training.learners import Classifier, Student

Shape = tuple[int, int, int]

LIBRARIES = 600 << 20  # of a process that has loaded torch, numba and the rest, and the two cores' allocators
NUMBER = 4  # bytes
SAVING = 2  # a checkpoint is written from a copy of all its tensors
TIMED = 32  # images
EXPORT_SECONDS = 30
BATCH, CHUNK, REFERENCE = 128, 2048, 5000  # images of a pass, of a chunk that is scored, and kept with a run at most


@dataclass(frozen=True)
class Estimate:
    """What a command will take."""

    memory: float
    """Bytes, at its peak."""
    disk: float
    """Bytes that are written."""
    seconds: float | None = None
    """None: not estimated."""

    def __str__(self) -> str:
        said = f"estimate: {memory.in_gib(self.memory)} of memory, {memory.in_gib(self.disk)} on disk"
        return said if self.seconds is None else f"{said}, {duration(self.seconds)}"

    def check(self, advice: str) -> None:
        """Raise BadInput if there is not enough memory."""
        free = memory.available()
        there = 0 if free is None else free + memory.resident()
        if free is not None and self.memory > there:
            raise BadInput(
                f"this takes about {memory.in_gib(self.memory)} of memory, and {memory.in_gib(there)} are there: "
                f"{advice}."
            )


def duration(seconds: float) -> str:
    """Say a duration in words."""
    if seconds < 90:
        return "about a minute or less on this machine"
    if seconds < 5400:
        return f"about {seconds / 60:.0f} minutes on this machine"
    if seconds < 2e5:
        return f"about {seconds / 3600:,.0f} hours on this machine"
    return f"about {seconds / 86400:,.0f} days on this machine"


class NetworkSize(NamedTuple):
    """A network's size, from its shapes alone."""

    weights: int
    """Numbers in its parameters and buffers."""
    random: int
    """Those of the parameters that are trained, and random where the method has a posterior."""
    stored: int
    """Bytes per image that autograd stores in a pass."""
    largest: int
    """Bytes per image of the largest layer's input and output, which a pass without autograd holds."""
    features: int
    """Numbers that the encoder gives per image."""


def network_size(config: Config, shape: Shape) -> NetworkSize:
    """Measure the network that a resolved config trains, for images of this shape, without building it."""
    return _network_size(config.model, config.method, shape)


@lru_cache(8)
def _network_size(model: Model, method: str, shape: Shape) -> NetworkSize:
    with torch.device("meta"), torch.random.fork_rng(devices=[]):
        encoder = build_encoder(model, shape)
        network: nn.Module = Student(encoder, model)
        if method in SUPERVISED:
            network = Classifier(encoder, 1)
        elif method == "posthoc":
            network = encoder
        images = torch.zeros(2, *shape)  # two: BatchNorm needs them
    try:
        return _measured(network, encoder.features, images)
    except Exception:  # a model of timm that looks at values, which `meta` has not: only its weights are known
        weights = sum(tensor.numel() for tensor in (*network.parameters(), *network.buffers()))
        return NetworkSize(weights, weights, 0, 0, encoder.features)


def _measured(network: nn.Module, features: int, images: Tensor) -> NetworkSize:
    stored: dict[int, torch.UntypedStorage] = {}
    largest = 0

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        stored[storage._cdata] = storage
        return tensor

    def passed(module: nn.Module, inputs: tuple[object, ...], output: object) -> None:
        nonlocal largest
        tensors = [t for t in (*inputs, output) if isinstance(t, Tensor)]
        largest = max(largest, sum(t.nbytes for t in tensors))

    for module in network.modules():
        module.register_forward_hook(passed)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        network(images)
    own = {parameter.untyped_storage()._cdata for parameter in network.parameters()}
    every = [*network.parameters(), *network.buffers()]
    return NetworkSize(
        sum(tensor.numel() for tensor in every),
        sum(parameter.numel() for parameter in network.parameters() if parameter.requires_grad),
        sum(storage.nbytes() for key, storage in stored.items() if key not in own) // 2,
        largest // 2,
        features,
    )


def training(config: Config, shape: Shape, images: int, in_memory: bool, world: int = 1) -> Estimate:
    """Estimate what training a resolved config takes, but not its time.

    `shape` is that of the images as they are stored, `in_memory` whether they are not mapped from a file.
    """
    side = config.image_size or shape[1]
    seen = (shape[0], side, side)
    size = network_size(config, seen)
    batch = -(-config.optim.batch_size // (config.optim.accumulate * world))
    bayesian = config.posterior.where != "none"
    # Per trained number: mean (and log-variance), gradient, two moments of Adam each; the draw and its gradient.
    numbers = size.weights + size.random * (8 if bayesian else 3)
    if config.method in ("byov", "byol"):
        numbers += size.weights + (size.random if bayesian else 0)  # the teacher, and where the prior's variance is
    wide = 2 if config.precision == "64-true" else 1
    state = wide * NUMBER * numbers
    views = 2 if config.method in ("byov", "byol") else 1
    passes = wide * batch * (views * size.stored + size.largest)
    pixels = batch * (views * NUMBER * 3 * side**2 * shape[0] + shape[0] * shape[1] * shape[2])
    taken = LIBRARIES + SAVING * state + passes + pixels
    if in_memory:
        taken += images * shape[0] * shape[1] * shape[2]
    if config.method == "posthoc":
        taken = LIBRARIES + SAVING * state + 128 * size.largest + images * shape[0] * side**2
    kept = state + min(MOST_PIXELS, min(images, 5000) * shape[0] * side**2)
    return Estimate(taken, kept)


def use(
    config: Config, shape: Shape, checkpoint: Path, images: int, stored: Shape, in_memory: bool, passes: float
) -> Estimate:
    """Estimate what measuring or scoring images with a run takes; each image passes its encoder `passes` times.

    `shape` is that of the images as the network takes them, `stored` as the source stores them.
    """
    size, saved = network_size(config, shape), checkpoint.stat().st_size
    features = NUMBER * size.features
    pixels = shape[0] * shape[1] * shape[2]
    taken = LIBRARIES + 2 * saved + 6 * NUMBER * size.weights + BATCH * torch.get_num_threads() * size.largest
    taken += REFERENCE * (2 * pixels + 4 * features)
    if in_memory:
        taken += images * (stored[0] * stored[1] * stored[2] + pixels + 6 * features)  # a probe's copies, for example
    else:
        taken += CHUNK * (2 * pixels + 2 * features)
    disk = images * (features + 100) + 8 * REFERENCE * features
    return Estimate(taken, disk, images * passes * seconds_per_image(config, shape))


def seconds_per_image(config: Config, shape: Shape) -> float:
    """Measure the seconds that an image takes to pass the encoder, without gradients, on the threads in use."""
    encoder = build_encoder(replace(config.model, frozen_until=None), shape).eval()
    images, took = torch.zeros(TIMED, *shape), []
    with torch.inference_mode():
        for _ in range(3):  # the first one includes start-up costs
            begun = time.perf_counter()
            encoder(images)
            took.append(time.perf_counter() - begun)
    return min(took[1:]) / TIMED


def training_seconds(config: Config, shape: Shape) -> float:
    """Estimate the seconds of a training run: passes of student and teacher; a backward pass takes two forward."""
    assert config.images is not None, "resolve the config first"
    if config.method == "posthoc":
        return 20 * config.images * seconds_per_image(config, shape)  # a few draws per guess of sigma
    passes = 3 if config.method in SUPERVISED else 8
    return config.optim.epochs * config.images * passes * seconds_per_image(config, shape)
