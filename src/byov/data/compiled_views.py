"""BYOL's views on a CPU, compiled: each image passes all operations in a few buffers that stay in the cache.

The operations are those of `byov.data.transforms`, which is the reference and what GPUs run. On one core the loops take
a fifth of its time at 32 pixels and a sixth at 64. The inner loops run along contiguous rows, which the compiler
vectorises. A padded tap reads beyond its line with weight 0, so buffers start as 0.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from byov._compiled.kernels import compiled
from byov._core import randomness
from byov.data import transforms

# numba caches compiled loops until this file changes, but compiles in constants and functions of other files. A test
# compares this digest with theirs, so that a change there becomes a change here.
ELSEWHERE = "01b6c56ec2e73ae8"

Floats = NDArray[np.float32]

BRIGHTNESS, CONTRAST = transforms.BRIGHTNESS, transforms.CONTRAST
SATURATION, HUE = transforms.SATURATION, transforms.HUE
RED, GREEN, BLUE = (np.float32(share) for share in transforms.LUMA)
CYAN, MAGENTA, YELLOW = (np.float32(turns) for turns in (1 / 2, 5 / 6, 1 / 6))
ZERO, HALF, ONE, TWO, FOUR, SIX = (np.float32(value) for value in (0, 0.5, 1, 2, 4, 6))
BYTE = np.float32(1 / 255)
TINY = np.float32(1e-12)
ROUND = np.float32(3 << 22)  # adding and subtracting it rounds to the nearest integer
NEGLIGIBLE = 1e-9  # smaller blur weights are skipped: below float32's resolution near 1

GAMMA = np.uint64(randomness.GAMMA)
(SHIFT1, MULTIPLIER1), (SHIFT2, MULTIPLIER2), SHIFT3 = (
    *((np.uint64(shift), np.uint64(multiplier)) for shift, multiplier in randomness.MIX),
    np.uint64(31),
)


@compiled
def hash_uniforms(ids: Any, seeds: Any, out: Floats) -> None:
    """Compute `randomness.hashed_uniforms` bit for bit, in 6 us instead of 115 for 256 rows of 33."""
    for i in range(len(ids)):
        row = _mix(np.uint64(ids[i]) * GAMMA + np.uint64(seeds[i]))
        for k in range(out.shape[1]):
            bits = _mix(row + np.uint64(k + 1) * GAMMA) >> np.uint64(40)
            out[i, k] = np.float32(np.int64(bits)) * np.float32(2.0**-24)


@compiled
def _mix(state: Any) -> Any:
    state = (state ^ (state >> SHIFT1)) * MULTIPLIER1
    state = (state ^ (state >> SHIFT2)) * MULTIPLIER2
    return state ^ (state >> SHIFT3)


@compiled
def make_views(out: Floats, images: NDArray[np.uint8], parameters: Any, start: int, stop: int) -> None:
    """Fill the views out[start:stop], shape (N, C, size, size); view i shows image i modulo their number.

    `parameters` is a `views.Parameters` of arrays.
    """
    count, channels, height, width = images.shape
    size, boxes = out.shape[2], parameters.boxes
    taps, reach = max(_taps(height, size), _taps(width, size)), _kernel_size(size) // 2
    first, weights = np.empty(size, np.int64), np.empty((taps, size), np.float32)
    columns = np.zeros((width + taps, channels * height), np.float32)
    resized = np.zeros((size, channels * height), np.float32)
    rows, row = np.zeros((height + taps, channels * size), np.float32), np.zeros(channels * size, np.float32)
    plane, lines = np.empty((size, size), np.float32), np.empty((3, size), np.float32)
    kernel, padded = np.empty(reach + 3, np.float32), np.empty(size + 2 * (reach + 2), np.float32)
    for i in range(start, stop):
        top, left, tall, wide = boxes.top[i], boxes.left[i], boxes.height[i], boxes.width[i]
        if top < 0 or left < 0 or tall < 1 or wide < 1 or top + tall > height or left + wide > width:
            raise ValueError("a box reaches beyond its image")
        for kind in parameters.order[i]:
            if kind < 0 or kind > HUE:
                raise ValueError("an order names an unknown operation")
        view = out[i]
        _columns(images[i % count], top, left, tall, wide, columns)
        used = _filter(wide, size, BYTE, first, weights, lines)
        _resize_columns(columns, first, weights, used, parameters.flip[i], channels * tall, resized)
        _rows(resized, channels, tall, rows)
        used = _filter(tall, size, ONE, first, weights, lines)
        _resize_rows(rows, first, weights, used, row, view)
        _jitter(view, parameters.order[i], parameters.factors[i], lines[0])
        if parameters.grey[i] and channels == 3:
            _grey(view)
        if parameters.blur[i]:
            _blur(view, parameters.sigma[i], kernel, padded, lines[0], plane)
        if parameters.solarise[i]:
            _solarise(view)


# ----------------------------------------------------------------------------------------------------------------- crop


@compiled
def _taps(length: int, size: int) -> int:
    """Count the input pixels per output pixel, rounded up to fours: `_weigh` adds four at a time."""
    return -(-max(length, size) // size) * 4


@compiled
def _filter(length: int, size: int, scale: Any, first: Any, weights: Floats, lines: Floats) -> int:
    """Compute antialiased bicubic weights (taps, size) that sum to `scale`, and the first tap of each output pixel."""
    step = np.float32(length) / np.float32(size)
    stretch = step if step > ONE else ONE
    shrink, end = ONE / stretch, np.float32(length)
    taps = _taps(length, size)
    centre, total, beyond = lines[0], lines[1], lines[2]
    for x in range(size):
        centre[x] = step * (np.float32(x) + HALF)  # in a separate loop: fused with the next, it would round differently
    for x in range(size):
        low = centre[x] - TWO * stretch + HALF
        first[x] = np.int64(low if low > ZERO else ZERO)
        start = np.float32(first[x])
        centre[x], total[x], beyond[x] = centre[x] - start - HALF, ZERO, end - start
    for k in range(taps):
        tap = np.float32(k)
        for x in range(size):
            d = abs(tap - centre[x]) * shrink
            near = (np.float32(1.5) * d - np.float32(2.5)) * d * d + ONE
            far = ((np.float32(-0.5) * d + np.float32(2.5)) * d - FOUR) * d + TWO
            weight = near if d < ONE else (far if d < TWO else ZERO)
            weight = weight if tap < beyond[x] else ZERO
            weights[k, x] = weight
            total[x] += weight
    for x in range(size):
        total[x] = scale / total[x]
    for k in range(taps):
        for x in range(size):
            weights[k, x] *= total[x]
    return taps


@compiled
def _columns(image: NDArray[np.uint8], top: int, left: int, tall: int, wide: int, columns: Floats) -> None:
    """Copy the box, each of its columns to a row that holds all channels one after another."""
    for c in range(image.shape[0]):
        for y in range(tall):
            for x in range(wide):
                columns[x, c * tall + y] = np.float32(image[c, top + y, left + x])


@compiled
def _resize_columns(
    columns: Floats, first: Any, weights: Floats, taps: int, flip: bool, length: int, resized: Floats
) -> None:
    size = len(first)
    for place in range(size):
        x = size - 1 - place if flip else place
        _weigh(columns, first[x], weights, taps, x, resized[place, :length])


@compiled
def _rows(resized: Floats, channels: int, tall: int, rows: Floats) -> None:
    """Transpose columns back to rows, each with all channels side by side."""
    size = len(resized)
    for c in range(channels):
        for y in range(tall):
            for x in range(size):
                rows[y, c * size + x] = resized[x, c * tall + y]


@compiled
def _resize_rows(rows: Floats, first: Any, weights: Floats, taps: int, line: Floats, view: Floats) -> None:
    channels, size = view.shape[0], view.shape[1]
    for y in range(size):
        _weigh(rows, first[y], weights, taps, y, line)
        for c in range(channels):
            for x in range(size):
                view[c, y, x] = _unit(line[c * size + x])


@compiled
def _weigh(lines: Floats, start: int, weights: Floats, taps: int, place: int, out: Floats) -> None:
    """Sum `taps` neighbouring lines, each with its weight."""
    for k in range(0, taps, 4):
        a, b, c, d = weights[k, place], weights[k + 1, place], weights[k + 2, place], weights[k + 3, place]
        line = start + k
        if k == 0:
            for i in range(len(out)):
                out[i] = a * lines[line, i] + b * lines[line + 1, i] + c * lines[line + 2, i] + d * lines[line + 3, i]
        else:
            for i in range(len(out)):
                out[i] += a * lines[line, i] + b * lines[line + 1, i] + c * lines[line + 2, i] + d * lines[line + 3, i]


@compiled
def _unit(value: Any) -> Any:
    """Clamp to [0, 1]."""
    value = value if value > ZERO else ZERO
    return value if value < ONE else ONE


# --------------------------------------------------------------------------------------------------------------- colour


@compiled
def _jitter(view: Floats, order: Any, factors: Floats, line: Floats) -> None:
    """Apply the four operations in the image's order, except those that change nothing."""
    colours = view.shape[0] == 3
    for kind in order:
        factor = factors[kind]
        if kind == BRIGHTNESS and factor != ONE:
            _blend(view, factor, ZERO)
        elif kind == CONTRAST and factor != ONE:
            _blend(view, factor, (ONE - factor) * _mean(view, line))
        elif kind == SATURATION and factor != ONE and colours:
            _saturate(view, factor)
        elif kind == HUE and factor != ZERO and colours:
            _shift_hue(view, factor)


