"""`byov evaluate`."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from tyro.conf import Positional, arg

from byov._core.callbacks import Say
from byov._core.errors import BadInput
from byov._core.files import disk_space_checked, read_json
from byov.cli import process, tables
from byov.cli.parsing import parse
from byov.config import absolute_source
from byov.runs.folder import RunFolder

if TYPE_CHECKING:
    from byov.inference.run import Run

NEED_LABELS = ("draws", "baseline", "shifts", "ood", "semi", "align", "finetune")  # options


@dataclass(frozen=True)
class Options:
    """Measure a run on images, best with labels; writes RUN/results/evaluation.json.

    A linear probe and nearest neighbours, calibration, and the quality of each uncertainty, compared with an untrained
    encoder and raw pixels. Without labels: whether the run finds an image from an augmented view of it. If it is
    interrupted, the same command resumes it.
    """

    run: Annotated[Path, Positional, arg(metavar="RUN")]
    """The run folder."""
    data: Annotated[str | None, arg(metavar="SOURCE")] = None
    """Source of the images, best with labels. Unset: the source the run was trained on."""
    draws: Annotated[int, arg(metavar="K")] = 0
    """Weight draws, for the posterior predictive and the uncertainties that need it. 0: none. Runs without random
    weights do not use them."""
    baseline: Annotated[Path | None, arg(metavar="RUN2")] = None
    """Also report the difference to this run; it is evaluated first if it has not been."""
    shifts: bool = False
    """Also evaluate under fifteen corruptions at five severities each."""
    ood: Annotated[tuple[str, ...], arg(metavar="SOURCE [SOURCE ...]")] = ()
    """Also measure out-of-distribution detection against the images of these sources."""
    semi: bool = False
    """Also train probes with 1% and 10% of the labels."""
    align: Annotated[tuple[Path, ...], arg(metavar="RUN [RUN]")] = ()
    """Also correlate the per-image uncertainty with that of a supervised-bbb run on the same data; a second such run,
    with another seed, shows how well two of them agree."""
    finetune: bool = False
    """Also fine-tune all weights on the labels for a few epochs; the run itself is not changed."""
    teacher: bool = False
    """Evaluate the teacher's encoder instead of the student's."""
    dry_run: bool = False
    """Only estimate memory, disk and time: nothing is written."""
    threads: int | None = None
    """CPU threads. Unset: one per core, or each process's share of the cores."""
    device: str = "auto"
    """auto, cpu or cuda."""


def run(arguments: list[str]) -> int:
    options = parse(Options, "evaluate", arguments)
    from byov.cli.progress import StageProgress
    from byov.data import fetch
    from byov.evaluation.evaluate import evaluate, results_path
    from byov.evaluation.unlabelled import evaluate_unlabelled, has_labels
    from byov.inference.estimate import estimate_use
    from byov.inference.run import load
    from byov.training.distributed.processes import joined, started
    from byov.training.loop import Interrupted
    from byov.training.resolve import resolve_device

    if process.rank() > 0 and started() == (1, 1):
        return process.DONE  # started together, but not as a group: one is enough
    process.use_threads(options.threads)
    for name, given, takes in (("--ood", options.ood, "source"), ("--align", options.align, "run")):
        if name in arguments and not given:
            raise BadInput(f"{name} needs at least one {takes} after it.")
    if process.rank() == 0:
        fetch.check(options.ood)
    if options.dry_run:
        # The run's encoder, the untrained one, the draws on the test images, and 15 shifts at 5 severities of these.
        passes = 2 + (options.draws + 75 * options.shifts) * 0.2 + 15 * options.finetune
        print(estimate_use(options.run, options.data, passes))
        return process.DONE
    with disk_space_checked(RunFolder(options.run).results), StageProgress(process.console()) as progress:
        try:
            with joined(resolve_device(options.device), options.threads) as (processes, device):
                with processes.one_voice():
                    opened = load(options.run, device, processes)
                    data = absolute_source(options.data or opened.config.data)
                    path = results_path(opened, data, options.teacher)
                    labelled = has_labels(opened, data, progress)
                    supervised = _supervised(opened, options) if labelled else []
                if labelled:
                    results = evaluate(
                        opened,
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
                        opened,
                        data,
                        teacher=options.teacher,
                        needs_labels=tuple(f"--{option}" for option in NEED_LABELS if getattr(options, option)),
                        progress=progress,
                        say=progress.say,
                    )
            if not processes.main:
                return process.DONE
            _mention_previous(path, results, progress.say)
        except (KeyboardInterrupt, Interrupted):
            progress.say("interrupted: finished sections are saved; repeat the same command to continue.")
            return process.INTERRUPTED
    if labelled:
        print(tables.measures(str(options.run), results))
    else:
        print(tables.unlabelled(str(options.run), results))
        print(f"{data} has no labels; accuracy and calibration need a source with labels (--data).")
    for table in (tables.shifted(results), tables.ood(results)):
        if table:
            print(f"\n{table}")
    if supervised:
        print(f"\n{_agreement(opened, options)}")
    print(f"written: {path}")
    return process.DONE


def _mention_previous(path: Path, results: dict[str, Any], say: Say) -> None:
    """Point to the previous evaluation if it has more than this one; otherwise delete it."""
    from byov.evaluation.evaluate import lost, previous_path

    saved = previous_path(path)
    if not saved.is_file():
        return
    try:
        before = read_json(saved)
    except ValueError:  # nothing in it can be used
        before = {}
    if missing := lost(before, results):
        say(f"results of an earlier evaluation that this one does not have ({', '.join(sorted(missing))}): {saved}.")
    else:
        saved.unlink()


def _supervised(opened: Run, options: Options) -> list[Run]:
    """Open the runs of --align; what rules them out is reported before the work starts."""
    from byov.evaluation.agreement import DRAWS, check
    from byov.inference.run import load

    if not options.align:
        return []
    if len(options.align) > 2:
        raise BadInput("--align takes one or two runs of --method supervised-bbb.")
    if options.teacher:
        raise BadInput("--align compares weight draws, and the teacher has none: leave out --align or --teacher.")
    runs = [load(path, str(opened.encoder.means.device), opened.processes) for path in options.align]
    second = runs[1] if len(runs) == 2 else None
    check(opened, runs[0], second, options.data or opened.config.data, options.draws or DRAWS)
    return runs


def _agreement(opened: Run, options: Options) -> str:
    """Draw Figure 1b of the paper, and return its numbers as a table."""
    from byov.evaluation.agreement import alignment_path
    from byov.report.plots.run_figures import draw_alignment

    path: Path = alignment_path(opened, options.data or opened.config.data)
    found = json.loads(path.read_text(encoding="utf-8"))
    figure = RunFolder(opened.folder).figures / f"{path.stem}.png"
    draw_alignment(found, figure)
    return f"{tables.agreement(found)}\nwritten: {figure}"
