"""`byov train`."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro
from tyro.conf import Positional, arg

from byov._core.errors import BadInput
from byov._core.files import disk_space_checked
from byov.cli import process, tables
from byov.cli.parsing import parse, print_help
from byov.config import Config, flatten, read_recipe, to_dict

if TYPE_CHECKING:
    from rich.console import Console

    from byov.training.loop import Trainer
    from byov.training.recipes import Start

FAR_OFF = 0.1  # gap between the requested overlap and the one reached that is worth a warning
SHOWN = (  # in --help; --help-all shows the rest too
    *(
        "recipe",
        "out",
        "resume",
        "extend",
        "dry_run",
        "data",
        "method",
        "init",
        "image_size",
        "images",
        "calibration",
        "seed",
    ),
    *("threads", "device", "precision", "model.backbone", "posterior.temperature", "posterior.overlap"),
    *("optim.epochs", "optim.batch_size", "optim.lr"),
)


@dataclass(frozen=True)
class Options:
    """Train an encoder on images without labels (byov, byol, posthoc) or with labels (supervised, supervised-bbb).

    Without a RECIPE, one is chosen for the images. Flags override the recipe.
    """

    out: Annotated[Path, arg(metavar="RUN")]
    """Folder to write the run to; must not exist yet."""
    recipe: Annotated[str | None, Positional, arg(metavar="[RECIPE]")] = None
    """Name of a recipe, or path of its YAML file."""
    resume: bool = False
    """Continue the run in --out exactly where it stopped."""
    extend: Annotated[int | None, arg(metavar="EPOCHS")] = None
    """Train the finished run in --out for this many more epochs."""
    view_caches: Annotated[Path | None, arg(metavar="FOLDER")] = None
    """Folder of cached views (--views.cached) that runs share. Unset: in the run's folder, until it finishes."""
    dry_run: bool = False
    """Only estimate memory, disk and time: nothing is written."""
    config: Annotated[Config, arg(name="")] = field(default_factory=Config)


def run(arguments: list[str]) -> int:
    if {"-h", "--help", "--help-all"} & set(arguments):
        _help(arguments)
        return process.DONE
    options = _parsed(arguments, Config())
    start = _start(options, arguments)
    options = _parsed(arguments, start.config)  # again, now with the recipe's values as defaults
    if options.config.method == "auto":
        options = replace(options, config=replace(options.config, method=start.config.method))

    from byov._compiled.fused import first_time
    from byov.cli.progress import StageProgress, StepProgress
    from byov.training.loop import Interrupted
    from byov.training.prepare import plan, prepare
    from byov.training.preview import describe, estimate_seconds, too_short

    new = not options.resume and options.extend is None
    if options.dry_run:
        print(plan(options.config, start.least_steps if new else 0))
        return process.DONE
    console = process.console()
    with disk_space_checked(options.out):
        with StageProgress(console) as stages:
            trainer = prepare(
                options.config,
                options.out,
                resume=options.resume,
                extend=options.extend,
                least_steps=start.least_steps if new else 0,
                view_caches=options.view_caches,
                progress=stages,
                say=stages.say,
            )
        origin = start.origin
        if new and start.least_steps and trainer.config.optim.epochs > start.config.optim.epochs:
            origin += f", lengthened from {start.config.optim.epochs} epochs since there are few"
        console.print(describe(trainer, origin), soft_wrap=True, markup=False)
        if warning := too_short(trainer):
            console.print(warning, soft_wrap=True, markup=False)
        finished = trainer.step >= trainer.total
        if not finished and trainer.learner.posterior.means.device.type == "cpu" and first_time():
            console.print("compiling loops for this machine, once: about 10 seconds")
        if trainer.config.method == "posthoc":
            return _fit_posthoc(trainer, options.out, console)
        length = "this run is finished; --extend EPOCHS trains it for longer"
        console.print(length if finished else tables.duration(estimate_seconds(trainer)))
        try:
            with StepProgress(console, trainer) as progress:
                trainer.say, trainer.on_step = progress.say, progress.on_step
                summary = trainer.run()
        except Interrupted as interruption:
            progress.say(f"{interruption}: saved at step {trainer.step} of {trainer.total}; continue with --resume.")
            return process.INTERRUPTED
        finally:
            trainer.processes.leave()
    if trainer.processes.main:
        _print_summary(options.out, summary)
    return process.DONE


def _parsed(arguments: list[str], default: Config) -> Options:
    return parse(Options, "train", arguments, Options(out=tyro.MISSING, config=default))


def _start(options: Options, arguments: list[str]) -> Start:
    """Find what the flags override: the config of the run to continue, or a recipe."""
    from byov.training.recipes import choose_start, saved_start

    if options.recipe is None and (options.resume or options.extend is not None):
        return saved_start(options.out)
    flags = {argument.split("=")[0].replace("_", "-") for argument in arguments}
    settings = flatten(to_dict(options.config))
    given = {key: value for key, value in settings.items() if f"--{key.replace('_', '-')}" in flags}
    return choose_start(options.recipe, given)


def _help(arguments: list[str]) -> None:
    """Print the help, with the defaults of the recipe that the other arguments name or imply."""
    others = [argument for argument in arguments if argument not in ("-h", "--help", "--help-all")]
    config, origin = read_recipe("digits"), "digits"  # what `byov train --out RUN` trains; known without torch
    if others:
        try:
            options = parse(Options, "train", [*others, *(() if "--out" in others else ("--out", "RUN"))])
        except BadInput:  # an unfinished command: its help is still wanted
            pass
        else:
            config, origin, _ = _start(options, others)
    print_help(
        Options,
        "train",
        Options(out=tyro.MISSING, config=config),
        None if "--help-all" in arguments else SHOWN,
        f"The defaults are those of the recipe {origin}; name another RECIPE or --data to see others. "
        "`byov train --help-all` lists all settings.",
    )


def _print_summary(out: Path, summary: dict[str, Any]) -> None:
    rows = [("run", str(out)), *((k, tables.number(v)) for k, v in summary.items() if v is not None)]
    print(tables.grid(rows, "ll"))


def _fit_posthoc(trainer: Trainer, out: Path, console: Console) -> int:
    """Fit sigma around the given weights, which takes the place of training; interrupted, it starts again."""
    from byov.cli.progress import StageProgress
    from byov.scoring.posthoc import fit_posthoc

    if trainer.step >= trainer.total:
        console.print("this run is finished")
        return process.DONE
    begun = time.monotonic()
    try:
        with StageProgress(console) as stages:
            fitted = fit_posthoc(trainer, stages)
    except KeyboardInterrupt:
        console.print("interrupted: nothing was fitted; continue with --resume.")
        return process.INTERRUPTED
    summary = trainer.finish(time.monotonic() - begun)
    wanted = trainer.config.posterior.overlap
    if abs(fitted.overlap - wanted) > FAR_OFF:
        console.print(
            f"warning: an overlap of {wanted:g} cannot be reached with these weights; the nearest is "
            f"{fitted.overlap:.2f}: give another --posterior.overlap.",
            soft_wrap=True,
            markup=False,
        )
    shown = {key: summary[key] for key in ("seconds", "peak_memory_mib", "random_weights", "median_sigma")}
    _print_summary(out, shown | {"noise": fitted.c, "overlap": fitted.overlap})
    return process.DONE
