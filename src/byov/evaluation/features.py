"""What a network makes of many images, in evaluation mode and without autograd, batch by batch.

On a CPU with a few cores each core takes batches of its own: torch's threads, which share each operation, wait for each
other between any two. `make bench` has the gain (trick: own threads, forward).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from byov.data.resample import resized
from byov.parallel import in_order

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

    @torch.no_grad()
    def passed(batch: Tensor) -> tuple[int, Any]:
        batch = batch.to(device)
        return len(batch), network(batch if size is None else resized(batch, size))

    mine = min(batch_size, max(LEAST, batch_size // threads), -(-len(images) // threads)) if own else batch_size
    network.eval()
    try:
        for count, output in (in_order if own else map)(passed, torch.split(images, mine)):
            yield output
            advance(count)
    finally:
        network.train(was_training)
