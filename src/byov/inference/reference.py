"""A run's reference bank: unlabelled training images that every weight draw is seen against.

A draw moves the representation of all images together. What it does to the bank says how, so that it can be undone:
`aligned` brings features of a draw back to where the bank is at the means. Bank features are kept in
`RUN/reference/DIGEST/`, a file a draw; the digest is of weights and bank, so that a run trained further starts anew.
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
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from byov._core.errors import BadInput
from byov._core.files import write_atomically
from byov._core.randomness import RandomStream, generator
from byov.data.resample import resized
from byov.data.sources import open_source
from byov.inference.features import at_this_draw, before_draws
from byov.inference.load import Run
from byov.posterior import Posterior
from byov.runs.folder import RunFolder
from byov.runs.split import SPLIT, read_pixels

CACHE_BYTES = 1 << 29  # bytes of bank features kept for a run: 64 draws of 1,000 images at ResNet-50's 2,048 features


class Moments(NamedTuple):
    """Mean and standard deviation of every feature over the bank, float64 (width,)."""

    mean: Tensor
    std: Tensor


class ReferenceFeatures(NamedTuple):
    """What a draw makes of the bank."""

    features: Tensor
    """(bank, width), float32, as they come."""
    moments: Moments


def moments_of(features: Tensor) -> Moments:
    """The moments of features (images, width)."""
    std, mean = torch.std_mean(features.double(), dim=0, correction=0)
    return Moments(mean, std)


def constant(moments: Moments) -> Tensor:
    """(width,) bool: whether only rounding is left of a feature's spread."""
    return moments.std <= torch.finfo(torch.float32).eps * moments.mean.abs()


def aligned(features: Tensor, of: Moments, to: Moments) -> Tensor:
    """Features of a draw at which the bank has the moments `of`, brought to where it has the moments `to`.

    A feature that is constant over the bank at this draw is only shifted: there is no scale to go by.
    """
    scale = torch.where(constant(of), 1.0, to.std / of.std)
    shift = to.mean - of.mean * scale
    return torch.addcmul(shift.to(features.dtype), features, scale.to(features.dtype))


@contextmanager
def at_draw(posterior: Posterior, seed: int, k: int | None) -> Iterator[None]:
    """The posterior at draw `k` of a run, or at its means if None; without autograd.

    The draw hangs on (seed, k) alone: not on the images, on their batches, or on how many draws there are.
    """
    with torch.no_grad():
        if k is None:
            yield
        else:
            with posterior.sampled(generator(RandomStream.DRAWS, seed, k)):
                yield


class ReferenceSet:
    """The reference bank of a run as its draws see it, and the calibration images beside it.

    Its images are kept with the run; only where they are not (too many), the source is opened.
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        self._told = self._read()
        self.folder = RunFolder(run.folder).reference / self._digest()
        self._last: tuple[int, ReferenceFeatures] | None = None

    # ------------------------------------------------------------------------------------------------------- features

    @cached_property
    def means(self) -> ReferenceFeatures:
        """The bank at the means."""
        return self._at(None)

    def at(self, k: int | None) -> ReferenceFeatures:
        """The bank at draw k, or at the means if None; the last draw stays in memory."""
        if k is None:
            return self.means
        if self._last is None or self._last[0] != k:
            self._last = k, self._at(k)
        return self._last[1]

    def aligned(self, features: Tensor, k: int | None) -> Tensor:
        """Features of draw k, brought to where the bank is at the means."""
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
        """What of the bank's images does not depend on the draw."""
        return before_draws(self.run.encoder, self.images, self.run.image_shape[-1])

    def cached(self, name: str, make: Callable[[], Tensor]) -> Tensor:
        """A tensor that hangs on the run's weights and its reference images alone: read, or made and written."""
        path = self.folder / f"{name}.safetensors"
        try:
            return load_file(path)[name]
        except (OSError, SafetensorError, KeyError):  # not there, or a half of it
            tensor = make().contiguous()
        if not self.folder.is_dir():
            for stale in self.folder.parent.glob("*/"):
                if stale != self.folder and re.fullmatch("[0-9a-f]{16}", stale.name):
                    shutil.rmtree(stale, ignore_errors=True)
        write_atomically(path, lambda temporary: save_file({name: tensor}, temporary))
        return tensor

    def own(self, images: Tensor) -> Tensor:
        """(images,) int64: where in the bank an image stands that is a part of it, -1 for any other.

        Told by pixels, as the network sees them: of a bank image and its copies one is theirs.
        """
        return torch.tensor([self._places.get(key, -1) for key in _keys(images)], dtype=torch.int64)

    @cached_property
    def _places(self) -> dict[int, int]:
        keys = self.cached("pixels", lambda: torch.tensor(_keys(self.images))).tolist()
        return {key: place for place, key in enumerate(keys)}

    # --------------------------------------------------------------------------------------------------------- images

    @cached_property
    def images(self) -> Tensor:
        """The bank's images, as the network sees them."""
        return self._pixels("bank")

    @property
    def calibrates(self) -> bool:
        """Whether there are calibration images."""
        return bool(self._told["calibration"])

    def calibration_images(self) -> Tensor:
        """Images that were neither trained on nor are in the bank, as the network sees them."""
        return self._pixels("calibration")

    def _pixels(self, part: str) -> Tensor:
        images = read_pixels(self.run.folder, part)
        if images is None:
            whole = source_images(self.run, self._told["fingerprint"])
            images = whole[torch.tensor(self._told[part], dtype=torch.int64)]
        return resized(images, self.run.image_shape[-1])

    def _read(self) -> dict[str, Any]:
        """Read `reference/images.json`."""
        path = RunFolder(self.run.folder).reference_images
        try:
            told: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            if not told["bank"] or not isinstance(told["calibration"], list) or "fingerprint" not in told:
                raise ValueError("something is missing")
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise BadInput(f"{path} is missing or damaged ({error}): restore a copy, or train again.") from error
        return told

    def _digest(self) -> str:
        """Of all that features hang on: the weights, the images, the seed, and the kind of device that makes noise."""
        run, told = self.run, self._told
        sha = hashlib.sha256(json.dumps([told["fingerprint"], told["bank"], told["calibration"]]).encode())
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


def source_images(run: Run, fingerprint: str | None) -> Tensor:
    """The images of the run's source, uint8; if they are not those it was trained on, that is bad input."""
    data = open_source(run.config.data, run.config.image_size).load(SPLIT)
    if fingerprint is not None and data.fingerprint() != fingerprint:
        raise BadInput(
            f"the images of {run.config.data} are not those that {run.folder} was trained on, of which some are its "
            "reference bank: put them back."
        )
    return data.images
