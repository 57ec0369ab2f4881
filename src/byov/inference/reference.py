"""The reference set of a run: unlabelled training images, against which every weight draw is compared.

A weight draw moves the representation of all images together. How it moves the reference images shows how to undo that:
`aligned` maps features at a draw to where the reference set is at the means. Reference features are cached in
`RUN/reference/DIGEST/`, one file per draw. The digest covers the weights and the images, so training further starts a
new cache.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from byov._core.cache import Entry, read_entry, write_entry
from byov._core.errors import BadInput
from byov._core.randomness import RandomStream, generator
from byov.data.sources import open_source
from byov.data.transforms import resized
from byov.inference.features import at_this_draw, before_draws
from byov.inference.load import Run
from byov.posterior import Posterior
from byov.runs.folder import RunFolder
from byov.runs.split import SPLIT, read_pixels

CACHE_BYTES = 1 << 29  # of reference features per run: 64 draws of 1,000 images at ResNet-50's 2,048 features


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

    # ------------------------------------------------------------------------------------------------------- features

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

    # --------------------------------------------------------------------------------------------------------- images

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
            record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
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
