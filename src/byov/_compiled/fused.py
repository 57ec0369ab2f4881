"""Passes over flat float32 tensors on a CPU: each is one compiled loop (`kernels.py`), run over our own threads.

Callers check `fits` first, and use plain torch operations for other devices and dtypes. The tensors are split into
spans of whole chunks of noise, and sums are taken span by span, so the number of threads does not change the result.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import ModuleType

import numpy as np
import torch
from torch import Tensor

from byov._core.randomness import CHUNK
from byov._core.threads import for_each

SPAN = 4 * CHUNK  # weights per unit of work of a thread
ALONE = 1 << 22  # weights below which one thread is as fast as two (0.995x at 2.7M): a draw of them takes 9 ms


def fits(*tensors: Tensor | None) -> bool:
    """Check whether these loops accept the tensors: flat and of one length (compiled loops do not check bounds)."""
    flats = [t for t in tensors if t is not None]
    kind = all(t.device.type == "cpu" and t.dtype == torch.float32 and t.is_contiguous() for t in flats)
    return kind and all(t.ndim == 1 and len(t) == len(flats[0]) for t in flats)


def first_time() -> bool:
    """Check whether numba has cached nothing yet: the first draw and the first views then wait for its compiler."""
    return not any((Path(__file__).parent / "__pycache__").glob("*.nbi"))


@cache
def _kernels() -> ModuleType:
    """Import the kernels at their first use: numba takes a third of a second."""
    from byov._compiled import kernels

    return kernels


def _over_spans(flats: list[Tensor | None], work: Callable[..., object], changed: list[Tensor]) -> None:
    """Call work(number of the span, slice of every flat) for all spans; `changed` are the flats it writes.

    The slices of None are empty.
    """
    if not fits(*flats):
        raise ValueError("compiled loops take flat float32 tensors of one length, on a CPU.")
    nothing = torch.empty(0, dtype=torch.float32, device="cpu")
    arrays = [(nothing if flat is None else flat.detach()).numpy() for flat in flats]
    count = len(arrays[0])

    def span(start: int) -> None:
        work(start // SPAN, *(array[start : start + SPAN] for array in arrays))

    for_each(span, range(0, count, SPAN), threads=1 if count < ALONE else None)
    for flat in changed:  # tell autograd
        if not flat.is_inference():
            torch.autograd.graph.increment_version(flat)


def draw_(out: Tensor, means: Tensor, log_variances: Tensor, seed: int) -> Tensor:
    """Write mean + sigma * noise into `out`; the noise is that of `randomness.chunk_generator`, up to rounding."""
    draw, chunks = _kernels().draw, SPAN // CHUNK

    def span(number: int, *flats: object) -> None:
        draw(*flats, (seed + number * chunks) & 0xFFFFFFFF, CHUNK)

    _over_spans([out, means, log_variances], span, [out])
    return out


def to_log_variances_(out: Tensor, weights: Tensor, means: Tensor, gradient: Tensor) -> Tensor:
    """Write (weight - mean) / 2 * gradient into `out`."""
    kernel = _kernels().to_log_variances
    _over_spans([out, weights, means, gradient], lambda _, *flats: kernel(*flats), [out])
    return out


def observe_(squares: Tensor, gradient: Tensor, to_log_variances: Tensor, rate: float) -> Tensor:
    """Move `squares` towards gradient^2 by `rate`; return the sum of `to_log_variances`."""
    kernel, rate32 = _kernels().observe, np.float32(rate)
    return _summed([squares, gradient, to_log_variances], lambda *flats: kernel(*flats, rate32), [squares])


def settle_(log_variances: Tensor, squares: Tensor, factor: float, variance0: Tensor | None, least: float) -> Tensor:
    """Write -log(1 / v + factor * squares) into the log-variances of weights that are not pruned.

    v is `variance0`, at least `least`, and `least` where `variance0` is None. Returns the sum of sigma^2 / v.
    """
    kernel, least32, factor32 = _kernels().settle, np.float32(least), np.float32(factor)
    flats = [log_variances, squares, variance0]
    return _summed(flats, lambda *parts: kernel(*parts, least32, factor32), [log_variances])


def _summed(flats: list[Tensor | None], kernel: Callable[..., float], changed: list[Tensor]) -> Tensor:
    """Return the sum of what the kernel returns for each span, in a fixed order, whichever thread was first."""
    sums: dict[int, float] = {}

    def span(number: int, *parts: object) -> None:
        sums[number] = kernel(*parts)

    _over_spans(flats, span, changed)
    return torch.tensor(sum(sums[number] for number in sorted(sums)), dtype=torch.float32, device="cpu")


def kl(
    means: Tensor,
    log_variances: Tensor,
    mean0: Tensor | None,
    variance0: Tensor | None,
    least: float,
    gradients: tuple[Tensor, Tensor] | None = None,
    scale: float = 1.0,
) -> Tensor:
    """Compute KL[q || N(mean0, diag(variance0))], and add scale * its gradient to `gradients`.

    `mean0` None is 0; the prior's variances are at least `least`, and all so where `variance0` is None.
    """
    kernel = _kernels().kl
    flats = [means, log_variances, mean0, variance0, *(gradients or (None, None))]
    twice = _summed(
        flats,
        lambda m, log_v, m0, v0, *to: kernel(m, log_v, m0, v0, float(least), *to, float(scale)),
        list(gradients or ()),
    )
    return twice.mul_(0.5)
