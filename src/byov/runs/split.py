"""The split of a source: the images trained on, the reference set among them, and the calibration set.

One fixed random order of the source's images decides, the same for every seed and method. The first images are trained
on, and the very first of these are the reference set. The last are the calibration set, which is never trained on. If
only a part of the source is trained on, the calibration images come from the rest.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple, cast

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from byov._core.files import write_atomically, write_json
from byov._core.randomness import RandomStream, fold, permutation
from byov.config import Config
from byov.data.images import Split
from byov.data.transforms import resized
from byov.runs.folder import RunFolder

BANK = 4000  # reference images: 2% of them, the neighbours that draws should agree on, are 80; every draw encodes all
CALIBRATION = 1000  # at most, and at most 5% of the source: percentiles to 0.1, at little loss of training data
SPLIT: Split = "train"
MOST_PIXELS = 1 << 28  # bytes of reference and calibration images saved with a run: 5,000 at 133 pixels, in colour


class Division(NamedTuple):
    """Sorted indices into the source's training images."""

    trained: Tensor
    bank: Tensor
    calibration: Tensor


def divide(total: int, images: int, calibration: int) -> Division:
    """Split a source's `total` images; training and calibration images never overlap."""
    assert images + calibration <= total, "resolve the config first"
    order = permutation(total, fold(RandomStream.ORDER, RandomStream.SPLIT))
    parts = order[:images], order[: min(BANK, images)], order[total - calibration :]
    return Division(*(part.sort().values for part in parts))


def set_aside(total: int) -> int:
    """Return the default size of the calibration set."""
    return min(CALIBRATION, total // 20)


def write_reference(folder: Path, config: Config, total: int, fingerprint: str | None, division: Division) -> None:
    """Write `reference/images.json`: all that is needed to find its images and draws again."""
    write_json(
        RunFolder(folder).reference_images,
        {
            "source": config.data,
            "split": SPLIT,
            "images": total,
            "fingerprint": fingerprint,
            "order_key": [fold(RandomStream.ORDER, RandomStream.SPLIT)],
            "draw_key": [RandomStream.DRAWS, config.seed, "k"],
            "bank": division.bank.tolist(),
            "calibration": division.calibration.tolist(),
        },
    )


def write_pixels(folder: Path, images: Tensor, division: Division, side: int) -> None:
    """Write reference and calibration images, up to MOST_PIXELS bytes, so that scoring does not need the source.

    They are saved at the size that the network sees, or at their own size if that is smaller.
    """
    left, parts, side = MOST_PIXELS, {}, min(side, images.shape[-1])
    for name in ("bank", "calibration"):
        which: Tensor = getattr(division, name)
        size = len(which) * images.shape[1] * side**2
        if size <= left:  # checked first: reading them may take long
            parts[name] = torch.cat([resized(images[some], side) for some in torch.split(which, 500)])
            left -= size
    write_atomically(RunFolder(folder).reference_pixels, lambda temporary: save_file(parts, temporary))


def read_pixels(folder: Path, part: str) -> Tensor | None:
    """Read what `write_pixels` wrote of a part; None if it did not."""
    try:
        with safe_open(RunFolder(folder).reference_pixels, framework="pt") as file:
            return cast(Tensor, file.get_tensor(part))
    except (OSError, SafetensorError):
        return None
