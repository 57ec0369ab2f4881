"""Features of images: the encoder at its means, in evaluation mode, batch by batch."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from byov.data.resample import resized


@torch.no_grad()
def features_of(
    encoder: nn.Module,
    images: Tensor,
    batch_size: int = 512,
    advance: Callable[[int], None] = lambda count: None,
    size: int | None = None,
) -> Tensor:
    """Features (N, width) on the CPU, in float32, of uint8 or [0, 1] images (N, C, H, W), first brought to `size`."""
    was_training = encoder.training
    encoder.eval()
    device = next((b.device for b in encoder.buffers()), images.device)
    parts = []
    for batch in torch.split(images, batch_size):
        batch = batch.to(device)
        parts.append(encoder(batch if size is None else resized(batch, size)).float().cpu())
        advance(len(batch))
    encoder.train(was_training)
    return torch.cat(parts)