@compiled
def _blend(view: Floats, factor: Any, offset: Any) -> None:
    values = view.reshape(-1)
    for i in range(len(values)):
        values[i] = _unit(factor * values[i] + offset)


@compiled
def _mean(view: Floats, line: Floats) -> Any:
    """Compute the mean grey value, with one sum per column: a single long sum is slow and inexact."""
    channels, height, width = view.shape
    for x in range(width):
        line[x] = ZERO
    for y in range(height):
        if channels == 3:
            for x in range(width):
                line[x] += RED * view[0, y, x] + GREEN * view[1, y, x] + BLUE * view[2, y, x]
        else:
            for x in range(width):
                line[x] += view[0, y, x]
    total = 0.0
    for x in range(width):
        total += line[x]
    return np.float32(total / (height * width))


@compiled
def _saturate(view: Floats, factor: Any) -> None:
    red, green, blue = view[0].reshape(-1), view[1].reshape(-1), view[2].reshape(-1)
    rest = ONE - factor
    for i in range(len(red)):
        r, g, b = red[i], green[i], blue[i]
        grey = rest * (RED * r + GREEN * g + BLUE * b)
        red[i], green[i], blue[i] = _unit(factor * r + grey), _unit(factor * g + grey), _unit(factor * b + grey)


@compiled
def _shift_hue(view: Floats, shift: Any) -> None:
    """Rotate the hue, as `transforms.shift_hue` does."""
    red, green, blue = view[0].reshape(-1), view[1].reshape(-1), view[2].reshape(-1)
    for i in range(len(red)):
        r, g, b = red[i], green[i], blue[i]
        value = r if r > g else g
        value = value if value > b else b
        least = r if r < g else g
        least = least if least < b else b
        chroma = value - least
        sixths = r - g + FOUR * chroma
        sixths = b - r + TWO * chroma if value == g else sixths
        sixths = g - b if value == r else sixths
        hue = sixths / (SIX * (chroma if chroma > TINY else TINY)) + shift
        red[i] = value - chroma * _share(hue - CYAN)
        green[i] = value - chroma * _share(hue - MAGENTA)
        blue[i] = value - chroma * _share(hue - YELLOW)


