"""Cached views of a frozen trunk: its activations for a few augmented views per image, computed once.

A frozen trunk gives the same activations for the same view in every epoch, in student and teacher, and it is most of
the encoder's cost. So `views.cached` views per image, half for each of BYOL's two views, pass it once. Every epoch then
reads a pair of activations per image; which pair depends only on the epoch. Supervised methods read the first of it.

The activations are a float16 file in `RUN/cache/`, mapped into memory. A JSON file next to it describes what they
depend on, and a digest of the file, which is checked when a run resumes. It is written last, so that an incomplete
cache is ignored; a damaged one is made again. The cache is removed when the run finishes. Runs with the same views may
share one, in a separate folder (`--view-caches`), where it stays.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import math
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from byov._core.callbacks import Progress
from byov._core.errors import BadInput
from byov._core.files import free_space, read_json, write_atomically, write_json
from byov._core.randomness import RandomStream, fold
from byov._core.threads import in_order
from byov.backbones import Encoder
from byov.backbones.folded_copy import inference_copy
from byov.config import Config, to_dict
from byov.data.views import view
from byov.runs.folder import RunFolder

FILE, ABOUT = "views.f16", "views.json"
BATCH = 64  # images per pass through the trunk, on one core


class Description(NamedTuple):
    """What a cache holds."""

    digest: str
    """Digest of everything that the activations depend on."""
    shape: tuple[int, ...]
    """Views, images, and the shape of one view's activations in the file."""
    channels_last: bool
    """Whether the latter is (height, width, channels), as the trunk returned it: the next layers run faster."""

    @property
    def bytes(self) -> int:
        return 2 * math.prod(self.shape)


