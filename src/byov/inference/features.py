"""What a network makes of many images, in evaluation mode and without autograd, batch by batch.

On a CPU with a few cores each core takes batches of its own: torch's threads, which share each operation, wait for each
other between any two. `make bench` has the gain (trick: own threads, forward). Convolutional networks are passed as a
copy with BatchNorm folded (`backbones/folded_copy.py`).

Frozen stages make the same of an image at every draw: `before_draws` passes them once, `at_this_draw` the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from byov._core.threads import in_order
from byov.backbones import Encoder
from byov.backbones.folded_copy import inference_copy
from byov.data.transforms import resized
from byov.posterior import Posterior

BATCH = 128  # images at a time; from 64 to 512 the speed on one core is the same within 8%; memory is not
LEAST = 32  # images of a core's own batch: below, the time of a forward is that of its operations' calls
FEW = 8  # cores: more than these would wait for Python's lock, which each of a forward's operations takes


def features_of(
    encoder: nn.Module,
    images: Tensor,
    batch_size: int = BATCH,
    advance: Callable[[int], None] = lambda count: None,
    size: int | None = None,
) -> Tensor:
    """Features (N, width) on the CPU, in float32, of uint8 or [0, 1] images (N, C, H, W), first brought to `size`."""
    return torch.cat([part.float().cpu() for part in outputs_of(encoder, images, batch_size, advance, size)])


def before_draws(encoder: nn.Module, images: Tensor, size: int, batch_size: int = BATCH) -> Tensor:
    """What of images does not depend on the draw: activations after frozen stages, or the images at their size."""
    if not has_trunk(encoder):
        return resized(images, size)
    return torch.cat(list(outputs_of(_Part(encoder, "trunk"), images, batch_size, size=size)))


def at_this_draw(encoder: nn.Module, before: Tensor, batch_size: int = BATCH) -> Tensor:
    """Features (N, width), as `features_of` gives them, from what `before_draws` gave."""
    return features_of(_Part(encoder, "after_trunk") if has_trunk(encoder) else encoder, before, batch_size)


def has_trunk(encoder: nn.Module) -> bool:
    """Whether stages of the encoder are frozen."""
    inner = encoder.module if isinstance(encoder, Posterior) else encoder
    return isinstance(inner, Encoder) and inner.has_trunk


class _Part(nn.Module):
    """One of the two parts of an encoder with a trunk."""

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
    """network(batch) of all images, in their order; `batch_size` images are under way at a time, but LEAST a core.

    Whether a caller's `autocast` counts hangs on the threads: leave it out.
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
