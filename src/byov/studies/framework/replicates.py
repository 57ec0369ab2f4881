"""Bootstrap replicates in a row: a few hundred bytes of text per measure, so that seeds can be compared on resamples.

A replicate is the measure on one resample of the test images. All runs of a study resample the same images, so the
covariance of two seeds' replicates is what the choice of images does to both. A column `NAME.replicates` holds their
deviations from their mean in units of `NAME.error`, rounded to 1/32, one byte each.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping

import numpy as np
from torch import Tensor

from byov.metrics.resampling import standard_errors

REPLICATES = ".replicates"
STEP = 1 / 32  # adds 1 part in 10,000 to the variance; a byte reaches to 4 standard errors


def packed(replicates: Tensor) -> str:
    """Pack replicates (resamples,) as text."""
    error = float(replicates.std())
    z = (replicates - replicates.mean()) / error if error > 0 else replicates * 0
    codes = (z / STEP).round().clamp(-127, 127).nan_to_num(0)
    return base64.b85encode(codes.numpy().astype(np.int8).tobytes()).decode()


def unpacked(text: str) -> list[float]:
    """Return the deviations in standard errors."""
    codes = np.frombuffer(base64.b85decode(text), np.int8)
    found: list[float] = (codes * STEP).tolist()
    return found


def errors_and_replicates(found: Mapping[str, Tensor]) -> dict[str, float | str]:
    """Return the columns `NAME.error` and `NAME.replicates` of every statistic."""
    errors = {f"{name}.error": error for name, error in standard_errors(found).items()}
    return errors | {f"{name}{REPLICATES}": packed(values) for name, values in found.items()}