@compiled
def _share(distance: Any) -> Any:
    """Return the share of the chroma that a channel lacks at this distance (in turns) from its complement."""
    distance -= (distance + ROUND) - ROUND
    return _unit(TWO - SIX * abs(distance))


@compiled
def _grey(view: Floats) -> None:
    red, green, blue = view[0].reshape(-1), view[1].reshape(-1), view[2].reshape(-1)
    for i in range(len(red)):
        grey = RED * red[i] + GREEN * green[i] + BLUE * blue[i]
        red[i] = green[i] = blue[i] = grey


@compiled
def _solarise(view: Floats) -> None:
    values = view.reshape(-1)
    for i in range(len(values)):
        value, inverse = values[i], ONE - values[i]
        values[i] = value if value < inverse else inverse


# ----------------------------------------------------------------------------------------------------------------- blur

_kernel_size = compiled(transforms.blur_kernel_size)


@compiled
def _blur(view: Floats, sigma: Any, kernel: Floats, line: Floats, blurred: Floats, plane: Floats) -> None:
    """Blur by a Gaussian with mirrored borders: down the columns into a line, then along that line."""
    size = view.shape[1]
    reach = _gaussian(sigma, _kernel_size(size) // 2, kernel)
    for c in range(view.shape[0]):
        for y in range(size):
            for x in range(size):
                plane[y, x] = view[c, y, x]
        for y in range(size):
            _blur_down(plane, y, kernel, reach, line)
            _blur_along(line, kernel, reach, size, blurred)
            for x in range(size):
                view[c, y, x] = _unit(blurred[x])  # rounding may exceed 1


@compiled
def _blur_down(plane: Floats, y: int, kernel: Floats, reach: int, line: Floats) -> None:
    """Blur one row down the columns, three pairs of rows at a time, and mirror its ends."""
    size, edge = len(plane), reach + 2
    out, weight = line[edge : edge + size], kernel[0]
    for x in range(size):
        out[x] = weight * plane[y, x]
    for k in range(1, reach + 1, 3):
        a, b, c = _mirror(y - k, size), _mirror(y - k - 1, size), _mirror(y - k - 2, size)
        d, e, f = _mirror(y + k, size), _mirror(y + k + 1, size), _mirror(y + k + 2, size)
        near, middle, far = kernel[k], kernel[k + 1], kernel[k + 2]
        for x in range(size):
            pairs = near * (plane[a, x] + plane[d, x]) + middle * (plane[b, x] + plane[e, x])
            out[x] += pairs + far * (plane[c, x] + plane[f, x])
    for k in range(1, edge + 1):
        line[edge - k] = out[_mirror(k, size)]
        line[edge + size - 1 + k] = out[_mirror(size - 1 + k, size)]


@compiled
def _blur_along(line: Floats, kernel: Floats, reach: int, size: int, out: Floats) -> None:
    """Blur along the line, three pairs of pixels at a time."""
    edge = reach + 2
    centre, weight = line[edge : edge + size], kernel[0]
    for x in range(size):
        out[x] = weight * centre[x]
    for k in range(1, reach + 1, 3):
        left, right = edge - k, edge + k
        a, b, c = line[left : left + size], line[left - 1 : left - 1 + size], line[left - 2 : left - 2 + size]
        d, e, f = line[right : right + size], line[right + 1 : right + 1 + size], line[right + 2 : right + 2 + size]
        near, middle, far = kernel[k], kernel[k + 1], kernel[k + 2]
        for x in range(size):
            out[x] += near * (a[x] + d[x]) + middle * (b[x] + e[x]) + far * (c[x] + f[x])


@compiled
def _mirror(place: int, size: int) -> int:
    place = abs(place)
    return max(0, 2 * (size - 1) - place) if place >= size else place


@compiled
def _gaussian(sigma: Any, most: int, kernel: Floats) -> int:
    """Compute the weights from the centre outwards, then zeros; returns how many pixels they reach."""
    total, reach = 1.0, 0
    kernel[0] = ONE
    for k in range(1, most + 1):
        offset = k / np.float64(sigma)
        weight = math.exp(-0.5 * offset * offset)
        if weight < NEGLIGIBLE:
            break
        kernel[k], reach = weight, k
        total += 2 * weight
    kernel[reach + 1] = kernel[reach + 2] = ZERO
    for k in range(reach + 1):
        kernel[k] /= total
    return reach
