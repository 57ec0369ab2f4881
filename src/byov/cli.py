"""The command line: parses, calls, prints. Heavy imports wait until a command needs them, so that --help is quick."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from tyro.conf import Positional

from byov.config import Config, flatten, read_config, read_recipe, to_dict
from byov.errors import BadInput, TrainingFailed

DONE, FAILED, BAD_INPUT, INTERRUPTED = 0, 1, 2, 130


@dataclass(frozen=True)
class Train:
    """Train an encoder on images without labels (byov, byol), or with them (supervised, supervised-bbb).

    Without a RECIPE one is chosen from the images. Flags override the recipe.
    """

    out: Annotated[Path, tyro.conf.arg(metavar="RUN")]
    """Folder to write the run to; must not exist yet."""
    recipe: Positional[str | None] = None
    """A recipe's name or the path of its YAML file."""
    resume: bool = False
    """Go on with the run in --out exactly where it stopped."""
    extend: int | None = None
    """Lengthen the finished run in --out by this many epochs."""
    init: str | None = None
    """Start from the weights of a run folder or a .safetensors file."""
    config: Annotated[Config, tyro.conf.arg(name="")] = field(default_factory=Config)


@dataclass(frozen=True)
class Evaluate:
    """Measure a run with a linear probe; writes RUN/results/evaluation.json."""

    run: Positional[Path]
    """The run folder."""
    data: str | None = None
    """Source with labels. Unset: the one the run was trained on."""
    teacher: bool = False
    """Evaluate the teacher's encoder instead of the student's."""
    threads: int | None = None
    """CPU threads. Unset: one a core."""
    device: str = "auto"
    """auto, cpu, cuda or mps."""


@dataclass(frozen=True)
class Report:
    """Write one self-contained page about one or several runs."""

    runs: Positional[tuple[Path, ...]]
    """The run folders."""
    out: Path = Path("report.html")
    """The page to write."""


@dataclass(frozen=True)
class Data:
    """List the image sources, or fetch one."""

    action: Positional[Literal["list", "get"]]
    """list: what there is. get: fetch NAME and check its digest."""
    name: Positional[str | None] = None
    """The source to fetch."""


COMMANDS = {"train": Train, "evaluate": Evaluate, "report": Report, "data": Data}


def main(arguments: Sequence[str] | None = None) -> None:
    """The entry point of `byov`."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    try:
        sys.exit(_dispatch(arguments))
    except BadInput as error:
        _complain(error)
        sys.exit(BAD_INPUT)
    except TrainingFailed as error:
        _complain(error)
        sys.exit(FAILED)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)


def _complain(error: Exception) -> None:
    print(f"byov: {error}", file=sys.stderr)


def _dispatch(arguments: list[str]) -> int:
    command = arguments[0] if arguments else ""
    known = {"train": _train, "evaluate": _evaluate, "report": _report, "data": _data}
    if command in known:
        return known[command](arguments[1:])
    if command == "--version":
        from byov import __version__

        print(f"byov {__version__}")
        return DONE
    if command in ("", "-h", "--help"):
        print(_overview())
        return DONE
    raise BadInput(f"there is no command {command!r}: use one of {', '.join(known)} (`byov --help`).")


def _overview() -> str:
    lines = ["usage: byov COMMAND ...", "", "Images without labels in, an encoder that knows what it does not know out.", ""]
    for name, kind in COMMANDS.items():
        lines.append(f"  {name:10}{(kind.__doc__ or '').splitlines()[0]}")
    return "\n".join([*lines, "", "`byov COMMAND --help` tells more."])


def _parse(kind: Any, command: str, arguments: list[str], default: Any = tyro.MISSING) -> Any:
    _check_flags(kind, default, arguments)
    if default is tyro.MISSING:
        return tyro.cli(kind, prog=f"byov {command}", args=arguments)
    return tyro.cli(kind, prog=f"byov {command}", args=arguments, default=default)


def _check_flags(kind: Any, default: Any, arguments: list[str]) -> None:
    """An unknown flag gets one sentence with its near ones; tyro would draw a box."""
    import dataclasses
    import difflib

    known = [f.name for f in dataclasses.fields(kind) if f.name != "config"] + ["help", "h"]
    if kind is Train:
        known += list(flatten(to_dict(Config())))
    for argument in arguments:
        name = argument.lstrip("-").split("=")[0].replace("-", "_")
        if not argument.startswith("--") or name in known or name.replace("no_", "", 1) in known:
            continue
        tail = name.rsplit(".", 1)[-1]
        near = difflib.get_close_matches(name, known, n=3) or [k for k in known if k.rsplit(".", 1)[-1] == tail]
        hint = f"did you mean {' or '.join('--' + n.replace('_', '-') for n in near)}?" if near else "see --help."
        raise BadInput(f"there is no option {argument.split('=')[0]}; {hint}")


def _value_of(flag: str, arguments: list[str]) -> str | None:
    """The value of a flag, before the real parsing: the recipe's defaults hang on it."""
    for i, argument in enumerate(arguments):
        if argument == flag and i + 1 < len(arguments):
            return arguments[i + 1]
        if argument.startswith(flag + "="):
            return argument.split("=", 1)[1]
    return None


