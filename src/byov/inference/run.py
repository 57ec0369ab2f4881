"""A run in use: its networks, its features of images at the means or at a weight draw, and its reference set.

Features are computed in evaluation mode and without autograd, batch by batch. On a CPU with a few cores, each core
takes separate batches: torch's threads, which share each operation, would wait for each other between any two.
`make bench` has the gain (trick: own threads, forward). Convolutional networks run as a copy with BatchNorm folded
(`backbones/folded_copy.py`). Frozen stages have the same output at every draw: `before_draws` runs them once,
`at_this_draw` the rest. Inside `shared_trunks`, no images pass them twice, in whatever run.

The reference set is unlabelled training images, against which every weight draw is compared. A weight draw moves the
representation of all images together. How it moves the reference images shows how to undo that: `aligned` maps features
at a draw to where the reference set is at the means. Reference features are cached in `RUN/reference/DIGEST/`, one file
per draw. The digest covers the weights and the images, so training further starts a new cache.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from byov._core.cache import Entry, read_entry, write_entry
from byov._core.errors import BadInput
from byov._core.files import read_json, without_prefix
from byov._core.randomness import RandomStream, generator
from byov._core.threads import in_order
from byov.backbones import Encoder
from byov.backbones.folded_copy import inference_copy
from byov.config import Config, check_ranges, merge
from byov.data.sources import open_source
from byov.data.transforms import resized
from byov.posterior import Posterior
from byov.runs import checkpoints
from byov.runs.folder import RunFolder
from byov.runs.split import SPLIT, read_pixels
from byov.training.distributed.processes import Processes
from byov.training.learners import AnyLearner, build_learner
from byov.training.resolve import check_method

BATCH = 128  # images at a time; from 64 to 512 the speed on one core is the same within 8%; memory is not
LEAST = 32  # images per core: with fewer, a forward pass spends its time on calling its operations
FEW = 8  # cores: more would wait for Python's lock, which each operation takes
CACHE_BYTES = 1 << 29  # of reference features per run: 64 draws of 1,000 images at ResNet-50's 2,048 features


# ---------------------------------------------------------------------------------------------------------------- a run


@dataclass(frozen=True)
class Run:
    """A run's networks at its last checkpoint, in evaluation mode."""

    folder: Path
    config: Config
    learner: AnyLearner
    encoder: Posterior
    """A posterior over the encoder: `run.encoder(images)` at the means, `with run.encoder.sampled(): ...` at a draw."""
    step: int
    image_shape: tuple[int, int, int]
    classes: int | None
    fingerprint: str | None = None
    """Of the source's training images (`ImageSet.fingerprint`), as they were then."""
    processes: Processes = field(default_factory=Processes)
    """Those that have opened it together: they share its draws."""

    @property
    def deterministic(self) -> bool:
        """Whether no weight of the encoder is random."""
        return self.encoder.means.numel() == 0

    def features(self, images: Tensor) -> Tensor:
        """Features (N, width) of uint8 or [0, 1] images (N, C, H, W), at the means; other sides are resized first."""
        self.check(images)
        return features_of(self.encoder, images, size=self.image_shape[-1])

    def teacher_encoder(self) -> nn.Module:
        """The teacher's encoder."""
        if self.learner.teacher is None:
            raise BadInput(f"{self.folder} is a {self.config.method} run, which has no teacher: leave out --teacher.")
        return self.learner.teacher.module.get_submodule("encoder")

    def untrained_encoder(self) -> nn.Module:
        """The same encoder with the random weights that its seed gives, whatever --init put in their place."""
        fresh = (
            build_learner(self.config, self.image_shape, self.classes).posterior.unwrapped().get_submodule("encoder")
        )
        fresh.set_pixel_statistics(self.encoder.module.pixel_mean, self.encoder.module.pixel_std)  # type: ignore[operator]
        return fresh

    def check(self, images: Tensor) -> None:
        """Images that are not square, or of other channels than the run's, are bad input."""
        if images.dim() != 4 or images.shape[1] != self.image_shape[0] or images.shape[2] != images.shape[3]:
            raise BadInput(
                f"{self.folder} takes images of shape (N, {', '.join(map(str, self.image_shape))}), or other squares, "
                f"not {tuple(images.shape)}: convert or crop them first."
            )


