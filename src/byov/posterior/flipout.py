"""Flipout (Wen et al., 2018): every image of a batch sees the draw with its own random signs.

For one draw w = mean + delta, image n uses mean + delta * (r_n s_n^T) with random signs r_n, s_n. The delta of a
Gaussian is symmetric and independent over weights, so each image's weights keep their distribution while the gradients
of a batch decorrelate. It costs a second product in each Linear and convolution; other parameters (norms, biases,
positions) keep the shared draw. The first dimension of a layer's input must be the batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from byov.posterior.segments import CONVOLUTIONS


def _signs(like: Tensor, batch: int, features: int, dim: int, rng: torch.Generator) -> Tensor:
    """Draw random signs of shape (batch, 1, .., features, .., 1)."""
    shape = [batch] + [1] * (like.dim() - 1)
    shape[dim] = features
    return torch.randint(0, 2, shape, generator=rng, device=like.device).to(like.dtype).mul_(2).sub_(1)


def _linear(layer: nn.Linear, mean: Tensor, rng: torch.Generator, x: Tensor) -> Tensor:
    s = _signs(x, len(x), layer.in_features, x.dim() - 1, rng)
    r = _signs(x, len(x), layer.out_features, x.dim() - 1, rng)
    return F.linear(x, mean, layer.bias) + F.linear(x * s, layer.weight - mean) * r


def _convolution(layer: nn.Conv2d, mean: Tensor, rng: torch.Generator, x: Tensor) -> Tensor:
    s = _signs(x, len(x), layer.in_channels, 1, rng)
    r = _signs(x, len(x), layer.out_channels, 1, rng)
    at_mean: Tensor = layer._conv_forward(x, mean, layer.bias)
    delta: Tensor = layer._conv_forward(x * s, layer.weight - mean, None)
    return at_mean + delta * r


def _can_flip(layer: nn.Module) -> bool:
    """Accept only torch's own Linear and convolutions: a subclass may use its weight in another way."""
    own = "forward" in layer.__dict__
    return not own and type(layer).forward in [kind.forward for kind in (nn.Linear, *CONVOLUTIONS)]


@contextmanager
def flipped(means: Mapping[nn.Module, Tensor], rng: torch.Generator) -> Iterator[None]:
    """Use per-image signs in the layers of `means` (layer -> mean of its weight) inside the block."""
    layers = [layer for layer in means if _can_flip(layer)]
    for layer in layers:
        forward = _linear if isinstance(layer, nn.Linear) else _convolution
        layer.forward = partial(forward, layer, means[layer], rng)  # type: ignore[arg-type]
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward  # restores the forward of the class
