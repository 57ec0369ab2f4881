"""What each section of an evaluation measures: a function per section, of an encoder on a source with labels.

Probe and neighbours, uncertainty at the means, few labels, draws, levels of the network, out-of-distribution (OOD)
images, shifts; and the measures that they share, under their names in evaluation.json. Fine-tuning is in finetune.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from byov._core.callbacks import Say
from byov._core.errors import BadInput
from byov._core.randomness import RandomStream, permutation
from byov.data.shifts import SEVERITIES, SHIFTS, shifted
from byov.data.sources import open_source
from byov.evaluation.predictive import (
    Drawn,
    Level,
    Scores,
    below,
    pass_draws,
    predict_classes,
    predict_levels,
    predictive_scores,
    scores_at_means,
)
from byov.evaluation.probe import Subject, plain_name
from byov.inference.inputs import in_channels, spread
from byov.inference.run import features_of
from byov.metrics import (
    Predictive,
    adaptive_ece,
    auroc,
    brier,
    brier_decomposition,
    classwise_ece,
    ece,
    fit_temperature,
    knn_accuracy,
    max_softmax,
    nll,
    ood_detection,
    r_auroc,
    recall_at_1,
    reliability_bins,
    retrieval_hits,
    selective_prediction,
    top_k_accuracy,
)
from byov.metrics.resampling import image_rows

KNN_K, KNN_TEMPERATURE = 20, 0.07  # DINO's
HELD_OUT = 5  # one image in this many is held out to fit the temperature on
PERCENTS = (1, 10)  # of the labels, in semi-supervised learning
LEVEL_IMAGES = 2000  # at most: draws of the heads differ from those of the encoder alone, so this is a separate pass
OOD_IMAGES = 2000  # per source, at most: an AUROC of .9 is then known to .005
SHIFT_IMAGES = 10_000  # at most, at the means
SHIFT_DRAWN_IMAGES = 2000  # at most, with draws
SHIFT_DRAWS = 5  # at most: 2,000 images through 5 draws take as long as 10,000 at the means
SHIFT_SEED = 0


# ------------------------------------------------------------------------------------------------------- at the means


def probe_measures(subject: Subject) -> Measures:
    """Measure the probe at the means, and neighbours among the features."""
    data, probe = subject.data, subject.probe
    known, asked = (subject.train_features, data.train_labels), (subject.test_features, data.test_labels)
    return class_measures(probe.probabilities(subject.test_features), data.test_labels) | {
        "knn": knn_accuracy(*known, *asked, k=KNN_K, temperature=KNN_TEMPERATURE),
        "recall_at_1": recall_at_1(*asked) if len(data.test) > 1 else None,
        "probe_l2": probe.l2,
        "probe_gradient_norm": probe.gradient_norm,
        "probe_converged": probe.converged,
    }


def uncertainty_section(subject: Subject) -> Section:
    """Measure the reliability diagram, scaled confidence, and what each uncertainty at the means is worth."""
    labels = subject.data.test_labels
    probabilities = subject.probe.probabilities(subject.test_features)
    scores = scores_at_means(subject, subject.test_images, subject.test_features)
    hits = retrieval_hits(subject.test_features, labels) if len(labels) > 1 else None
    measures = {"bins": bins_of(probabilities, labels)} | scaled_measures(subject)
    measures |= selective_measures(scores, errors_of(probabilities, labels), hits)
    rows = below("means.", image_rows(probabilities, labels)) | below("score.", scores)
    return Section(measures, rows if hits is None else rows | {"retrieved": hits.double()})


def scaled_measures(subject: Subject) -> Measures:
    """Measure the baseline of calibration: a probe on a part of the images, and one temperature fitted on the rest.

    The temperature does not fit the probe on all images, which may have another L2 and so another confidence. Compare
    `scaled.*` with `unscaled.*`, the same probe without it.
    """
    data = subject.data
    held = held_out(data.train_labels)
    if not held.any():
        return {"temperature": None}
    features, labels = subject.train_features, data.train_labels
    probe = subject.fit(features[~held], labels[~held])
    temperature = fit_temperature(probe.logits(features[held]), labels[held])
    logits = probe.logits(subject.test_features)
    found: Measures = {"temperature": temperature}
    for prefix, divisor in (("unscaled.", 1.0), ("scaled.", temperature)):
        found |= below(prefix, class_measures((logits / divisor).softmax(1).float(), data.test_labels))
    return found


def held_out(labels: Tensor) -> Tensor:
    """Return (images,) bool: one image in HELD_OUT of every class, none of a class that has fewer."""
    held = torch.zeros(len(labels), dtype=torch.bool)
    for order in _orders(labels).values():
        held[order[: len(order) // HELD_OUT]] = True
    return held


def label_lists(labels: Tensor) -> dict[int, Tensor]:
    """Return, for each percentage, the sorted images with known labels: equally many of each class, at least one.

    A class with fewer images gives all it has. The lists depend on the labels alone; the longer contains the shorter.
    """
    orders = _orders(labels)
    found = {}
    for percent in PERCENTS:
        each = max(1, round(len(labels) * percent / 100 / len(orders)))
        found[percent] = torch.cat([order[:each] for order in orders.values()]).sort().values
    return found


def semi_measures(subject: Subject) -> Measures:
    """Measure `semi.PERCENT.*`: the probe fitted only to the images of each list."""
    data = subject.data
    found: Measures = {}
    for percent, chosen in label_lists(data.train_labels).items():
        probe = subject.fit(subject.train_features[chosen], data.train_labels[chosen])
        measures = class_measures(probe.probabilities(subject.test_features), data.test_labels)
        measures |= {"labels": len(chosen), "probe_l2": probe.l2}
        found |= below(f"semi.{percent}.", measures)
    return found


def _orders(labels: Tensor) -> dict[int, Tensor]:
    """The images of each class, in a separate random order."""
    classes = {int(c): (labels == c).nonzero()[:, 0] for c in torch.unique(labels)}
    return {c: images[permutation(len(images), RandomStream.CLASS_LISTS, c)] for c, images in classes.items()}


# ---------------------------------------------------------------------------------------------------------- over draws


def draws_section(subject: Subject, drawn: Drawn) -> Section:
    """Measure `draws.*`, `draws_unaligned.*`, and what the label-free scores over draws are worth."""
    labels = subject.data.test_labels
    errors = errors_of(subject.probe.logits(subject.test_features), labels)
    hits = retrieval_hits(subject.test_features, labels) if len(labels) > 1 else None
    found = selective_measures(drawn.label_free_scores(), errors, hits)
    rows = below("score.", drawn.scores())
    for prefix, predictive in (("draws.", drawn.aligned), ("draws_unaligned.", drawn.unaligned)):
        measures = predictive_measures(predictive, labels) | {"bins": bins_of(predictive.mean, labels)}
        measures |= selective_measures(predictive_scores(predictive), errors_of(predictive.mean, labels), hits)
        found |= below(prefix, measures)
        rows |= below(prefix, image_rows(predictive.mean, labels))
    return Section(found, rows)


def level_measures(subject: Subject, draws: int) -> Measures:
    """Measure `levels.NAME.KIND.*`: the mean variance over draws, and whether an image's variance detects errors."""
    assert subject.reference is not None, "draws are the run's own encoder's"
    chosen = spread(len(subject.data.test), LEVEL_IMAGES)
    features, labels = subject.test_features[chosen], subject.data.test_labels[chosen]
    errors = errors_of(subject.probe.logits(features), labels)

    def progress(_: str, done: int, total: int) -> None:
        subject.progress(f"levels: {len(chosen):,} images through {draws} draws", done, total)

    levels = predict_levels(subject.reference, subject.test_images[chosen], draws, resumable=True, progress=progress)
    found: Measures = {}
    for name, level in levels.items():
        for kind, outputs in zip(Level._fields, level, strict=True):
            variance = outputs.variance.mean(1)
            one = draws == 1  # which has no variance
            found[f"levels.{name}.{kind}.variance"] = None if one else float(variance.mean())
            found[f"levels.{name}.{kind}.error_auroc"] = None if one else auroc(variance, errors)
    return found


