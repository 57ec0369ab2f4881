"""All randomness is keyed, so nothing carries state: same key, same numbers, whatever ran before.

A key is a tuple of integers, such as (seed, epoch, image). Keys make a resumed run bit-equal to one never stopped,
make two processes equal one, and keep the number of threads out of the result.

Two kinds of numbers come from a key:
- `uniforms`: a few numbers for each of many images, by a counter-based hash, on the images' own device.
- `normal_`: many normal numbers for the weights, in fixed chunks, each from a generator of its own; `_compiled` makes
  those of float32 weights on a CPU, by a compiled loop, from the same chunks and generators.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum

import torch
from torch import Tensor

from byov._core.threads import for_each

CHUNK = 1 << 16  # numbers a chunk: 256 KiB of float32 stay in the second-level cache between the passes over them

_MASK64 = (1 << 64) - 1
GAMMA = 0x9E3779B97F4A7C15  # splitmix64's increment: 2^64 / golden ratio
MIX = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))  # splitmix64's two rounds: shift, multiplier


class RandomStream(IntEnum):
    """What random numbers are for: the first part of a key, so that no two uses share numbers.

    A stored run depends on these values: never change one. Functions that take a seed of their own (bootstraps, shifts,
    the probe's held-out images, random pruning) use that seed as the first part instead.
    """

    INIT = 0
    """Initial weights."""
    ORDER = 1
    """Order of the training images in an epoch."""
    VIEWS = 2
    """Augmentation of the training images."""
    NOISE = 3
    """Draws of the weights while training."""
    DROPOUT = 4
    """Dropout masks."""
    SIGNS = 5
    """Per-image signs of flipout."""
    DRAWS = 6
    """Draws of the weights of a trained run."""
    SPLIT = 10
    """Split of a source into training and calibration images; the second part of a key that begins with ORDER."""
    CLASS_LISTS = 11
    """Labelled images per class in few-label evaluations."""
    SHUFFLED_SIGMA = 12
    """Shuffled sigmas of the SNR ablation."""
    ENCODER_CHECK = 13
    """Views that the label-free encoder check looks up."""
    LOSS_SCORE = 29
    """Views whose loss is compared with the scores (`benchmarks/scores.py`)."""


def _signed(value: int) -> int:
    """The int64 with the same 64 bits."""
    value &= _MASK64
    return value - (1 << 64) if value >> 63 else value


def fold(*key: int) -> int:
    """Folds a key into one 63-bit seed: splitmix64's finaliser, once an integer."""
    state = 0
    for part in key:
        state = (state ^ (part & _MASK64)) + GAMMA & _MASK64
        for shift, multiplier in MIX:
            state = (state ^ (state >> shift)) * multiplier & _MASK64
        state ^= state >> 31
    return state >> 1


def folds(keys: Iterable[tuple[int, ...]], device: torch.device | str = "cpu") -> Tensor:
    """The folded keys as an int64 tensor."""
    return torch.tensor([_signed(fold(*key)) for key in keys], device=device)


def chunk_generator(seed: int, chunk: int) -> torch.Generator:
    """A generator for a chunk of a draw.

    torch's looks at 32 bits of a seed on a CPU. Counted up, no two chunks of a draw share them. Two draws do where
    their seeds are nearer than they have chunks: of 2.7M weights some 4 pairs in 20,000 draws, each with a part of its
    noise, at other weights. More bits would have to be mixed into the generator's state, chunk by chunk.
    """
    return torch.Generator().manual_seed((seed + chunk) & 0xFFFFFFFF)


def generator(*key: int, device: torch.device | str = "cpu") -> torch.Generator:
    """A fresh torch generator for this key."""
    return torch.Generator(device=device).manual_seed(fold(*key))


def permutation(count: int, *key: int) -> Tensor:
    """A random order of `count` things."""
    return torch.randperm(count, generator=generator(*key))


def _mix(state: Tensor) -> Tensor:
    """splitmix64's finaliser on int64 tensors; `>>` is arithmetic there, so the sign bits are masked off."""
    for shift, multiplier in (*MIX, (31, 1)):
        state = state ^ ((state >> shift) & (_MASK64 >> shift))
        state = state * _signed(multiplier)
    return state


def uniforms(ids: Tensor, count: int, *key: int) -> Tensor:
    """Uniform numbers in [0, 1): row i depends on `ids[i]` and the key alone, not on the batch around it.

    Returns a (len(ids), count) float32 tensor on the device of `ids`.
    """
    return hashed_uniforms(ids, _signed(fold(*key)), count)


def hashed_uniforms(ids: Tensor, seed: Tensor | int, count: int) -> Tensor:
    """As `uniforms`, for a folded key; or one for each row, an int64 tensor of `folds`."""
    rows = _mix(ids.to(torch.int64) * _signed(GAMMA) + seed)
    columns = torch.arange(1, count + 1, device=ids.device, dtype=torch.int64) * _signed(GAMMA)
    bits = _mix(rows[:, None] + columns[None, :])
    return ((bits >> 40) & 0xFFFFFF).to(torch.float32) * 2.0**-24  # the top 24 bits: all that a float32 holds


def normal_(out: Tensor, seed: int) -> Tensor:
    """Fills a flat tensor with N(0, 1), in place; seeds must be further apart than a tensor has chunks.

    On a CPU over threads of our own: torch makes normal numbers on one core. (Draws of float32 weights: `_compiled`.)
    """
    if out.device.type != "cpu":
        return out.normal_(generator=generator(seed, device=out.device))

    def chunk(start: int) -> None:
        out[start : start + CHUNK].normal_(generator=chunk_generator(seed, start // CHUNK))

    for_each(chunk, range(0, out.numel(), CHUNK))
    return out
