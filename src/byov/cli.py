"""The command line: parses, calls, prints. Heavy imports wait until a command needs them, so that --help is quick."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from tyro.conf import Positional, arg

from byov.arguments import parse
from byov.config import Config, read_config, read_recipe
from byov.errors import BadInput, SaidElsewhere, TrainingFailed
from byov.files import disk_space_checked

DONE, FAILED, BAD_INPUT, INTERRUPTED = 0, 1, 2, 130


@dataclass(frozen=True)
class Train:
    """Train an encoder on images without labels (byov, byol), or with them (supervised, supervised-bbb).

    Without a RECIPE one is chosen from the images. Flags override the recipe.
    """

    out: Annotated[Path, arg(metavar="RUN")]
    """Folder to write the run to; must not exist yet."""
    recipe: Annotated[str | None, Positional, arg(metavar="[RECIPE]")] = None
    """A recipe's name or the path of its YAML file."""
    resume: bool = False
    """Go on with the run in --out exactly where it stopped."""
    extend: Annotated[int | None, arg(metavar="EPOCHS")] = None
    """Lengthen the finished run in --out by this many epochs."""
    config: Annotated[Config, arg(name="")] = field(default_factory=Config)


@dataclass(frozen=True)
class Evaluate:
    """Measure a run with a linear probe; writes RUN/results/evaluation.json."""

    run: Annotated[Path, Positional, arg(metavar="RUN")]
    """The run folder."""
    data: Annotated[str | None, arg(metavar="SOURCE")] = None
    """Source with labels. Unset: the one the run was trained on."""
    teacher: bool = False
    """Evaluate the teacher's encoder instead of the student's."""
    threads: int | None = None
    """CPU threads. Unset: one a core."""
    device: str = "auto"
    """auto, cpu or cuda."""


@dataclass(frozen=True)
class Report:
    """Write one self-contained page about one or several runs, and print their table."""

    runs: Annotated[tuple[Path, ...], Positional, arg(metavar="RUN [RUN ...]")]
    """The run folders."""
    out: Annotated[Path, arg(metavar="PAGE")] = Path("report.html")
    """The page to write."""


@dataclass(frozen=True)
class Data:
    """List the image sources, or fetch one."""

    action: Positional[Literal["list", "get"]]
    """list: what there is. get: fetch NAME and check its digest."""
    name: Annotated[str | None, Positional, arg(metavar="[NAME]")] = None
    """The source to fetch."""


def main(arguments: Sequence[str] | None = None) -> None:
    """The entry point of `byov`."""
    try:
        code = _dispatch(list(sys.argv[1:] if arguments is None else arguments))
        sys.stdout.flush()  # here, where a closed pipe can still be met
    except (BadInput, TrainingFailed) as error:
        _tell(error)
        code = BAD_INPUT if isinstance(error, BadInput) else FAILED
    except BrokenPipeError:  # the reader (`| head`) has gone: there is nobody left to tell
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python complains when it closes stdout
        code = FAILED
    except OSError as error:
        if error.filename is None:
            raise
        reason = (error.strerror or str(error)).lower()
        print(f"byov: cannot use {error.filename}: {reason}; check the path and its permissions.", file=sys.stderr)
        code = BAD_INPUT
    except KeyboardInterrupt:
        code = INTERRUPTED
    sys.exit(code)


def _rank() -> int:
    """This process's rank, as torchrun or SLURM told it."""
    return int(os.environ.get("RANK") or os.environ.get("SLURM_PROCID") or 0)


def _tell(error: Exception) -> None:
    """Says what was wrong. Of several processes one should: the first, or, once they have met, the one that met it.

    torchrun ends all processes as soon as one ends. So who should not speak waits; and if it is then still there, the
    mistake was its own, and it speaks after all.
    """
    torch = sys.modules.get("torch")
    met = torch is not None and bool(torch.distributed.is_initialized())
    if isinstance(error, SaidElsewhere) or (_rank() > 0 and not met):
        time.sleep(3)
    if not isinstance(error, SaidElsewhere):
        print(f"byov: {error}", file=sys.stderr)


def _dispatch(arguments: list[str]) -> int:
    command = arguments[0] if arguments else "--help"
    if command in COMMANDS:
        return COMMANDS[command][1](arguments[1:])
    if command == "--version":
        from byov import __version__

        print(f"byov {__version__}")
    elif command in ("-h", "--help"):
        print(_overview())
    else:
        raise BadInput(f"there is no command {command!r}: use one of {', '.join(COMMANDS)} (`byov --help`).")
    return DONE


def _overview() -> str:
    lines = [
        "usage: byov COMMAND ...",
        "",
        "Images without labels in, an encoder that knows what it does not know out.",
        "",
    ]
    for name, (kind, _) in COMMANDS.items():
        lines.append(f"  {name:10}{(kind.__doc__ or '').splitlines()[0]}")
    return "\n".join([*lines, "", "`byov COMMAND --help` tells more."])


# ------------------------------------------------------------------------------------------------------------ commands


