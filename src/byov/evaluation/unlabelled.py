"""`byov evaluate` on images without labels: whether the encoder finds an image from a view of it, and its spread."""

from __future__ import annotations

from torch import Tensor, nn

from byov import __version__
from byov._core.callbacks import Progress, Say, say_on_stderr
from byov._core.errors import BadInput
from byov._core.files import write_json
from byov.config import absolute_source, same_source
from byov.data.sources import KINDS, open_source
from byov.evaluation.encoder_check import (
    LEAST,
    PIXELS,
    REFERENCES,
    EncoderCheck,
    check_encoder,
    check_on_images,
    is_pretrained,
)
from byov.evaluation.evaluate import keep_previous, median_sigma, results_path, weights_digest
from byov.evaluation.measures import Measures, strict
from byov.inference.inputs import in_channels, spread
from byov.inference.run import ReferenceSet, Run, features_of
from byov.training.monitors import effective_rank, feature_std

IMAGES = 2000  # at most, for the spread of the features: an SVD of more is slow


def has_labels(run: Run, data: str, progress: Progress = lambda what, done, total: None) -> bool:
    """Whether any split of a source has labels. A folder is listed for it, not decoded."""
    if data.partition(":")[0] not in KINDS:
        return True  # all sources known by name have labels
    source = open_source(data, run.image_shape[-1])
    outlines = (source.outline(split, progress) or source.load(split).outline for split in source.splits)
    return any(outline.labelled for outline in outlines)


def evaluate_unlabelled(
    run: Run,
    data: str | None = None,
    *,
    teacher: bool = False,
    needs_labels: tuple[str, ...] = (),
    progress: Progress = lambda what, done, total: None,
    say: Say = say_on_stderr,
) -> Measures:
    """Measure a run on a source without labels (its own by default) and write `results/evaluation.json`.

    Args:
        run: An opened run.
        data: The source; its test images where it has some.
        teacher: Measure the teacher's encoder instead of the student's.
        needs_labels: Flags that the user gave although they need labels.
        progress: Called with the step and its progress.
        say: Called with a sentence for the user.

    Returns:
        Flat keys: `retrieval.encoder`, `retrieval.untrained`, `retrieval.pixels`, `effective_rank`, `feature_std`, ...

    Raises:
        BadInput: If `needs_labels` has any, or the images do not fit the run.
    """
    data = absolute_source(data or run.config.data)
    if needs_labels:
        raise BadInput(
            f"{data} has no labels, which {' and '.join(needs_labels)} need{'s' * (len(needs_labels) == 1)}: "
            "leave out what needs labels, or give a source that has some with --data."
        )
    encoder = run.teacher_encoder() if teacher else run.encoder
    source = open_source(data, run.image_shape[-1])
    loaded = run.processes.first_then_others(lambda: source.load(source.default, progress, say))
    images, converted = in_channels(run, loaded.images)
    run.check(images)
    if len(images) < 2:
        raise BadInput(f"{data} has {len(images)} image: at least 2 are needed.")
    if converted:
        say(f"{data}: {converted}, as {run.folder} takes them.")
    own = same_source(data, run.config.data)
    if own and not teacher:
        check = check_encoder(ReferenceSet(run), progress)  # on images held out of training
    else:
        check = check_on_images(run, encoder, images, not own or source.default == "test", progress)
    say(check.sentence(is_pretrained(run)))
    measures: Measures = {"labels": False} | _check_measures(check)
    some = images[spread(len(images), IMAGES)]
    features = _features(run, encoder, some, progress)
    measures |= {"effective_rank": effective_rank(features), "feature_std": feature_std(features)}
    measures["median_sigma"] = median_sigma(run)
    measures["settings"] = {
        "byov": __version__,
        "run": str(run.folder),
        "step": run.step,
        "weights": weights_digest(run),
        "data": data,
        "test_images": len(images),
        "spread_images": len(some),
        "channels": converted or "as they are",
        "encoder": "teacher" if teacher else "student at its means",
        "retrieval": {"references": REFERENCES, "pixels": PIXELS, "least_images": LEAST, "held_out": check.held_out},
        "draws": 0,
    }
    path, measures = results_path(run, data, teacher), strict(measures)
    if run.processes.main:
        keep_previous(path, measures)
        path.with_suffix(".safetensors").unlink(missing_ok=True)  # rows of an evaluation with labels
        write_json(path, measures)
    return measures


def _check_measures(check: EncoderCheck) -> Measures:
    return {
        "retrieval.encoder": check.encoder,
        "retrieval.untrained": check.untrained,
        "retrieval.pixels": check.pixels,
        "retrieval.over_untrained_interval": list(check.over_untrained),
        "retrieval.over_pixels_interval": list(check.over_pixels),
        "retrieval.images": check.images,
        "retrieval.views": check.views,
        "retrieval.trusted": check.trusted,
    }


def _features(run: Run, encoder: nn.Module, images: Tensor, progress: Progress) -> Tensor:
    done, what = 0, f"features of {len(images):,} images"

    def advance(count: int) -> None:
        nonlocal done
        done += count
        progress(what, done, len(images))

    return features_of(encoder, images, advance=advance, size=run.image_shape[-1])
