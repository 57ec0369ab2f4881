"""Loops over the weights of a posterior, compiled by numba when first called (numba brings its own compiler and keeps
what it made): each is one pass over memory. numpy float32 in and out; `fused.py` calls them with torch's tensors.

The noise is that of `torch.Tensor.normal_` with a CPU generator, number by number up to rounding: MT19937's stream, 24
bits a uniform number, Box-Muller on the halves of every 16. torch makes it by scalar code; here every step is a loop
that the compiler turns into vector instructions: a draw takes 2.1 ns a weight on one core, where torch's operations,
chunk by chunk, take 5.2 (AMD EPYC with AVX-512).

numba makes int64 of int32 + int32, and vectors of half the width with it: hence all the I(...) and U(...).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

import numba
import numpy as np

from byov._compiled.disk_cache import DiskCache

Function = TypeVar("Function", bound=Callable[..., Any])

OPTIONS: dict[str, Any] = {"nogil": True, "fastmath": {"contract"}, "error_model": "numpy"}

STATE, SHIFT = 624, 397  # MT19937: Matsumoto and Nishimura (1998)
STAY = STATE - SHIFT
GROUP = 16  # numbers that torch's normal_ makes at a time: 8 radii, then 8 angles
BLOCK = 1024  # terms of a sum that wait in the cache

F, I, U = np.float32, np.int32, np.uint32  # noqa: E741
ROUND = F(1.5 * 2**23)  # x + ROUND - ROUND is x rounded to a whole number


def compiled(function: Function) -> Function:
    """The function compiled, kept on disk where a folder for that can be written, run without Python's lock.

    Multiplications and additions may be contracted, never reordered. A division by zero is no error: checked, no loop
    with a division would be vectorised.
    """
    kernel = numba.njit(function, **OPTIONS)
    with suppress(RuntimeError):  # neither this folder nor the user's cache can be written
        kernel._cache = DiskCache(function)
    return kernel  # type: ignore[no-any-return]


def inlined(function: Function) -> Function:
    """A part of a loop's body."""
    return numba.njit(function, inline="always")  # type: ignore[no-any-return]


# -------------------------------------------------------------------------------------------------- uniform numbers


@inlined
def _twisted(word: Any, following: Any) -> Any:
    mixed = U(U(word & U(0x80000000)) | U(following & U(0x7FFFFFFF)))
    return U(U(mixed >> U(1)) ^ U(U(0x9908B0DF) & U(U(0) - U(following & U(1)))))


@inlined
def _uniform(word: Any) -> Any:
    """MT19937's tempering, and the lower 24 bits as a number in [0, 1)."""
    word = U(word ^ U(word >> U(11)))
    word = U(word ^ U(U(word << U(7)) & U(0x9D2C5680)))
    word = U(word ^ U(U(word << U(15)) & U(0xEFC60000)))
    word = U(word ^ U(word >> U(18)))
    return F(I(U(word & U(0xFFFFFF)))) * F(2.0**-24)


@compiled
def _start(state: Any, seed: Any) -> None:
    state[0] = U(seed)
    for k in range(1, STATE):
        before = state[k - 1]
        state[k] = U(U(U(1812433253) * U(before ^ U(before >> U(30)))) + U(k))


@compiled
def _advance(old: Any, new: Any) -> None:
    """The next state, from one array to another and in three loops: within each, nothing depends on what it wrote."""
    for k in range(STAY):
        new[k] = old[k + SHIFT] ^ _twisted(old[k], old[k + 1])
    for k in range(STAY, 2 * STAY):
        new[k] = new[k - STAY] ^ _twisted(old[k], old[k + 1])
    for k in range(2 * STAY, STATE - 1):
        new[k] = new[k - STAY] ^ _twisted(old[k], old[k + 1])
    new[STATE - 1] = new[SHIFT - 1] ^ _twisted(old[STATE - 1], new[0])


@compiled
def _uniforms(state: Any, out: Any) -> None:
    for k in range(STATE):
        out[k] = _uniform(state[k])


# --------------------------------------------------------------------------------------------- functions of a number
# Polynomials of Cephes (Moshier), in float32: within 2 units in the last place.


@inlined
def _exp(x: Any) -> Any:
    """e^x: 0 below the least normal number (a pruned weight has log-variance -inf), inf from 88.3 on."""
    low, high = x < F(-87.3), x > F(88.3)
    x = F(-87.3) if low else (F(88.3) if high else x)
    power = F(F(x * F(1.44269504) + ROUND) - ROUND)
    x = x - power * F(0.693359375)
    x = x - power * F(-2.12194440e-4)
    y = F(1.9875691500e-4)
    y = y * x + F(1.3981999507e-3)
    y = y * x + F(8.3334519073e-3)
    y = y * x + F(4.1665795894e-2)
    y = y * x + F(1.6666665459e-1)
    y = y * x + F(5.0000001201e-1)
    y = (y * (x * x) + x + F(1)) * I(I(I(power) + I(127)) << I(23)).view(np.float32)
    return F(0) if low else (F(np.inf) if high else y)


