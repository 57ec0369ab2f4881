"""The command line: parses, calls, prints. Heavy imports wait until a command needs them, so that --help is quick."""

from __future__ import annotations

import json
import os
import shlex
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import tyro

from byov._core.errors import BadInput, SaidElsewhere, TrainingFailed
from byov._core.files import disk_space_checked
from byov.cli import tables
from byov.cli.options import Data, Evaluate, Export, Ledger, Prune, Report, Score, Study, Train
from byov.cli.parsing import parse
from byov.config import Config, absolute_source, flatten, to_dict
from byov.runs.folder import RunFolder

DONE, FAILED, BAD_INPUT, INTERRUPTED = 0, 1, 2, 130
FAR_OFF = 0.1  # between the overlap that was asked for and the one that was reached: worth a warning


def main(arguments: Sequence[str] | None = None) -> None:
    """The entry point of `byov`."""
    if not _one_of_many() and threading.current_thread() is threading.main_thread():
        # As Ctrl-C: what is done is saved. Not for one of several processes, which may wait for one that has ended.
        signal.signal(signal.SIGTERM, signal.default_int_handler)
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
    except KeyboardInterrupt:  # where a command has something to keep, it has said so itself
        if _rank() == 0:
            print("byov: interrupted.", file=sys.stderr)
        code = INTERRUPTED
    if _one_of_many():
        # A thread of gloo may still be letting go of the last tensor; a Python that is closing down meanwhile aborts.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def _one_of_many() -> bool:
    """Whether torchrun or SLURM started several processes."""
    return int(os.environ.get("WORLD_SIZE") or os.environ.get("SLURM_STEP_NUM_TASKS") or 1) > 1


def _rank() -> int:
    """This process's rank, as torchrun or SLURM told it."""
    return int(os.environ.get("RANK") or os.environ.get("SLURM_PROCID") or 0)