# -------------------------------------------------------------------------------------------- out of distribution


def check_sources(specs: Sequence[str], side: int) -> None:
    """Raise BadInput for sources that do not exist, or share a name, before anything is computed."""
    for spec in specs:
        open_source(spec, side)
    names = [plain_name(spec) for spec in specs]
    twice = next((spec for spec, name in zip(specs, names, strict=True) if names.count(name) > 1), None)
    if twice is not None:
        raise BadInput(f"--ood {twice} has the same name as another source: give it once, or rename it.")


def ood_images(subject: Subject, spec: str, say: Say) -> Tensor:
    """Load images of a source (its test images, if it has some), in the run's channels."""
    run, source = subject.run, open_source(spec, subject.side)
    images = source.load(source.default, subject.progress, say).images
    images, converted = in_channels(run, images[spread(len(images), OOD_IMAGES)])
    run.check(images)
    if converted:
        say(f"{spec}: {converted}, as {run.folder} takes them.")
    return images


def ood_source_measures(
    subject: Subject, spec: str, images: Tensor, draws: int, inside: Mapping[str, Tensor]
) -> Measures:
    """Measure `ood.NAME.SCORE.*`: how well each score tells these images from the test images."""
    scores: Scores = scores_at_means(subject, images, subject.features(images, f"images of {spec}"))
    if draws:
        scores |= pass_draws(subject, images, draws, spec).scores()
    return below(f"ood.{plain_name(spec)}.", ood_measures(inside, scores) | {"images": len(images)})


# ------------------------------------------------------------------------------------------------------------- shifts