@dataclass(frozen=True)
class ViewCache:
    """The activations of views 0 to M - 1 of every image: even numbers are BYOL's first view, odd ones the second."""

    file: Path
    description: Description

    def pair(self, ids: Tensor, epoch: int) -> tuple[Tensor, Tensor]:
        """Return the two views of images in an epoch, float16."""
        first, second = pair_of(epoch, self.description.shape[0] // 2)
        return self.view(2 * first, ids), self.view(2 * second + 1, ids)

    def view(self, number: int, ids: Tensor) -> Tensor:
        """Return one view of images. The file is mapped per call: pages of a lasting map would count as memory."""
        mapped = np.memmap(self.file, np.float16, "r", shape=self.description.shape)
        read = torch.from_numpy(mapped[number, ids.numpy()])
        return read.movedim(-1, 1) if self.description.channels_last else read


def pair_of(epoch: int, half: int) -> tuple[int, int]:
    """Return the first and second view of an epoch: all pairs in turn, each view equally often."""
    return epoch % half, (epoch + epoch // half) % half


# ------------------------------------------------------------------------------------------------------- what it holds


def check(config: Config, encoder: Encoder, out: Path | None = None) -> None:
    """Refuse, before anything is written, if there is no trunk or no space for the cache of the run `out`."""
    if not config.views.cached:
        return
    if not (encoder.has_trunk and encoder.frozen_statistics):
        raise BadInput(
            "views.cached needs a trunk with frozen weights and statistics: give --model.frozen-until (not for timm's "
            "models), or --views.cached 0."
        )
    if out is not None:
        _check_space(RunFolder(out).view_cache, 2 * math.prod(_shape_and_order(config, encoder)[0]))


def describe(config: Config, encoder: Encoder, fingerprint: str, trained: Tensor | None) -> Description:
    """Describe a run's cache; `fingerprint` is that of the source's images, `trained` the indices of those used."""
    weights = hashlib.sha256()
    frozen = {name: p for name, p in encoder.named_parameters() if not p.requires_grad}
    for name, tensor in {**frozen, **dict(encoder.named_buffers())}.items():
        weights.update(name.encode() + tensor.detach().cpu().contiguous().numpy().tobytes())
    which = b"" if trained is None else trained.numpy().tobytes()
    depends_on = {
        "weights": weights.hexdigest(),
        "until": encoder.frozen_until,
        "images": fingerprint,
        "trained": hashlib.sha256(which).hexdigest(),
        "views": to_dict(config.views),
        "image_size": config.image_size,
        "seed": config.seed,
    }
    digest = hashlib.sha256(json.dumps(depends_on, sort_keys=True).encode()).hexdigest()
    return Description(digest, *_shape_and_order(config, encoder))


@torch.no_grad()
def _shape_and_order(config: Config, encoder: Encoder) -> tuple[tuple[int, ...], bool]:
    assert config.images is not None, "resolve the config first"
    one = encoder.trunk(encoder.pixel_mean.new_zeros((1, *encoder.image_shape)))
    last = one.ndim == 4 and not one.is_contiguous() and one.is_contiguous(memory_format=torch.channels_last)
    return (config.views.cached, config.images, *(one.movedim(1, -1) if last else one).shape[1:]), last


# ------------------------------------------------------------------------------------------------------ making, opening


def folder_of(run: Path, description: Description, shared: Path | None) -> Path:
    """Return where a cache is: in the run's folder, or below the folder that runs share."""
    return RunFolder(run).view_cache if shared is None else shared / description.digest[:16]


def make(
    run: Path,
    config: Config,
    encoder: Encoder,
    description: Description,
    pixels: Callable[[Tensor], Tensor],
    progress: Progress = lambda what, done, total: None,
    shared: Path | None = None,
) -> None:
    """Make a run's cache if it has none; `pixels` returns training images. Another cache in its place is a BadInput.

    Of runs that share a cache, one makes it, and the others wait.
    """
    folder = folder_of(run, description, shared)
    with alone_in(folder) if shared is not None else nullcontext():
        if (about := _about(folder)) is not None:
            if about.description != description:
                raise BadInput(f"{folder} holds views of other weights, images or settings: delete that folder.")
            progress("checking the cached views", 0, 0)
            with (folder / FILE).open("rb") as file:
                if hashlib.file_digest(file, "sha256").hexdigest() == about.content:
                    return
            for name in (ABOUT, FILE):
                (folder / name).unlink()
        _check_space(folder, description.bytes)
        _write(folder, config, encoder, description, pixels, progress)


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Wait until no other process on this machine is in the block for the same folder."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # released when the file is closed, also by a kill
        yield


def _write(
    folder: Path,
    config: Config,
    encoder: Encoder,
    description: Description,
    pixels: Callable[[Tensor], Tensor],
    progress: Progress,
) -> None:
    content = hashlib.sha256()

    def write(path: Path) -> None:
        done, total = 0, math.prod(description.shape[:2])
        what = f"caching {description.shape[0]} views of {description.shape[1]:,} images"
        progress(what, done, total)
        with path.open("wb") as file:
            for part in _activations(config, encoder, pixels, description):
                numbers = part.numpy().tobytes()
                file.write(numbers)
                content.update(numbers)
                progress(what, done := done + len(part), total)

    write_atomically(folder / FILE, write)
    write_json(folder / ABOUT, description._asdict() | {"content": content.hexdigest()})


def open_cache(run: Path, description: Description, shared: Path | None = None) -> ViewCache:
    """Open the cache that `make` has made."""
    folder = folder_of(run, description, shared)
    about = _about(folder)
    if about is None or about.description != description:
        raise BadInput(f"{folder} cannot be read here: all processes must share the disk of the run.")
    return ViewCache(folder / FILE, description)


def remove_cache(run: Path) -> None:
    """Remove a run's own cache: it is large, and can be made again."""
    shutil.rmtree(RunFolder(run).view_cache, ignore_errors=True)


class _About(NamedTuple):
    description: Description
    content: str
    """SHA-256 of the file of views."""


def _about(folder: Path) -> _About | None:
    """Return what a folder holds; None if it is not a complete cache."""
    try:
        about = read_json(folder / ABOUT)
        description = Description(about["digest"], tuple(about["shape"]), about["channels_last"])
        whole = (folder / FILE).stat().st_size == description.bytes
        return _About(description, about["content"]) if whole else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _check_space(folder: Path, needed: int) -> None:
    free = free_space(folder)
    if needed > free:
        gib = 2**30
        raise BadInput(
            f"the cached views need {needed / gib:,.1f} GiB in {folder}, where {free / gib:,.1f} are free: "
            "free some space, or start a run with fresh views, which is slower: --views.cached 0."
        )


def _activations(
    config: Config, encoder: Encoder, pixels: Callable[[Tensor], Tensor], description: Description
) -> Iterator[Tensor]:
    """Yield all of view 0, batch by batch, then all of view 1, and so on; on a CPU each core computes other batches."""
    fast, seed = cast(Encoder, inference_copy(encoder)), fold(RandomStream.VIEWS, config.seed)
    size, dtype = encoder.image_shape[-1], encoder.pixel_mean.dtype
    batches = torch.split(torch.arange(description.shape[1]), BATCH)

    @torch.no_grad()
    def passed(item: tuple[int, Tensor]) -> Tensor:
        number, ids = item
        kind, settings = number % 2, (config.views.first, config.views.second)[number % 2]
        images = view(pixels(ids), ids, settings, size, seed, number // 2, kind)
        activations = fast.trunk(images.to(dtype))
        return (activations.movedim(1, -1) if description.channels_last else activations).to(torch.float16).cpu()

    items = ((number, ids) for number in range(config.views.cached) for ids in batches)
    for part in (in_order if encoder.pixel_mean.device.type == "cpu" else map)(passed, items):
        if not bool(part.isfinite().all()):
            raise BadInput(
                f"the activations after {encoder.frozen_until} are beyond float16: train with --views.cached 0."
            )
        yield part