@inlined
def _log(x: Any) -> Any:
    """The logarithm of a positive number that is not denormal."""
    bits = F(x).view(np.int32)
    power = F(I(I(bits >> I(23)) - I(126)))
    x = I(I(bits & I(0x007FFFFF)) | I(0x3F000000)).view(np.float32)  # in [1/2, 1)
    small = x < F(0.707106781)
    power = power - (F(1) if small else F(0))
    x = (x + x if small else x) - F(1)
    square = x * x
    y = F(7.0376836292e-2)
    y = y * x + F(-1.1514610310e-1)
    y = y * x + F(1.1676998740e-1)
    y = y * x + F(-1.2420140846e-1)
    y = y * x + F(1.4249322787e-1)
    y = y * x + F(-1.6668057665e-1)
    y = y * x + F(2.0000714765e-1)
    y = y * x + F(-2.4999993993e-1)
    y = y * x + F(3.3333331174e-1)
    y = y * x * square + power * F(-2.12194440e-4) - F(0.5) * square
    return x + y + power * F(0.693359375)


@inlined
def _cos_sin(turns: Any) -> Any:
    """Cosine and sine of an angle in turns, in [0, 1): by its distance to the nearest quarter."""
    quarter = F(F(turns * F(4) + ROUND) - ROUND)
    x = (turns - quarter * F(0.25)) * F(6.283185307)
    square = x * x
    sine = ((F(-1.9515295891e-4) * square + F(8.3321608736e-3)) * square + F(-1.6666654611e-1)) * square * x + x
    cosine = (F(2.443315711809948e-5) * square + F(-1.388731625493765e-3)) * square + F(4.166664568298827e-2)
    cosine = cosine * square * square - F(0.5) * square + F(1)
    quarters = I(quarter)
    odd = I(quarters & I(1)) != I(0)
    x, y = (sine if odd else cosine), (cosine if odd else sine)
    x = -x if I(I(quarters + I(1)) & I(2)) != I(0) else x
    y = -y if I(quarters & I(2)) != I(0) else y
    return x, y


# ----------------------------------------------------------------------------------------------------------- a draw


@compiled
def _box_muller(first: Any, second: Any) -> None:
    """Pairs of uniform numbers become pairs of normal ones."""
    for k in range(len(first)):
        radius = math.sqrt(F(-2) * _log(F(1) - first[k]))
        cosine, sine = _cos_sin(second[k])
        first[k] = radius * cosine
        second[k] = radius * sine