def load(folder: str | Path, device: str = "cpu", processes: Processes | None = None) -> Run:
    """Opens a run folder, alone or in each of several processes, which then ask for the same draws at the same time.

    In training mode a call would use, and change, BatchNorm's statistics: it is not in it.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise BadInput(f"there is no run {folder}: train one with `byov train`, or check the path.")
    path = RunFolder(folder).checkpoint
    tensors, state = checkpoints.load(path)
    config = merge(Config(), checkpoints.run_state(state, path)["config"], str(path))
    check_ranges(config)
    if config.posterior.where is None or config.method == "auto":  # a saved config is resolved
        raise BadInput(f"the checkpoint {path} is damaged (in config): restore a copy, or train again.")
    check_method(config)
    shape: Any = tuple(state["image_shape"])
    learner = build_learner(config, shape, state["classes"], device)
    learner.posterior.load_tensors(without_prefix(tensors, "student."), str(path))
    if learner.teacher is not None:
        learner.teacher.load_tensors(without_prefix(tensors, "teacher."), str(path))
        learner.teacher.eval()
    encoder = learner.posterior.eval().part("encoder").eval()
    classes, seen = state["classes"], state["fingerprint"]
    return Run(folder, config, learner, encoder, state["step"], shape, classes, seen, processes or Processes())


# ------------------------------------------------------------------------------------------------------------- features


def features_of(
    encoder: nn.Module,
    images: Tensor,
    batch_size: int = BATCH,
    advance: Callable[[int], None] = lambda count: None,
    size: int | None = None,
) -> Tensor:
    """Compute features (N, width), float32, on the CPU, of uint8 or [0, 1] images (N, C, H, W), resized to `size`."""
    if _trunks.get() is not None and has_trunk(encoder):
        before = before_draws(encoder, images, images.shape[-1] if size is None else size, batch_size)
        encoder, images, size = _Part(encoder, "after_trunk"), before, None
    features = torch.cat([part.float().cpu() for part in outputs_of(encoder, images, batch_size, advance, size)])
    bad = int((~features.isfinite().all(1)).sum())
    if bad:
        raise BadInput(
            f"the features of {bad:,} of {len(images):,} images are not finite: the encoder has diverged, or the "
            "images have values that are not finite; check both."
        )
    return features


def before_draws(encoder: nn.Module, images: Tensor, size: int, batch_size: int = BATCH) -> Tensor:
    """Return what does not depend on the draw: activations after frozen stages, or the resized images."""
    if not has_trunk(encoder):
        return resized(images, size)
    folder = _trunks.get()
    path = None if folder is None else folder / f"{_trunk_key(encoder, images, size)}.safetensors"
    if path is not None and (entry := read_entry(path)) is not None:
        return entry.tensors["activations"]
    found = torch.cat(list(outputs_of(_Part(encoder, "trunk"), images, batch_size, size=size)))
    if path is not None:
        write_entry(path, Entry({"activations": found}))
    return found


def at_this_draw(encoder: nn.Module, before: Tensor, batch_size: int = BATCH) -> Tensor:
    """Compute features (N, width), like `features_of`, from what `before_draws` returned."""
    return features_of(_Part(encoder, "after_trunk") if has_trunk(encoder) else encoder, before, batch_size)


_trunks: ContextVar[Path | None] = ContextVar("trunks", default=None)


@contextmanager
def shared_trunks(folder: Path) -> Iterator[None]:
    """Keep the activations after frozen stages in a folder, for all runs with the same stages.

    Many runs on the same images are evaluated in a fraction of the time. The folder grows by 4 bytes per activation of
    each image, and may be deleted at any time.
    """
    token = _trunks.set(folder)
    try:
        yield
    finally:
        _trunks.reset(token)


def _trunk_key(encoder: nn.Module, images: Tensor, size: int) -> str:
    """A digest of what activations after the trunk depend on."""
    inner = _plain(encoder)
    assert isinstance(inner, Encoder)
    sha = hashlib.sha256(f"{inner.frozen_until} {size} {images.dtype} {tuple(images.shape)}".encode())
    frozen = (parameter for parameter in inner.parameters() if not parameter.requires_grad)
    for tensor in (*frozen, *inner.buffers(), images):
        sha.update(tensor.detach().cpu().contiguous().numpy().data)
    return sha.hexdigest()[:32]


def _plain(encoder: nn.Module) -> nn.Module:
    return encoder.module if isinstance(encoder, Posterior) else encoder


def has_trunk(encoder: nn.Module) -> bool:
    """Return whether stages of the encoder are frozen."""
    inner = _plain(encoder)
    return isinstance(inner, Encoder) and inner.has_trunk


class _Part(nn.Module):
    """One of the two parts of an encoder with frozen stages."""

    def __init__(self, encoder: nn.Module, part: str) -> None:
        super().__init__()
        self.encoder = _plain(encoder)
        self.part = part
        self.training = encoder.training

    def forward(self, x: Tensor) -> Tensor:
        return getattr(self.encoder, self.part)(x)  # type: ignore[no-any-return]


def outputs_of(
    network: nn.Module,
    images: Tensor,
    batch_size: int = BATCH,
    advance: Callable[[int], None] = lambda count: None,
    size: int | None = None,
) -> Iterator[Any]:
    """Yield network(batch) for all images, in order; `batch_size` images at a time, at least LEAST per core.

    Do not call it under `autocast`, which does not reach other threads.
    """
    was_training = network.training
    device = next((t.device for t in (*network.buffers(), *network.parameters())), images.device)
    threads = torch.get_num_threads() if device.type == "cpu" else 1
    own = 1 < threads <= FEW and len(images) >= threads * LEAST

    network.eval()
    with torch.no_grad():
        fast = inference_copy(network)

    @torch.no_grad()
    def passed(batch: Tensor) -> tuple[int, Any]:
        batch = batch.to(device)
        return len(batch), fast(batch if size is None else resized(batch, size))

    mine = min(batch_size, max(LEAST, batch_size // threads), -(-len(images) // threads)) if own else batch_size
    try:
        for count, output in (in_order if own else map)(passed, torch.split(images, mine)):
            yield output
            advance(count)
    finally:
        network.train(was_training)


# ---------------------------------------------------------------------------------------------------- the reference set


class Moments(NamedTuple):
    """Mean and standard deviation of every feature over the reference set, float64 (width,)."""

    mean: Tensor
    std: Tensor


class ReferenceFeatures(NamedTuple):
    """The reference set at one weight draw."""

    features: Tensor
    """(reference, width), float32, not aligned."""
    moments: Moments


def moments_of(features: Tensor) -> Moments:
    """Compute the moments of features (images, width)."""
    std, mean = torch.std_mean(features.double(), dim=0, correction=0)
    return Moments(mean, std)


def constant(moments: Moments) -> Tensor:
    """(width,) bool: whether a feature's spread is only rounding."""
    return moments.std <= torch.finfo(torch.float32).eps * moments.mean.abs()


