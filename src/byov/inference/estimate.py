"""What using a run will take (`--dry-run`), from its checkpoint's header and its source's outline."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from byov._core.errors import BadInput
from byov.config import Config, check_ranges, merge
from byov.data.sources import open_source
from byov.runs import checkpoints
from byov.runs.folder import RunFolder
from byov.training import estimate
from byov.training.estimate import Estimate, Shape


def estimate_use(folder: Path, images: str | None, passes: float) -> Estimate:
    """Estimate what measuring or scoring images with a run takes, each passing the encoder `passes` times.

    `images` is a source or a folder; None: the source that the run was trained on.
    """
    config, shape = _trained(folder)
    spec = images or config.data
    source = open_source(f"folder:{spec}" if Path(spec).expanduser().is_dir() else spec, shape[-1])
    count, stored = 0, shape
    for split in source.splits:
        outline = source.outline(split) or source.load(split).outline
        count, stored = count + outline.images, outline.shape
    in_memory = source.image_size is None
    found = estimate.use(config, shape, RunFolder(folder).checkpoint, count, stored, in_memory, passes)
    found.check("use fewer images, or --threads 1")
    return found


def estimate_export(folder: Path, posterior: bool) -> Estimate:
    """Estimate what exporting a run's encoder takes."""
    config, shape = _trained(folder)
    found = estimate.use(config, shape, RunFolder(folder).checkpoint, 0, shape, False, 0)
    weights = estimate.NUMBER * estimate.network_size(config, shape).weights
    return Estimate(found.memory + 2 * weights, weights * (1 + posterior), estimate.EXPORT_SECONDS)


def _trained(folder: Path) -> tuple[Config, Shape]:
    """The config of a run, and the shape of the images that its network takes."""
    if not folder.is_dir():
        raise BadInput(f"there is no run {folder}: train one with `byov train`, or check the path.")
    path = RunFolder(folder).checkpoint
    state = checkpoints.run_state(checkpoints.state(path), path)
    config = merge(Config(), state["config"], str(path))
    check_ranges(config)
    shape: Any = tuple(state["image_shape"])
    return config, shape