def _defaults(arguments: list[str]) -> tuple[Config, str]:
    """The config that the flags override, and where it comes from: the run to resume, a recipe, or the images."""
    if {"-h", "--help"} & set(arguments):
        return Config(), "defaults"
    out, method, data = (_value_of(flag, arguments) for flag in ("--out", "--method", "--data"))
    recipe = arguments[0] if arguments and not arguments[0].startswith("-") else None
    goes_on = "--resume" in arguments or _value_of("--extend", arguments) is not None
    if goes_on and recipe is None:
        if out is None or not (Path(out) / "config.yaml").is_file():
            raise BadInput(f"{out} holds no run to resume: give its folder with --out.")
        return read_config(Path(out) / "config.yaml"), f"{out}/config.yaml"
    if recipe is not None:
        return read_recipe(recipe, method), recipe
    from byov.data.sources import open_source
    from byov.training.resolve import choose_recipe

    name = choose_recipe(open_source(data or Config().data).load("train").images.shape[-1])
    return read_recipe(name, method), f"{name} (chosen from the images)"


def _train(arguments: list[str]) -> int:
    default, origin = _defaults(arguments)
    out: Any = tyro.MISSING
    options: Train = _parse(Train, "train", arguments, Train(out=out, config=default))

    from rich.console import Console

    from byov.progress import StepProgress
    from byov.training.loop import Interrupted
    from byov.training.run import describe, estimate_seconds, prepare

    console = Console(stderr=True, highlight=False)
    trainer = prepare(options.config, options.out, resume=options.resume, extend=options.extend, init=options.init)
    if trainer.processes.rank == 0:
        console.print(describe(trainer, origin), soft_wrap=True)
        minutes = estimate_seconds(trainer) / 60
        console.print(f"about {minutes:.0f} minutes on this machine" if minutes >= 1 else "less than a minute here")
    try:
        with StepProgress(console, trainer) as progress:
            trainer.say, trainer.on_step = progress.say, progress.on_step
            summary = trainer.run()
    except Interrupted as interruption:
        console.print(f"{interruption}: saved at step {trainer.step} of {trainer.total}; go on with --resume.")
        return INTERRUPTED
    if trainer.processes.rank == 0:
        print(_table([("run", str(options.out)), *((k, _number(v)) for k, v in summary.items() if v is not None)]))
    return DONE


def _evaluate(arguments: list[str]) -> int:
    options: Evaluate = _parse(Evaluate, "evaluate", arguments)
    import torch

    from byov.evaluation.evaluate import evaluate
    from byov.evaluation.run import load
    from byov.training.resolve import resolve_device

    if options.threads:
        torch.set_num_threads(options.threads)
    run = load(options.run, resolve_device(options.device))
    results = evaluate(run, options.data, options.teacher, say=lambda text: print(text, file=sys.stderr))
    print(_measures({str(options.run): results}))
    print(f"written: {options.run / 'results' / 'evaluation.json'}")
    return DONE


def _report(arguments: list[str]) -> int:
    options: Report = _parse(Report, "report", arguments)
    from byov.report.page import summary_rows, write_report

    path = write_report(options.runs, options.out)
    print(path)
    return DONE


def _data(arguments: list[str]) -> int:
    options: Data = _parse(Data, "data", arguments)
    from byov.data import fetch, sources

    if options.action == "list":
        for row in sources.table():
            print(row)
        return DONE
    if options.name is None:
        raise BadInput("say which source to fetch: `byov data get cifar10` (`byov data list` names them).")
    print(fetch.get(options.name))
    return DONE


def _number(value: Any) -> str:
    return f"{value:,.4g}" if isinstance(value, float) else str(value)


def _table(rows: list[tuple[str, str]]) -> str:
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:{width}}  {value}" for name, value in rows)


def _measures(results: dict[str, dict[str, Any]]) -> str:
    """A small table: a row for each run, the untrained encoder and raw pixels."""
    keys = ("top1", "ece", "brier", "nll", "knn")
    rows = []
    for name, values in results.items():
        rows.append((name, values, ""))
    first = next(iter(results.values()))
    rows += [("untrained encoder", first, "untrained."), ("raw pixels", first, "pixels.")]
    width = max(len(name) for name, _, _ in rows)
    lines = [" " * width + "".join(f"{key:>9}" for key in keys)]
    for name, values, prefix in rows:
        lines.append(f"{name:{width}}" + "".join(f"{values.get(prefix + key, float('nan')):9.4f}" for key in keys))
    return "\n".join(lines)
