"""A contact sheet of the shifts: what each severity does to a few images.

python -m byov.report.plots.shift_sheet shifts.png --data cifar10 --images 3 6
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import Tensor

from byov._core.errors import BadInput
from byov._core.files import write_atomically
from byov.data.shifts import SEVERITIES, SHIFTS, shifted
from byov.data.sources import open_source

TILE = 0.62  # inches per picture


def contact_sheet(images: Tensor, ids: Tensor, seed: int = 0) -> Figure:
    """Draw one row per shift: for each image the original, then five severities. Few uint8 images (B, C, H, W)."""
    names = [name for name, shift in SHIFTS.items() if shift.applies_to(images.shape[1])]
    rows = [torch.stack([images, *(shifted(images, ids, name, s, seed) for s in SEVERITIES)], 1) for name in names]
    tiles = torch.stack([row.flatten(0, 1) for row in rows])
    gap = 1 + max(images.shape[2:]) // 64
    height, width, columns = images.shape[2] + gap, images.shape[3] + gap, tiles.shape[1]

    figure = Figure(figsize=(TILE * columns, TILE * height / width * len(names)))
    axes = figure.add_axes((0.0, 0.0, 1.0, 1.0))  # the labels are outside: `bbox_inches="tight"` includes them
    axes.imshow(mosaic(tiles, gap).numpy(), interpolation="nearest")
    axes.set_yticks([(i + 0.5) * height for i in range(len(names))], names)
    axes.set_xticks([(i + 0.5) * width for i in range(columns)], ["original", *map(str, SEVERITIES)] * len(images))
    axes.tick_params(length=0, labeltop=True, labelbottom=False, labelsize=8)
    axes.spines[:].set_visible(False)
    return figure


def mosaic(tiles: Tensor, gap: int) -> Tensor:
    """Put tiles (rows, columns, C, H, W) side by side, with `gap` white pixels before each: (height, width, 3)."""
    tiles = F.pad(tiles, (gap, 0, gap, 0), value=255)
    rows, columns, channels, height, width = tiles.shape
    return tiles.permute(0, 3, 1, 4, 2).reshape(rows * height, columns * width, channels).expand(-1, -1, 3)


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the sheet; return 0, or 2 for bad input."""
    parser = argparse.ArgumentParser(prog="python -m byov.report.plots.shift_sheet", description=contact_sheet.__doc__)
    parser.add_argument("out", type=Path, help="the picture to write, such as shifts.png")
    parser.add_argument("--data", default="digits", metavar="SOURCE", help="the source of the images")
    parser.add_argument("--images", type=int, nargs="+", default=[0, 1], metavar="I", help="which of them, from 0")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    try:
        source = open_source(options.data)
        images = source.load(source.default).images
        ids = torch.tensor(options.images)
        if ids.min() < 0 or ids.max() >= len(images):
            raise BadInput(f"{options.data} has {len(images):,} images; give numbers from 0 to {len(images) - 1}.")
        figure = contact_sheet(images[ids], ids, options.seed)
        write_atomically(options.out, lambda path: figure.savefig(path, format="png", dpi=120, bbox_inches="tight"))
    except BadInput as error:
        print(f"byov: {error}", file=sys.stderr)
        return 2
    print(f"written: {options.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
