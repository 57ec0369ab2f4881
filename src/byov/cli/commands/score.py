"""`byov score`."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from tyro.conf import Positional, arg

from byov._core.callbacks import Progress
from byov._core.errors import BadInput
from byov.cli import process, tables
from byov.cli.parsing import parse

if TYPE_CHECKING:
    from byov.inference.run import ReferenceSet


@dataclass(frozen=True)
class Options:
    """Find odd images without labels; writes a table (oddness, uncertainty, embedding) and a page to look at.

    If it is interrupted, the same command resumes it.
    """

    run: Annotated[Path, Positional, arg(metavar="RUN")]
    """The run folder."""
    images: Annotated[str, Positional, arg(metavar="IMAGES")]
    """A folder, with all images below it, or a source (`byov data list`)."""
    out: Annotated[Path, arg(metavar="FILE")]
    """The table to write: .parquet, or .csv (without embeddings). Must not exist yet."""
    draws: int = 8
    """Weight draws, for the uncertainty. Runs without random weights do not use them: their uncertainty is the distance
    to the ten nearest reference images."""
    fast: bool = False
    """One forward pass per image: the oddness is exact, the uncertainty is predicted from the features. Weight draws
    are then used once, on the reference images, to fit the prediction."""
    ensemble: Annotated[tuple[Path, ...], arg(metavar="RUN [RUN ...]")] = ()
    """Further runs on the same images, such as one from --init lite1: the uncertainty is the disagreement between the
    draws of all runs. Each run costs its own forward passes."""
    embedding: bool = True
    """Write the embeddings into the Parquet file."""
    page: bool = True
    """Also write FILE.html: the oddest and the most usual images, and near-duplicates."""
    dry_run: bool = False
    """Only estimate memory, disk and time: nothing is written."""
    threads: int | None = None
    """CPU threads. Unset: one per core."""
    device: str = "auto"
    """auto, cpu or cuda."""


def run(arguments: list[str]) -> int:
    options = parse(Options, "score", arguments)
    if process.rank() > 0:
        return process.DONE  # one process is enough
    if options.draws < 1:
        raise BadInput("--draws must be at least 1.")
    if options.fast and options.ensemble:
        raise BadInput("--fast predicts the uncertainty of one run: leave out --ensemble or --fast.")
    from byov.cli.progress import SPEED, StageProgress, with_speed
    from byov.data.sources import open_stream
    from byov.evaluation.encoder_check import unfinished
    from byov.inference.estimate import estimate_use
    from byov.inference.run import load
    from byov.report.gallery import write_gallery
    from byov.scoring.ensemble import EnsembleScorer
    from byov.scoring.one_pass import FastScorer
    from byov.scoring.scores import Scorer
    from byov.scoring.table import Scored, check_images, check_place, identity, locked, page_path, score_images
    from byov.training.resolve import resolve_device

    process.use_threads(options.threads)
    check_place(options.out, options.page)
    _check_folder(options.images)
    if options.dry_run:
        print(estimate_use(options.run, options.images, 1 if options.fast else 1 + options.draws))
        return process.DONE
    opened, *others = (load(folder, resolve_device(options.device)) for folder in (options.run, *options.ensemble))
    with StageProgress(process.console(), SPEED) as stages:
        progress, say = with_speed(stages), stages.say
        if others:
            scorer: Scorer = EnsembleScorer(opened, others, draws=options.draws, say=say)
        else:
            scorer = (FastScorer if options.fast else Scorer)(opened, draws=options.draws, say=say)
        stream = open_stream(options.images, opened.image_shape[-1], progress, say)
        check_images(opened, stream, say)
        lock = locked(options.out)
        settings = identity(scorer, stream)
        checked = [("training", unfinished(opened)), ("encoder check", _encoder_sentence(scorer.reference, progress))]
        for other in scorer.others:
            folder = other.run.folder
            checked += [(f"training of {folder}", unfinished(other.run))]
            checked += [(f"encoder check of {folder}", f"{folder}: {_encoder_sentence(other, progress)}")]
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
            write_gallery(scored, stream, page_path(options.out), facts, progress, opened.config.calibration)

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
            say("interrupted: finished scores are saved; repeat the same command to continue.")
            return process.INTERRUPTED
        finally:
            lock.release()
    print(tables.oddest(scored.names, scored.oddness, scored.oddness_percentile, scored.uncertainty_percentile))
    if scored.oddness_percentile is not None and opened.config.calibration is not None:
        print(tables.percentile_note(opened.config.calibration))
    print(f"written: {options.out}" + (f", {page_path(options.out)}" if options.page else ""))
    return process.DONE


def _encoder_sentence(reference: ReferenceSet, progress: Progress) -> str:
    """Check whether the encoder can be trusted; a check that fails does not prevent scoring."""
    from byov.evaluation.encoder_check import check_encoder, is_pretrained

    try:
        return check_encoder(reference, progress).sentence(is_pretrained(reference.run))
    except BadInput as error:
        return f"warning: the encoder was not checked: {error}"


def _check_folder(images: str) -> None:
    """Refuse what can only be a path but is not a folder."""
    path = Path(images).expanduser()
    if path.is_file():
        raise BadInput(f"{images} is a file; give the folder that holds the images.")
    if ":" not in images and "@" not in images and os.sep in images and not path.exists():
        raise BadInput(f"there is no folder {images}; check the path.")