def _use_threads(count: int | None) -> None:
    """What --threads says; unset, torch's own choice stays."""
    if count is not None and count < 1:
        raise BadInput("--threads must be at least 1.")
    if count is not None:
        import torch

        torch.set_num_threads(count)


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
    start = _start(options, arguments)
    # Parsed again, now with the recipe's values as defaults.
    options = parse(Train, "train", arguments, Train(out=tyro.MISSING, config=start.config))
    if options.config.method == "auto":
        options = replace(options, config=replace(options.config, method=start.config.method))

    from rich.console import Console

    from byov._compiled.fused import first_time
    from byov.cli.progress import StageProgress, StepProgress
    from byov.training.loop import Interrupted
    from byov.training.prepare import prepare
    from byov.training.preview import describe, estimate_seconds, too_short

    new = not options.resume and options.extend is None
    console = Console(stderr=True, highlight=False, emoji=False, quiet=_rank() > 0)
    with disk_space_checked(options.out):
        with StageProgress(console) as stages:
            trainer = prepare(
                options.config,
                options.out,
                resume=options.resume,
                extend=options.extend,
                least_steps=start.least_steps if new else 0,
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
            console.print("compiling loops for this machine, once: some 10 seconds")
        if trainer.config.method == "posthoc":
            return _fit_posthoc(trainer, options.out, console)
        length = (
            "this run is finished; --extend EPOCHS lengthens it"
            if finished
            else tables.duration(estimate_seconds(trainer))
        )
        console.print(length)
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
        _print_summary(options.out, summary)
    return DONE


def _start(options: Train, arguments: list[str]) -> Any:
    """What the flags override: the config of the run to continue, or of a recipe."""
    from byov.training.recipes import choose_start, saved_start

    if options.recipe is None and (options.resume or options.extend is not None):
        return saved_start(options.out)
    flags = {argument.split("=")[0].replace("_", "-") for argument in arguments}
    settings = flatten(to_dict(options.config))
    given = {key: value for key, value in settings.items() if f"--{key.replace('_', '-')}" in flags}
    return choose_start(options.recipe, given)


def _print_summary(out: Path, summary: dict[str, Any]) -> None:
    rows = [("run", str(out)), *((k, tables.number(v)) for k, v in summary.items() if v is not None)]
    print(tables.grid(rows, "ll"))


def _fit_posthoc(trainer: Any, out: Path, console: Any) -> int:
    """What stands in the place of training where nothing is trained. Stopped, it starts again."""
    from byov.cli.progress import StageProgress
    from byov.scoring.posthoc import fit_posthoc

    if trainer.step >= trainer.total:
        console.print("this run is finished")
        return DONE
    begun = time.monotonic()
    try:
        with StageProgress(console) as stages:
            fitted = fit_posthoc(trainer, stages)
    except KeyboardInterrupt:
        console.print("interrupted: nothing was fitted; go on with --resume.")
        return INTERRUPTED
    summary = trainer.finish(time.monotonic() - begun)
    wanted = trainer.config.posterior.overlap
    if abs(fitted.overlap - wanted) > FAR_OFF:
        console.print(
            f"warning: an overlap of {wanted:g} is out of reach for these weights, it is {fitted.overlap:.2f} at the "
            "strongest or weakest noise: give another --posterior.overlap.",
            soft_wrap=True,
            markup=False,
        )
    shown = {key: summary[key] for key in ("seconds", "peak_memory_mib", "random_weights", "median_sigma")}
    _print_summary(out, shown | {"noise": fitted.c, "overlap": fitted.overlap})
    return DONE


def _evaluate(arguments: list[str]) -> int:
    options = parse(Evaluate, "evaluate", arguments)
    from rich.console import Console

    from byov.cli.progress import StageProgress
    from byov.data import fetch
    from byov.evaluation.evaluate import evaluate, results_path
    from byov.evaluation.multiprocess import gathered, help_draws
    from byov.evaluation.unlabelled import evaluate_unlabelled, has_labels
    from byov.inference.load import load
    from byov.training.distributed.processes import started
    from byov.training.loop import Interrupted
    from byov.training.resolve import resolve_device

    if _rank() > 0 and started() == (1, 1):
        return DONE  # of processes that do not know how many they are, one is enough
    _use_threads(options.threads)
    for name, given, takes in (("--ood", options.ood, "source"), ("--align", options.align, "run")):
        if name in arguments and not given:
            raise BadInput(f"{name} needs at least one {takes} after it.")
    if _rank() == 0:
        fetch.check(options.ood)
    console = Console(stderr=True, highlight=False, emoji=False, quiet=_rank() > 0)
    with disk_space_checked(RunFolder(options.run).results), StageProgress(console) as progress:
        try:
            with gathered(resolve_device(options.device), options.threads) as (processes, device):
                if not processes.main:
                    help_draws(processes, device)
                    return DONE
                run = load(options.run, device, processes)
                data = absolute_source(options.data or run.config.data)
                path = results_path(run, data, options.teacher)
                labelled = has_labels(run, data, progress)
                supervised = _supervised(run, options) if labelled else []
                if labelled:
                    results = evaluate(
                        run,
                        data,
                        draws=options.draws,
                        shifts=options.shifts,
                        ood=options.ood,
                        semi=options.semi,
                        finetune=options.finetune,
                        teacher=options.teacher,
                        baseline=options.baseline,
                        supervised=supervised,
                        progress=progress,
                        say=progress.say,
                    )
                else:
                    results = evaluate_unlabelled(
                        run,
                        data,
                        teacher=options.teacher,
                        needs_labels=_needs_labels(options),
                        progress=progress,
                        say=progress.say,
                    )
            _tell_previous(path, results, progress.say)
        except (KeyboardInterrupt, Interrupted):
            progress.say("interrupted: finished sections are kept; the same command goes on.")
            return INTERRUPTED
    if not labelled:
        print(tables.unlabelled(str(options.run), results))
        print(f"{data} has no labels; accuracy and calibration need a source with labels (--data).")
    else:
        print(tables.measures(str(options.run), results))
    for table in (tables.shifted(results), tables.told_apart(results)):
        if table:
            print(f"\n{table}")
    if supervised:
        print(f"\n{_agreement(run, options)}")
    print(f"written: {path}")
    return DONE


def _needs_labels(options: Evaluate) -> tuple[str, ...]:
    """The flags that were given and mean nothing without labels."""
    flags = ("draws", "baseline", "shifts", "ood", "semi", "align", "finetune")
    return tuple(f"--{flag}" for flag in flags if getattr(options, flag))


def _tell_previous(path: Path, results: dict[str, Any], say: Callable[[str], None]) -> None:
    """Says what of an earlier evaluation is kept beside this one; if this has all of it, that goes."""
    from byov.evaluation.evaluate import lost, previous_path

    kept = previous_path(path)
    if not kept.is_file():
        return
    if missing := lost(json.loads(kept.read_text(encoding="utf-8")), results):
        say(f"what an earlier evaluation had more than this one ({', '.join(sorted(missing))}) is in {kept}.")
    else:
        kept.unlink()


def _supervised(run: Any, options: Evaluate) -> list[Any]:
    """The runs to align with; what speaks against it is said before the work."""
    from byov.evaluation.agreement import DRAWS, check
    from byov.inference.load import load

    if not options.align:
        return []
    if len(options.align) > 2:
        raise BadInput("--align takes one or two runs of --method supervised-bbb.")
    if options.teacher:
        raise BadInput("--align asks about draws, and the teacher has none: leave out --align or --teacher.")
    runs = [load(path, str(run.encoder.means.device), run.processes) for path in options.align]
    second = runs[1] if len(runs) == 2 else None
    check(run, runs[0], second, options.data or run.config.data, options.draws or DRAWS)
    return runs


def _agreement(run: Any, options: Evaluate) -> str:
    """Figure 1b of the paper, as a picture and as a table."""
    from byov.evaluation.agreement import alignment_path
    from byov.report.plots.run_figures import draw_alignment

    path: Path = alignment_path(run, options.data or run.config.data)
    found = json.loads(path.read_text(encoding="utf-8"))
    figure = RunFolder(run.folder).figures / f"{path.stem}.png"
    draw_alignment(found, figure)
    return f"{tables.agreement(found)}\nwritten: {figure}"


def _score(arguments: list[str]) -> int:
    options = parse(Score, "score", arguments)
    if _rank() > 0:
        return DONE  # one process is enough
    if options.draws < 1:
        raise BadInput("--draws must be at least 1.")
    from rich.console import Console

    from byov.cli.progress import StageProgress, with_speed
    from byov.data.stream import open_stream
    from byov.evaluation.encoder_check import unfinished
    from byov.inference.load import load
    from byov.report.gallery import write_gallery
    from byov.scoring.one_pass import FastScorer
    from byov.scoring.scorer import Scorer
    from byov.scoring.table import Scored, check_images, check_place, identity, page_path, score_images
    from byov.training.resolve import resolve_device

    _use_threads(options.threads)
    check_place(options.out, options.page)
    _check_folder(options.images)
    run = load(options.run, resolve_device(options.device))
    with StageProgress(Console(stderr=True, highlight=False, emoji=False)) as stages:
        progress, say = with_speed(stages), stages.say
        stream = open_stream(options.images, run.image_shape[-1], progress, say)
        check_images(run, stream, say)
        scorer = (FastScorer if options.fast else Scorer)(run, draws=options.draws, say=say)
        settings = identity(scorer, stream)
        checked = [("training", unfinished(run)), ("encoder check", _encoder_sentence(scorer.reference, progress))]
        if isinstance(scorer, FastScorer):
            progress("learning to predict the uncertainty", 0, 0)
            checked.append(("one pass", f"one pass: {scorer.sentence()}."))
            progress("learning to predict the uncertainty", 1, 1)
        findings = [(name, sentence) for name, sentence in checked if sentence is not None]
        for _, sentence in findings:
            say(sentence)

        def page(scored: Scored) -> None:
            facts = [(name.replace("_", " "), str(value)) for name, value in settings.items()]
            facts += [(name, sentence.removeprefix(f"{name}: ")) for name, sentence in findings]
            write_gallery(scored, stream, page_path(options.out), facts, progress, run.config.calibration)

        try:
            scored = score_images(
                scorer,
                stream,
                options.out,
                settings,
                options.embedding,
                page if options.page else None,
                progress,
                say,
            )
        except KeyboardInterrupt:
            say("interrupted: what is scored is kept; the same command goes on.")
            return INTERRUPTED
    print(tables.oddest(scored.names, scored.oddness, scored.oddness_percentile, scored.uncertainty_percentile))
    if scored.oddness_percentile is not None and run.config.calibration is not None:
        print(tables.percentile_note(run.config.calibration))
    print(f"written: {options.out}" + (f", {page_path(options.out)}" if options.page else ""))
    return DONE


def _encoder_sentence(bank: Any, progress: Callable[[str, int, int], None]) -> str:
    """Whether the encoder is worth trusting; scores that are asked for are given all the same."""
    from byov.evaluation.encoder_check import check_encoder, is_pretrained

    try:
        return check_encoder(bank, progress).sentence(is_pretrained(bank.run))
    except BadInput as error:
        return f"warning: the encoder was not checked: {error}"


def _check_folder(images: str) -> None:
    """Bad input for what can only be a path, but is no folder."""
    path = Path(images).expanduser()
    if path.is_file():
        raise BadInput(f"{images} is a file; give the folder in which the images lie.")
    if ":" not in images and "@" not in images and os.sep in images and not path.exists():
        raise BadInput(f"there is no folder {images}; check the path.")


def _prune(arguments: list[str]) -> int:
    options = parse(Prune, "prune", arguments)
    if _rank() > 0:
        return DONE  # one process is enough
    from rich.console import Console

    from byov.cli.progress import StageProgress, StepProgress
    from byov.inference.load import load
    from byov.pruning.criteria import Pruning
    from byov.pruning.prune import prune
    from byov.report.plots.run_figures import draw_pruning
    from byov.training.loop import Interrupted, Trainer
    from byov.training.resolve import resolve_device

    _use_threads(options.threads)
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
    console = Console(stderr=True, highlight=False, emoji=False)

    def train(trainer: Trainer) -> None:
        stages.bar.stop()  # one bar at a time
        with StepProgress(console, trainer) as progress:
            trainer.say, trainer.on_step = progress.say, progress.on_step
            trainer.run()
        stages.bar.start()

    with disk_space_checked(options.out), StageProgress(console) as stages:
        run = load(options.run, resolve_device(options.device))
        try:
            results = prune(run, options.out, how, options.data, options.curve, stages, stages.say, train)
        except Interrupted as interruption:
            stages.say(f"{interruption}: {options.out} is saved; the same command goes on.")
            return INTERRUPTED
        picture = draw_pruning(results, RunFolder(options.out).figures / "pruning.png")
    print(tables.pruned(results))
    print(f"written: {options.out}, with results/pruning.json and {picture.relative_to(options.out)}")
    return DONE


def _export(arguments: list[str]) -> int:
    options = parse(Export, "export", arguments)
    if _rank() > 0:
        return DONE  # one process is enough
    from byov.export import export
    from byov.inference.load import load

    run = load(options.run)
    with disk_space_checked(options.out or options.run):
        path = export(
            run,
            options.format,
            options.out,
            posterior=options.posterior,
            teacher=options.teacher,
            with_uncertainty=options.with_uncertainty,
        )
    shape, width = ", ".join(map(str, run.image_shape)), run.encoder.module.features
    what = f"embedding (N, {width}), and scores (N)" if options.with_uncertainty else f"features (N, {width})"
    print(f"images (N, {shape}), floats from 0 to 1 -> {what}")
    print(f"written: {path} ({path.stat().st_size:,} bytes)")
    return DONE


def _report(arguments: list[str]) -> int:
    options = parse(Report, "report", arguments)
    if not options.runs:
        raise BadInput("say which runs to report on: `byov report RUN [RUN ...] --out report.html`.")
    from byov.report.page import COLUMNS, summary_rows, write_report
    from byov.report.run_data import load_runs

    with disk_space_checked(options.out):
        path = write_report(options.runs, options.out)
    rows = [(row.name, *(cell.text for cell in row.cells)) for row in summary_rows(load_runs(list(options.runs)))]
    print(tables.grid([("", *(column.title for column in COLUMNS)), *rows], "l" + "r" * len(COLUMNS)))
    print(f"written: {path}")
    return DONE


def _study(arguments: list[str]) -> int:
    options = parse(Study, "study", arguments)
    from byov.studies.framework.lab import Lab, make, make_all

    say = partial(print, file=sys.stderr)
    try:
        launch = shlex.split(options.launch or "")
    except ValueError as error:
        raise BadInput(f"--launch {options.launch!r} is no command ({str(error).lower()}): mend its quotes.") from error
    lab = Lab(options.out, options.scale, options.seeds, options.data, options.jobs, launch, say)
    with disk_space_checked(options.out):
        if options.name != "all":
            print(f"written: {make(options.name, lab)}")
            return DONE
        failed = []
        for name, why in make_all(lab):
            if why is None:
                print(f"written: {lab.place(name)}", flush=True)
            else:
                failed.append(name)
                print(f"not made: {name}: {why}", file=sys.stderr)
    if failed:
        print(f"byov: not all was made: mend what is said of {', '.join(failed)}, and repeat this.", file=sys.stderr)
    return FAILED if failed else DONE


def _ledger(arguments: list[str]) -> int:
    options = parse(Ledger, "ledger", arguments)
    from byov.studies.framework import ledger

    if not options.studies.is_dir():
        raise BadInput(f"there is no folder {options.studies}: give the one that `byov study --out` wrote.")
    with disk_space_checked(options.out):
        found = ledger.write(options.studies, options.out)
    if not any(entry.judged for entry in found):
        print(f"warning: no study was found in {options.studies}: no claim is judged.", file=sys.stderr)
    print(f"{len(found)} claims; written: {options.out}")
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
        print(tables.grid([head, *rows], "llrrlll"))
        print("\n`byov data get NAME` fetches one. Images of your own: folder:PATH (all below a folder) or npz:PATH.")
        return DONE
    if options.name is None:
        raise BadInput("say which source to fetch: `byov data get cifar10` (`byov data list` names them).")
    if options.name == "digits":
        print("digits comes with scikit-learn: nothing to fetch, `byov train --data digits` finds it.")
        return DONE
    from rich.console import Console

    from byov.cli.progress import StageProgress

    with StageProgress(Console(stderr=True, highlight=False, emoji=False)) as progress:
        path = fetch.get(options.name, progress, progress.say)
    print(f"{options.name} is there, its digests are right: {path}")
    return DONE


COMMANDS: dict[str, tuple[type, Callable[[list[str]], int]]] = {
    "train": (Train, _train),
    "evaluate": (Evaluate, _evaluate),
    "score": (Score, _score),
    "prune": (Prune, _prune),
    "export": (Export, _export),
    "report": (Report, _report),
    "study": (Study, _study),
    "ledger": (Ledger, _ledger),
    "data": (Data, _data),
}