@compiled
def _normals(noise: Any, first: Any, second: Any) -> None:
    """Uniform numbers become normal ones, in place: of every 16 the first 8 are radii, the others angles."""
    half = GROUP // 2
    for k in range(STATE // GROUP):
        for j in range(half):
            first[k * half + j] = noise[k * GROUP + j]
            second[k * half + j] = noise[k * GROUP + half + j]
    _box_muller(first, second)
    for k in range(STATE // GROUP):
        for j in range(half):
            noise[k * GROUP + j] = first[k * half + j]
            noise[k * GROUP + half + j] = second[k * half + j]


@compiled
def _perturb(out: Any, means: Any, log_variances: Any, noise: Any) -> None:
    for k in range(len(out)):
        out[k] = means[k] + _exp(F(0.5) * log_variances[k]) * noise[k]


@compiled
def draw(out: Any, means: Any, log_variances: Any, seed: Any, chunk: Any) -> None:
    """out = mean + sigma * noise, each chunk with a separate stream, seeded by `seed` counted up.

    As torch does, a chunk that is no multiple of 16 has its last 16 numbers drawn again. (torch has another way for a
    chunk of less than 16: these alone differ.)
    """
    state, following = np.empty(STATE, np.uint32), np.empty(STATE, np.uint32)
    noise = np.empty(STATE, np.float32)
    first, second = np.empty(STATE // 2, np.float32), np.empty(STATE // 2, np.float32)
    for start in range(0, len(out), chunk):
        stop = min(start + chunk, len(out))
        _start(state, seed + start // chunk)
        for block in range(start, stop, STATE):
            _advance(state, following)
            state, following = following, state
            _uniforms(state, noise)
            _normals(noise, first, second)
            end = min(block + STATE, stop)
            _perturb(out[block:end], means[block:end], log_variances[block:end], noise)
        if stop - start > GROUP and (stop - start) % GROUP:
            place = (stop - start) % STATE
            for k in range(GROUP):
                if place == STATE:
                    _advance(state, following)
                    state, following = following, state
                    place = 0
                noise[k] = _uniform(state[place])
                place += 1
            _normals(noise, first, second)  # of all 624, for which the numbers after the 16 do not count
            last = stop - GROUP
            _perturb(out[last:stop], means[last:stop], log_variances[last:stop], noise)


@compiled
def to_log_variances(out: Any, weights: Any, means: Any, gradient: Any) -> None:
    """out = (weight - mean) / 2 * gradient."""
    for k in range(len(out)):
        out[k] = (weights[k] - means[k]) * (F(0.5) * gradient[k])


# -------------------------------------------------------------------------------------- variances from the curvature


@compiled
def observe(squares: Any, gradient: Any, to_log_variances: Any, rate: Any) -> Any:
    """squares += rate * (gradient^2 - squares). Returns the sum of `to_log_variances`."""
    total = 0.0
    for start in range(0, len(squares), BLOCK):
        stop = min(start + BLOCK, len(squares))
        for k in range(start, stop):
            squares[k] += rate * (gradient[k] * gradient[k] - squares[k])
        total += _sum(to_log_variances[start:stop])
    return total


@compiled
def _precisions(precisions: Any, own: Any, squares: Any, factor: Any) -> None:
    for k in range(len(own)):
        precisions[k] = own[k] + factor * squares[k]


@compiled
def settle(log_variances: Any, squares: Any, variance0: Any, least: Any, factor: Any) -> Any:
    """log_variances = -log(1 / v + factor * squares), except pruned ones; v is `variance0`, at least `least`.

    Returns the sum of sigma^2 / v, pruned weights included.
    """
    precisions, own = np.empty(BLOCK, np.float32), np.full(BLOCK, F(1) / least)
    total = 0.0
    for start in range(0, len(log_variances), BLOCK):
        stop = min(start + BLOCK, len(log_variances))
        n = stop - start
        if len(variance0):
            for k in range(n):
                own[k] = F(1) / (least if variance0[start + k] < least else variance0[start + k])
        _precisions(precisions[:n], own[:n], squares[start:stop], factor)
        for k in range(n):
            now = log_variances[start + k]
            log_variances[start + k] = now if now < F(-1000) else -_log(precisions[k])
            precisions[k] = own[k] / precisions[k]
        total += _sum(precisions[:n])
    return total


# ---------------------------------------------------------------------------------------------------------------- KL


@numba.njit(nogil=True, fastmath={"contract", "reassoc"})  # reordered, or it would be one addition after another
def _sum(values: Any) -> Any:
    total = F(0)
    for k in range(len(values)):
        total += values[k]
    return total


# A loop over more than some five arrays is not vectorised: too many that might overlap.


@compiled
def _away(away: Any, means: Any, mean0: Any) -> None:
    for k in range(len(away)):
        away[k] = means[k] - mean0[k]


@compiled
def _terms(terms: Any, variances: Any, away: Any, log_variances: Any, precision0: Any, log_variance0: Any) -> None:
    for k in range(len(terms)):
        v = _exp(log_variances[k])
        variances[k] = v
        terms[k] = (away[k] * away[k] + v) * precision0 - F(1) - (log_variances[k] - log_variance0)


@compiled
def _rescale(away: Any, variances: Any, terms: Any, variance0: Any, least: Any) -> None:
    """From a prior of variance 1 to one of variance `variance0`: the terms, and what the gradients are made of."""
    for k in range(len(away)):
        v0 = least if variance0[k] < least else variance0[k]
        square = away[k] * away[k] + variances[k]
        away[k], variances[k] = away[k] / v0, variances[k] / v0
        terms[k] += square / v0 - square + _log(v0)


@compiled
def _gradients(to_means: Any, to_log_variances: Any, away: Any, variances: Any, precision0: Any, scale: Any) -> None:
    for k in range(len(away)):
        to_means[k] += scale * precision0 * away[k]
        to_log_variances[k] += F(0.5) * scale * (variances[k] * precision0 - F(1))


@compiled
def kl(
    means: Any,
    log_variances: Any,
    mean0: Any,
    variance0: Any,
    least: Any,
    to_means: Any,
    to_log_variances: Any,
    scale: Any,
) -> Any:
    """Twice KL[q || N(mean0, diag(variance0))]; adds scale * the KL's gradient to `to_means` and `to_log_variances`.

    `least` is the least variance of the prior. An empty `mean0` is 0, an empty `variance0` is `least`, and for empty
    gradients there are none: one kind of arguments, so that numba compiles, and keeps, one loop for all priors.
    """
    terms, variances, gaps = np.empty(BLOCK, np.float32), np.empty(BLOCK, np.float32), np.empty(BLOCK, np.float32)
    v0 = F(1 if len(variance0) else least)  # its own variances are read later
    precision0, log_variance0, factor = F(1) / v0, _log(v0), F(scale)
    total = 0.0
    for start in range(0, len(means), BLOCK):
        stop = min(start + BLOCK, len(means))
        n = stop - start
        away = means[start:stop]
        if len(mean0) or len(variance0):
            away = gaps[:n]
            away[:] = means[start:stop]
        if len(mean0):
            _away(away, means[start:stop], mean0[start:stop])
        _terms(terms[:n], variances[:n], away, log_variances[start:stop], precision0, log_variance0)
        if len(variance0):
            _rescale(away, variances[:n], terms[:n], variance0[start:stop], F(least))
        total += _sum(terms[:n])
        if len(to_means):
            to_m, to_log_v = to_means[start:stop], to_log_variances[start:stop]
            _gradients(to_m, to_log_v, away, variances[:n], precision0, factor)
    return total