def aligned(features: Tensor, of: Moments, to: Moments) -> Tensor:
    """Map features at a draw where the reference set has the moments `of` to where it has the moments `to`.

    A feature that is constant over the reference set at this draw is only shifted: it has no scale.
    """
    scale = torch.where(constant(of), 1.0, to.std / of.std)
    shift = to.mean - of.mean * scale
    return torch.addcmul(shift.to(features.dtype), features, scale.to(features.dtype))


@contextmanager
def at_draw(posterior: Posterior, seed: int, k: int | None) -> Iterator[None]:
    """Put the posterior at draw `k` of a run, or at its means if None, without autograd.

    The draw depends on (seed, k) alone: not on the images, their batches, or the number of draws.
    """
    with torch.no_grad():
        if k is None:
            yield
        else:
            with posterior.sampled(generator(RandomStream.DRAWS, seed, k)):
                yield


class ReferenceSet:
    """The reference images of a run, their features at each weight draw, and the calibration images.

    Both sets of images are saved with the run. If they were too many, the run's source is opened instead.
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        self._record = self._read()
        self.folder = RunFolder(run.folder).reference / self._digest()
        self._last: tuple[int, ReferenceFeatures] | None = None

    @cached_property
    def means(self) -> ReferenceFeatures:
        """The reference set at the means."""
        return self._at(None)

    def at(self, k: int | None) -> ReferenceFeatures:
        """Return the reference set at draw k, or at the means if None; the last draw stays in memory."""
        if k is None:
            return self.means
        if self._last is None or self._last[0] != k:
            self._last = k, self._at(k)
        return self._last[1]

    def aligned(self, features: Tensor, k: int | None) -> Tensor:
        """Map features at draw k to where the reference set is at the means."""
        return features if k is None else aligned(features, self.at(k).moments, self.means.moments)

    def _at(self, k: int | None) -> ReferenceFeatures:
        def make() -> Tensor:
            with at_draw(self.run.encoder, self.run.config.seed, k):
                return at_this_draw(self.run.encoder, self._before)

        if k is None:
            features = self.cached("means", make)
        else:
            fits = (k + 1) * self.means.features.nbytes <= CACHE_BYTES
            features = self.cached(f"draw-{k:05d}", make) if fits else make()
        return ReferenceFeatures(features, moments_of(features))

    @cached_property
    def _before(self) -> Tensor:
        """The part of the reference images' forward pass that does not depend on the draw."""
        return before_draws(self.run.encoder, self.images, self.run.image_shape[-1])

    def cached(self, name: str, make: Callable[[], Tensor]) -> Tensor:
        """Read a tensor that depends only on the run's weights and its reference set, or make and write it."""
        path = self.folder / f"{name}.safetensors"
        entry = read_entry(path)
        if entry is not None:
            return entry.tensors[name]
        tensor = make()
        if not self.folder.is_dir():
            for stale in self.folder.parent.glob("*/"):
                if stale != self.folder and re.fullmatch("[0-9a-f]{16}", stale.name):
                    shutil.rmtree(stale, ignore_errors=True)
        write_entry(path, Entry({name: tensor}))
        return tensor

    def own(self, images: Tensor) -> Tensor:
        """(images,) int64: the position of each image in the reference set, or -1 if it is not part of it.

        Images are recognised by their pixels, at the side that the network takes.
        """
        return torch.tensor([self._positions.get(key, -1) for key in _keys(images)], dtype=torch.int64)

    @cached_property
    def _positions(self) -> dict[int, int]:
        keys = self.cached("pixels", lambda: torch.tensor(_keys(self.images))).tolist()
        return {key: position for position, key in enumerate(keys)}

    @cached_property
    def images(self) -> Tensor:
        """The reference images, at the side that the network takes."""
        return self._pixels("bank")

    @property
    def has_calibration_images(self) -> bool:
        """Whether the run has set calibration images aside."""
        return bool(self._record["calibration"])

    def calibration_images(self) -> Tensor:
        """Return the images that were neither trained on nor are in the reference set, as the network takes them."""
        return self._pixels("calibration")

    def same_images(self, other: ReferenceSet) -> bool:
        """Return whether another run has the same reference and calibration images, in the same order."""
        return all(self._record[key] == other._record[key] for key in ("fingerprint", "bank", "calibration"))

    def _pixels(self, part: str) -> Tensor:
        images = read_pixels(self.run.folder, part)
        if images is None:
            images = _source_images(self.run, self._record["fingerprint"])[torch.tensor(self._record[part]).long()]
        return resized(images, self.run.image_shape[-1])

    def _read(self) -> dict[str, Any]:
        """The content of `reference/images.json`; the reference set is called `bank` there."""
        path = RunFolder(self.run.folder).reference_images
        try:
            record: dict[str, Any] = read_json(path)
            if not record["bank"] or not isinstance(record["calibration"], list) or "fingerprint" not in record:
                raise ValueError("an entry is missing")
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise BadInput(f"{path} is missing or damaged ({error}): restore it, or train the run again.") from error
        return record

    def _digest(self) -> str:
        """Of all that features depend on: weights, images, seed, and the kind of device that generates the noise."""
        run, record = self.run, self._record
        sha = hashlib.sha256(json.dumps([record["fingerprint"], record["bank"], record["calibration"]]).encode())
        sha.update(f"{run.config.seed} {run.image_shape} {run.encoder.means.device.type}".encode())
        for posterior in (run.encoder, run.learner.posterior):  # the first is a copy of a part of the second
            for name, tensor in posterior.tensors().items():
                sha.update(name.encode() + tensor.cpu().contiguous().numpy().tobytes())
        return sha.hexdigest()[:16]


def _keys(images: Tensor) -> list[int]:
    """A hash of each image's pixels, uint8 or in [0, 1]; 64 bits, signed, as a tensor holds them."""
    pixels = images if images.dtype == torch.uint8 else (images * 255).round().to(torch.uint8)
    hashes = (hashlib.blake2b(image.tobytes(), digest_size=8) for image in pixels.cpu().contiguous().numpy())
    return [int.from_bytes(each.digest(), "little", signed=True) for each in hashes]


def _source_images(run: Run, fingerprint: str | None) -> Tensor:
    """The images of the run's source, uint8; bad input if they are not those it was trained on."""
    data = open_source(run.config.data, run.config.image_size).load(SPLIT)
    if fingerprint is not None and data.fingerprint() != fingerprint:
        raise BadInput(
            f"the images of {run.config.data} have changed since {run.folder} was trained, and its reference set is "
            "part of them: restore them."
        )
    return data.images
