"""Outputs of a network for many images, in evaluation mode and without autograd, batch by batch.

On a CPU with a few cores, each core takes separate batches: torch's threads, which share each operation, would wait for
each other between any two. `make bench` has the gain (trick: own threads, forward). Convolutional networks run as a
copy with BatchNorm folded (`backbones/folded_copy.py`).

Frozen stages have the same output at every draw: `before_draws` runs them once, `at_this_draw` the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from byov._core.errors import BadInput
from byov._core.threads import in_order
from byov.backbones import Encoder
from byov.backbones.folded_copy import inference_copy
from byov.data.transforms import resized
from byov.posterior import Posterior

BATCH = 128  # images at a time; from 64 to 512 the speed on one core is the same within 8%; memory is not
LEAST = 32  # images per core: with fewer, a forward pass spends its time on calling its operations
FEW = 8  # cores: more would wait for Python's lock, which each operation takes


def features_of(
    encoder: nn.Module,
    images: Tensor,
    batch_size: int = BATCH,
    advance: Callable[[int], None] = lambda count: None,
    size: int | None = None,
) -> Tensor:
    """Compute features (N, width), float32, on the CPU, of uint8 or [0, 1] images (N, C, H, W), resized to `size`."""
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
    return torch.cat(list(outputs_of(_Part(encoder, "trunk"), images, batch_size, size=size)))


def at_this_draw(encoder: nn.Module, before: Tensor, batch_size: int = BATCH) -> Tensor:
    """Compute features (N, width), like `features_of`, from what `before_draws` returned."""
    return features_of(_Part(encoder, "after_trunk") if has_trunk(encoder) else encoder, before, batch_size)


def has_trunk(encoder: nn.Module) -> bool:
    """Return whether stages of the encoder are frozen."""
    inner = encoder.module if isinstance(encoder, Posterior) else encoder
    return isinstance(inner, Encoder) and inner.has_trunk


class _Part(nn.Module):
    """One of the two parts of an encoder with frozen stages."""

    def __init__(self, encoder: nn.Module, part: str) -> None:
        super().__init__()
        self.encoder = encoder.module if isinstance(encoder, Posterior) else encoder
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
