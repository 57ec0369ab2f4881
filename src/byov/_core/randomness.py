"""Keyed random numbers: the same key gives the same numbers, independent of what ran before.

A key is a tuple of integers, such as (seed, epoch, image). Because of keys, a resumed run is bit-equal to one that was
never stopped, two processes equal one, and the number of threads does not change the result.

Two kinds of numbers come from a key:
- `uniforms`: a few numbers for each of many images, by a counter-based hash, on the device of the images.
- `normal_`: many normal numbers for the weights, in fixed chunks, each from a separate generator. For float32 weights
  on a CPU, `_compiled` makes the same numbers in a compiled loop.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum

import torch
from torch import Tensor

from byov._core.threads import for_each

CHUNK = 1 << 16  # numbers per chunk: 256 KiB of float32 stay in the second-level cache between passes over them

_MASK64 = (1 << 64) - 1
GAMMA = 0x9E3779B97F4A7C15  # splitmix64's increment: 2^64 / golden ratio
MIX = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))  # splitmix64's two rounds: shift, multiplier


class RandomStream(IntEnum):
    """What random numbers are for: the first part of a key, so that no two uses share numbers.

    A stored run depends on these values: never change one. Functions that take a separate seed (bootstraps, shifts,
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
    PRIOR = 7
    """Draws from the prior, for the margin that is logged."""
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
    """Convert to the int64 with the same 64 bits."""
    value &= _MASK64
    return value - (1 << 64) if value >> 63 else value


def fold(*key: int) -> int:
    """Fold a key into one 63-bit seed, by splitmix64's finaliser once per integer."""
    state = 0
    for part in key:
        state = (state ^ (part & _MASK64)) + GAMMA & _MASK64
        for shift, multiplier in MIX:
            state = (state ^ (state >> shift)) * multiplier & _MASK64
        state ^= state >> 31
    return state >> 1


def folds(keys: Iterable[tuple[int, ...]], device: torch.device | str = "cpu") -> Tensor:
    """Fold each key, into an int64 tensor."""
    return torch.tensor([_signed(fold(*key)) for key in keys], device=device)


def chunk_generator(seed: int, chunk: int) -> torch.Generator:
    """Make the generator for a chunk of a draw.

    torch uses only 32 bits of a seed on a CPU. Seeds count up, so no two chunks of a draw share them. Two draws share
    some if their seeds are closer than their number of chunks: for 2.7M weights about 4 pairs in 20,000 draws, each
    with a part of its noise, at other weights. More bits would have to be mixed into the generator's state per chunk.
    """
    return torch.Generator().manual_seed((seed + chunk) & 0xFFFFFFFF)


def generator(*key: int, device: torch.device | str = "cpu") -> torch.Generator:
    """Make a new torch generator for a key."""
    return torch.Generator(device=device).manual_seed(fold(*key))


def permutation(count: int, *key: int) -> Tensor:
    """Draw a random order of `count` items."""
    return torch.randperm(count, generator=generator(*key))


def _mix(state: Tensor) -> Tensor:
    """Apply splitmix64's finaliser to int64 tensors; `>>` is arithmetic there, so the sign bits are masked off."""
    for shift, multiplier in (*MIX, (31, 1)):
        state = state ^ ((state >> shift) & (_MASK64 >> shift))
        state = state * _signed(multiplier)
    return state


def uniforms(ids: Tensor, count: int, *key: int) -> Tensor:
    """Draw uniform numbers in [0, 1): row i depends only on `ids[i]` and the key, not on the rest of the batch.

    Returns a (len(ids), count) float32 tensor on the device of `ids`.
    """
    return hashed_uniforms(ids, _signed(fold(*key)), count)


def hashed_uniforms(ids: Tensor, seed: Tensor | int, count: int) -> Tensor:
    """Draw as `uniforms` does, for a folded key, or for one per row: an int64 tensor from `folds`."""
    rows = _mix(ids.to(torch.int64) * _signed(GAMMA) + seed)
    columns = torch.arange(1, count + 1, device=ids.device, dtype=torch.int64) * _signed(GAMMA)
    bits = _mix(rows[:, None] + columns[None, :])
    return ((bits >> 40) & 0xFFFFFF).to(torch.float32) * 2.0**-24  # the top 24 bits: all that a float32 holds


def normal_(out: Tensor, seed: int) -> Tensor:
    """Fill a flat tensor with N(0, 1) in place; seeds must differ by more than the tensor's number of chunks.

    On a CPU this uses our own threads: torch makes normal numbers on one core. (Draws of float32 weights: `_compiled`.)
    """
    if out.device.type != "cpu":
        return out.normal_(generator=generator(seed, device=out.device))

    def chunk(start: int) -> None:
        out[start : start + CHUNK].normal_(generator=chunk_generator(seed, start // CHUNK))

    for_each(chunk, range(0, out.numel(), CHUNK))
    return out
