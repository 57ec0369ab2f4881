"""Which images of a source are trained on, which of these are the reference bank, and which are set aside.

One fixed random order of the source's images decides, the same for every seed and method: the first are trained on
(the very first are the bank), the last are set aside to calibrate scores. So where only a part is trained on, the
calibration images come from the rest.
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

BANK = 4000  # images: 2% of them, which draws should agree on, are some tens; each draw passes them all
CALIBRATION = 1000  # at most, and a twentieth of the source: percentiles to .1, for little of what can be learned
SPLIT: Split = "train"
MOST_PIXELS = 1 << 28  # bytes of bank and calibration images kept with a run: 5,000 of them at 133 pixels, in colour


class Division(NamedTuple):
    """Sorted indices into the source's training images."""

    trained: Tensor
    bank: Tensor
    calibration: Tensor


def divide(total: int, images: int, calibration: int) -> Division:
    """Divides a source's `total` images; those trained on and those set aside never overlap."""
    assert images + calibration <= total, "resolve the config first"
    order = permutation(total, fold(RandomStream.ORDER, RandomStream.SPLIT))
    parts = order[:images], order[: min(BANK, images)], order[total - calibration :]
    return Division(*(part.sort().values for part in parts))


def set_aside(total: int) -> int:
    """How many images are set aside to calibrate, where the user does not say."""
    return min(CALIBRATION, total // 20)


def write_reference(folder: Path, config: Config, total: int, fingerprint: str | None, division: Division) -> None:
    """Writes `reference/images.json`: all that is needed to find bank, calibration images and draws again."""
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
    """Writes bank and calibration images at the side that the network sees, or their own if it is smaller, as far as
    MOST_PIXELS goes: what is kept can be scored against without the source."""
    left, parts, side = MOST_PIXELS, {}, min(side, images.shape[-1])
    for name in ("bank", "calibration"):
        which: Tensor = getattr(division, name)
        size = len(which) * images.shape[1] * side**2
        if size <= left:  # asked first: reading them may take long
            parts[name] = torch.cat([resized(images[some], side) for some in torch.split(which, 500)])
            left -= size
    write_atomically(RunFolder(folder).reference_pixels, lambda temporary: save_file(parts, temporary))


def read_pixels(folder: Path, part: str) -> Tensor | None:
    """What `write_pixels` wrote of a part, if it did."""
    try:
        with safe_open(RunFolder(folder).reference_pixels, framework="pt") as file:
            return cast(Tensor, file.get_tensor(part))
    except (OSError, SafetensorError):
        return None