def shift_names(subject: Subject) -> list[str]:
    """Return the shifts that apply to images of these channels."""
    return [name for name, shift in SHIFTS.items() if shift.applies_to(subject.data.test.images.shape[1])]


def shift_measures(subject: Subject, name: str, draws: int, advance: Callable[[int], None]) -> Measures:
    """Measure `shifts.NAME.SEVERITY.*`: accuracy and calibration under a shift, and with draws also `.draws.*`.

    `.at_means.*` is on the images of the draws, so that a run with draws can be compared with one without.
    """
    chosen = spread(len(subject.data.test), SHIFT_IMAGES)
    images, labels = subject.test_images[chosen], subject.data.test_labels[chosen]
    drawn = spread(len(chosen), SHIFT_DRAWN_IMAGES)
    found: Measures = {}
    for severity in SEVERITIES:
        now = shifted(images, chosen, name, severity, SHIFT_SEED)
        probabilities = subject.probe.probabilities(features_of(subject.encoder, now))
        measures = class_measures(probabilities, labels)
        measures |= below("at_means.", class_measures(probabilities[drawn], labels[drawn]))
        if draws and subject.reference is not None:
            over = predict_classes(subject.reference, subject.probe, now[drawn], min(draws, SHIFT_DRAWS)).aligned
            measures |= below("draws.", predictive_measures(over, labels[drawn]))
        found |= below(f"shifts.{name}.{severity}.", measures)
        advance(severity)
    return found


def shift_settings(subject: Subject, draws: int) -> Measures:
    """What the numbers depend on."""
    images = min(len(subject.data.test), SHIFT_IMAGES)
    found: Measures = {
        "images": images,
        "seed": SHIFT_SEED,
        "side": subject.side,
        "drawn_images": min(images, SHIFT_DRAWN_IMAGES),
    }
    return found | ({"draws": min(draws, SHIFT_DRAWS)} if draws else {})


Measures = dict[str, Any]
"""Flat: names with dots; numbers, or None where undefined."""


class Section(NamedTuple):
    """What one section of an evaluation found."""

    measures: Measures
    rows: Scores = {}  # noqa: RUF012
    """A number for each test image, by name."""


def class_measures(probabilities: Tensor, labels: Tensor) -> Measures:
    """Measure accuracy, calibration and, with the top probability as confidence, selective prediction."""
    parts = brier_decomposition(probabilities, labels)
    return {
        "top1": top_k_accuracy(probabilities, labels, 1),
        "top5": top_k_accuracy(probabilities, labels, 5),
        "ece": ece(probabilities, labels),
        "adaptive_ece": adaptive_ece(probabilities, labels),
        "classwise_ece": classwise_ece(probabilities, labels),
        "brier": brier(probabilities, labels),
        "reliability": parts.reliability,
        "reliability_jensen": parts.reliability_jensen,
        "resolution": parts.resolution,
        "within_group": parts.within_group,
        "uncertainty": parts.uncertainty,
        "nll": nll(probabilities, labels),
        **selective_prediction(max_softmax(probabilities), errors_of(probabilities, labels))._asdict(),
    }


def bins_of(probabilities: Tensor, labels: Tensor) -> list[list[float]]:
    """Return the reliability diagram: images, mean confidence and accuracy of each bin."""
    return [list(row) for row in reliability_bins(probabilities, labels)]


def errors_of(probabilities: Tensor, labels: Tensor) -> Tensor:
    """Return whether each image is misclassified, (images,) bool."""
    return probabilities.argmax(1) != labels


def selective_measures(scores: Mapping[str, Tensor], errors: Tensor, hits: Tensor | None = None) -> Measures:
    """Measure `selective.SCORE.*`: how well each score detects errors and, given retrieval hits, its misses."""
    found: Measures = {}
    for name, score in scores.items():
        found |= below(f"selective.{name}.", selective_prediction(score, errors)._asdict())
        if hits is not None:
            found[f"selective.{name}.r_auroc"] = r_auroc(score, hits)
    return found


def predictive_measures(predictive: Predictive, labels: Tensor) -> Measures:
    """Measure the mean over draws like a prediction at the means, and average the uncertainties over images."""
    scores = predictive_scores(predictive)
    averages = {name: float(score.mean()) for name, score in scores.items() if name != "max_softmax"}
    return class_measures(predictive.mean, labels) | averages


def ood_measures(inside: Mapping[str, Tensor], outside: Mapping[str, Tensor]) -> Measures:
    """Measure `SCORE.*` for every score: how well it tells images of another source from the test images."""
    found: Measures = {}
    for name, score in outside.items():
        found |= below(f"{name}.", ood_detection(inside[name], score)._asdict())
    return found


def strict(measures: Mapping[str, Any]) -> Measures:
    """Replace NaN and infinity, which JSON lacks, by None."""
    return {name: _strict(value) for name, value in measures.items()}


def _strict(value: Any) -> Any:
    if isinstance(value, Mapping):
        return strict(value)
    if isinstance(value, list):
        return [_strict(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
