"""`byov export`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import Positional, arg

from byov._core.files import disk_space_checked
from byov.cli import process
from byov.cli.parsing import parse


@dataclass(frozen=True)
class Options:
    """Write a run's encoder to a file that can be used without byov."""

    run: Annotated[Path, Positional, arg(metavar="RUN")]
    """The run folder."""
    format: Literal["safetensors", "onnx", "timm"]
    """Tensors with a JSON header; ONNX, checked with onnxruntime; or a state dict for timm's model, checked with it."""
    out: Annotated[Path | None, arg(metavar="FILE")] = None
    """The file; must not exist yet. Unset: a file in RUN/export."""
    posterior: bool = False
    """Include the log-variances (safetensors only)."""
    teacher: bool = False
    """The teacher's encoder instead of the student's."""
    dry_run: bool = False
    """Only estimate memory, disk and time: nothing is written."""
    with_uncertainty: bool = False
    """Include oddness, uncertainty and their percentiles, as computed by `byov score --fast` (onnx only)."""


def run(arguments: list[str]) -> int:
    options = parse(Options, "export", arguments)
    if process.rank() > 0:
        return process.DONE  # one process is enough
    from byov.export import export
    from byov.inference.estimate import estimate_export
    from byov.inference.run import load

    if options.dry_run:
        print(estimate_export(options.run, options.posterior))
        return process.DONE
    opened = load(options.run)
    with disk_space_checked(options.out or options.run):
        path = export(
            opened,
            options.format,
            options.out,
            posterior=options.posterior,
            teacher=options.teacher,
            with_uncertainty=options.with_uncertainty,
        )
    shape, width = ", ".join(map(str, opened.image_shape)), opened.encoder.module.features
    what = f"embedding (N, {width}), and scores (N)" if options.with_uncertainty else f"features (N, {width})"
    print(f"images (N, {shape}), floats from 0 to 1 -> {what}")
    print(f"written: {path} ({path.stat().st_size:,} bytes)")
    return process.DONE
