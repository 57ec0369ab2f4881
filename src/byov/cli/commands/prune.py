"""`byov prune`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import Positional, arg

from byov._core.files import disk_space_checked
from byov.cli import process, tables
from byov.cli.parsing import parse
from byov.runs.folder import RunFolder


@dataclass(frozen=True)
class Options:
    """Write a pruned run, and its accuracy at each sparsity."""

    run: Annotated[Path, Positional, arg(metavar="RUN")]
    """The run folder; it is not changed."""
    by: Literal["snr", "magnitude", "variance", "random"]
    """What ranks the weights; the lowest are removed first: |mean| / sigma, |mean|, 1 / sigma, or a random order."""
    sparsity: float
    """Fraction of the weights of Linear layers and convolutions to remove, between 0 and 1."""
    out: Annotated[Path, arg(metavar="RUN2")]
    """Folder to write the pruned run to; must not exist yet."""
    scope: Literal["layer", "global"] = "layer"
    """Rank the weights within each layer, or over all layers together."""
    part: Literal["encoder", "all"] = "encoder"
    """Prune the encoder only, or projector and predictor too."""
    structured: bool = False
    """Remove whole neurons, attention heads and channels, which makes the encoder smaller and faster."""
    rounds: int = 1
    """Prune and retrain this many times, up to the final sparsity."""
    epochs: int = 0
    """Epochs to train after each round. 0: no training."""
    data: Annotated[str | None, arg(metavar="SOURCE")] = None
    """Source to measure on. Unset: the source the run was trained on; without labels, features are compared."""
    curve: tuple[float, ...] = (0.25, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98)
    """Further sparsities to measure, without training."""
    dry_run: bool = False
    """Only estimate memory, disk and time: nothing is written."""
    seed: int = 0
    """Seed of the random order."""
    threads: int | None = None
    """CPU threads. Unset: one per core."""
    device: str = "auto"
    """auto, cpu or cuda."""


def run(arguments: list[str]) -> int:
    options = parse(Options, "prune", arguments)
    if process.rank() > 0:
        return process.DONE  # one process is enough
    from byov.cli.progress import StageProgress, StepProgress
    from byov.inference.estimate import estimate_use
    from byov.inference.run import load
    from byov.pruning.criteria import Pruning
    from byov.pruning.prune import prune
    from byov.report.plots.run_figures import draw_pruning
    from byov.training.loop import Interrupted, Trainer
    from byov.training.resolve import resolve_device

    process.use_threads(options.threads)
    how = Pruning(
        options.by,
        options.sparsity,
        options.scope,
        options.part,
        options.structured,
        options.rounds,
        options.epochs,
        options.seed,
    )
    if options.dry_run:
        # Each point of the curve on all images, and rounds of training.
        passes = 2 + 2 * len(options.curve) + 8 * options.rounds * options.epochs
        print(estimate_use(options.run, options.data, passes))
        return process.DONE
    console, picture = process.console(), RunFolder(options.out).figures / "pruning.png"

    def train(trainer: Trainer) -> None:
        stages.bar.stop()  # one bar at a time
        with StepProgress(console, trainer) as progress:
            trainer.say, trainer.on_step = progress.say, progress.on_step
            trainer.run()
        stages.bar.start()

    with disk_space_checked(options.out), StageProgress(console) as stages:
        opened = load(options.run, resolve_device(options.device))
        try:
            results = prune(
                opened,
                options.out,
                how,
                options.data,
                options.curve,
                stages,
                stages.say,
                train,
                lambda results: draw_pruning(results, picture),
            )
        except Interrupted as interruption:
            stages.say(f"{interruption}: {options.out} is saved; repeat the same command to continue.")
            return process.INTERRUPTED
    print(tables.pruned(results))
    print(f"written: {options.out}, with results/pruning.json and {picture.relative_to(options.out)}")
    return process.DONE