def _train(arguments: list[str]) -> int:
    options = parse(Train, "train", arguments, Train(out=tyro.MISSING, config=Config()))
    default, origin = _defaults(options, method_given=any(a.split("=")[0] == "--method" for a in arguments))
    options = parse(Train, "train", arguments, Train(out=tyro.MISSING, config=default))  # now over the recipe's values

    from rich.console import Console

    from byov.progress import StageProgress, StepProgress
    from byov.training.loop import Interrupted
    from byov.training.run import describe, estimate_seconds, prepare

    console = Console(stderr=True, highlight=False, emoji=False, quiet=_rank() > 0)
    with disk_space_checked(options.out):
        with StageProgress(console) as stages:
            trainer = prepare(
                options.config,
                options.out,
                resume=options.resume,
                extend=options.extend,
                progress=stages,
                say=stages.say,
            )
        console.print(describe(trainer, origin), soft_wrap=True, markup=False)
        console.print(_duration(estimate_seconds(trainer)))
        try:
            with StepProgress(console, trainer) as progress:
                trainer.say, trainer.on_step = progress.say, progress.on_step
                summary = trainer.run()
        except Interrupted as interruption:
            progress.say(f"{interruption}: saved at step {trainer.step} of {trainer.total}; go on with --resume.")
            return INTERRUPTED
        finally:
            trainer.processes.leave()
    if trainer.processes.main:
        rows = [("run", str(options.out)), *((k, _number(v)) for k, v in summary.items() if v is not None)]
        print(_grid(rows, "ll"))
    return DONE


def _defaults(options: Train, method_given: bool) -> tuple[Config, str]:
    """The config that the flags override, and where it comes from: a recipe, the run to go on with, or the images."""
    method = options.config.method if method_given else None
    if options.recipe is not None:
        return read_recipe(options.recipe, method), options.recipe
    if options.resume or options.extend is not None:
        saved = options.out / "config.yaml"
        if not saved.is_file():
            raise BadInput(f"{options.out} holds no run to go on with: check --out, or start one without it.")
        return read_config(saved), str(saved)
    from byov.data.sources import open_source
    from byov.training.resolve import choose_recipe

    source = open_source(options.config.data, options.config.image_size)
    side = None if source.image_size is not None else source.load("train").images.shape[-1]  # no folder is decoded here
    name = choose_recipe(side if side is None else options.config.image_size or side)
    return read_recipe(name, method), f"{name} (chosen from the images)"


def _evaluate(arguments: list[str]) -> int:
    options = parse(Evaluate, "evaluate", arguments)
    if _rank() > 0:
        return DONE  # one process is enough
    import torch
    from rich.console import Console

    from byov.evaluation.evaluate import evaluate, results_path
    from byov.evaluation.run import load
    from byov.progress import StageProgress
    from byov.training.resolve import resolve_device

    if options.threads is not None and options.threads < 1:
        raise BadInput("--threads must be at least 1.")
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    console = Console(stderr=True, highlight=False, emoji=False)
    with disk_space_checked(options.run / "results"), StageProgress(console) as progress:
        run = load(options.run, resolve_device(options.device))
        results = evaluate(run, options.data, options.teacher, progress, progress.say)
    print(_measures(str(options.run), results))
    print(f"written: {results_path(run, options.data or run.config.data, options.teacher)}")
    return DONE


def _report(arguments: list[str]) -> int:
    options = parse(Report, "report", arguments)
    if not options.runs:
        raise BadInput("say which runs to report on: `byov report RUN [RUN ...] --out report.html`.")
    from byov.report.page import COLUMNS, summary_rows, write_report
    from byov.report.run import load_runs

    with disk_space_checked(options.out):
        path = write_report(options.runs, options.out)
    rows = [(row.name, *(cell.text for cell in row.cells)) for row in summary_rows(load_runs(list(options.runs)))]
    print(_grid([("", *(column.title for column in COLUMNS)), *rows], "l" + "r" * len(COLUMNS)))
    print(f"written: {path}")
    return DONE


def _data(arguments: list[str]) -> int:
    options = parse(Data, "data", arguments)
    from byov.data import fetch, sources

    if options.action == "list":
        head = ("name", "pixels", "train", "test", "here", "terms", "what")
        rows = [
            (r.name, r.size, f"{r.train:,}", f"{r.test:,}", "yes" if r.there else "no", r.terms, r.description)
            for r in sources.table()
        ]
        print(_grid([head, *rows], "llrrlll"))
        print("\n`byov data get NAME` fetches one. Images of your own: folder:PATH (all below a folder) or npz:PATH.")
        return DONE
    if options.name is None:
        raise BadInput("say which source to fetch: `byov data get cifar10` (`byov data list` names them).")
    if options.name == "digits":
        print("digits comes with scikit-learn: nothing to fetch, `byov train --data digits` finds it.")
        return DONE
    from rich.console import Console

    from byov.progress import StageProgress

    with StageProgress(Console(stderr=True, highlight=False, emoji=False)) as progress:
        path = fetch.get(options.name, progress)
    print(f"{options.name} is there, its digests are right: {path}")
    return DONE


COMMANDS: dict[str, tuple[type, Callable[[list[str]], int]]] = {
    "train": (Train, _train),
    "evaluate": (Evaluate, _evaluate),
    "report": (Report, _report),
    "data": (Data, _data),
}


# ------------------------------------------------------------------------------------------------------------ printing


def _duration(seconds: float) -> str:
    return f"about {seconds / 60:.0f} minutes on this machine" if seconds >= 90 else "about a minute or less here"


def _number(value: Any) -> str:
    return f"{value:,.4g}" if isinstance(value, float) else str(value)


def _grid(rows: Sequence[Sequence[str]], align: str) -> str:
    """Columns of text, each to the left (l) or to the right (r)."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    sides = {"l": str.ljust, "r": str.rjust}
    lines = ["  ".join(sides[a](cell, w) for cell, w, a in zip(row, widths, align, strict=True)) for row in rows]
    return "\n".join(line.rstrip() for line in lines)


def _measures(name: str, results: dict[str, Any]) -> str:
    """A small table: a row for the run, the untrained encoder and raw pixels."""
    keys = ("top1", "ece", "brier", "nll", "knn")
    rows = [
        (row, *(f"{results[prefix + key]:.4f}" for key in keys))
        for row, prefix in ((name, ""), ("untrained encoder", "untrained."), ("raw pixels", "pixels."))
    ]
    return _grid([("", *keys), *rows], "l" + "r" * len(keys))
