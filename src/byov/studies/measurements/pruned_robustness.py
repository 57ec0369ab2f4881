"""Whether a pruned encoder still knows its limits: its probe on shifted images, and images of another kind."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import mean

import torch
from torch import Tensor

from byov._core.callbacks import Say
from byov._core.files import without_prefix
from byov.data.shifts import SHIFTS, shifted
from byov.evaluation.labelled import Subject
from byov.evaluation.named_metrics import Measures
from byov.evaluation.ood import outside_images, plain_name
from byov.evaluation.probe import Probe
from byov.evaluation.shift_robustness import SEED, shift_names
from byov.inference.features import features_of
from byov.inference.inputs import spread
from byov.inference.load import Run
from byov.metrics import ece, knn_distance, max_softmax, ood_detection, top_k_accuracy
from byov.metrics.resampling import paired_top1
from byov.pruning.criteria import By, drop_weights, weight_scores
from byov.pruning.prune import encoder_of, without
from byov.scoring.scorer import is_deterministic
from byov.studies.measurements.snr_components import tested_subject

SEVERITIES = (1, 3, 5)
IMAGES = 1000  # test images at most, and of another source
UNPRUNED = "unpruned"


def robust_rows(run: Run, sparsity: float, ood: Sequence[str], say: Say) -> list[Measures]:
    """A row for the encoder as it is and pruned by each score, through the old probe (`kept`) and one `refitted`.

    `shifted.*` are averages over shifts and severities. `shifted.top1.difference` is to the encoder pruned by
    magnitude, through the same probe, with its standard error over images. OOD: AUROC, by the distance to the nearest
    training images (`knn`) and by one less the probe's top probability (`softmax`).
    """
    subject = tested_subject(run, say, IMAGES)
    outside = {plain_name(spec): _some(outside_images(subject, spec, say)) for spec in ood}
    pruned = _pruned(subject, sparsity)
    seen = {name: _seen(each, outside) for name, each in pruned.items()}
    rows = []
    for name, each in pruned.items():
        for how, probe in (("kept", subject.probe), ("refitted", each.probe)):
            beside = subject.probe if how == "kept" else pruned["magnitude"].probe
            against = _shifted(seen["magnitude"], beside)
            found = _measures(each, seen[name], probe, against)
            rows.append({"pruned": name, "probe": how, **found})
    return rows


def robust_settings(sparsity: float, ood: Sequence[str]) -> Measures:
    """What the rows hang on."""
    shifts = {"shifts": list(SHIFTS), "severities": SEVERITIES, "shift_seed": SEED}
    return {"sparsity": sparsity, "ood": list(ood), "images": IMAGES, **shifts}


def _some(images: Tensor) -> Tensor:
    return images[spread(len(images), IMAGES)]


def _pruned(subject: Subject, sparsity: float) -> dict[str, Subject]:
    """The run's encoder, and its copies without the lowest part of every layer's weights."""
    posterior, encoder = subject.run.learner.posterior, encoder_of(subject.run)
    scores: tuple[By, ...] = ("magnitude",) if is_deterministic(subject.run) else ("snr", "magnitude")
    masks = {by: drop_weights(weight_scores(posterior, by), sparsity) for by in scores}
    copies = {str(by): replace(subject, encoder=without(encoder, mask)) for by, mask in masks.items()}
    return {UNPRUNED: subject} | copies


class Seen(dict[str, Tensor]):
    """Features by name: `test`, `shift.NAME.SEVERITY`, `ood.SOURCE`."""

    def below(self, prefix: str) -> dict[str, Tensor]:
        return without_prefix(self, prefix)


def _seen(subject: Subject, outside: dict[str, Tensor]) -> Seen:
    """All features that the measures need."""
    images = subject.test_images
    ids = torch.arange(len(images))
    seen = Seen(test=subject.test_features)
    for name in shift_names(subject):
        for severity in SEVERITIES:
            now = shifted(images, ids, name, severity, SEED)
            seen[f"shift.{name}.{severity}"] = features_of(subject.encoder, now)
    return Seen(seen | {f"ood.{name}": subject.features(others, name) for name, others in outside.items()})


def _shifted(seen: Seen, probe: Probe) -> Tensor:
    """(shifts and severities, images, classes): what a probe says of the shifted copies of the test images."""
    return torch.stack([probe.probabilities(features) for features in seen.below("shift.").values()])


def _measures(subject: Subject, seen: Seen, probe: Probe, against: Tensor) -> Measures:
    labels = subject.data.test_labels
    clean = probe.probabilities(seen["test"])
    moved = _shifted(seen, probe)
    difference, error = paired_top1(moved, against, labels)
    found: Measures = {
        "top1": top_k_accuracy(clean, labels, 1),
        "ece": ece(clean, labels),
        "shifted.top1": mean(top_k_accuracy(p, labels, 1) for p in moved),
        "shifted.ece": mean(ece(p, labels) for p in moved),
        "shifted.top1.difference": difference,
        "shifted.top1.error": error,
    }
    for source, features in seen.below("ood.").items():
        scores = [max_softmax(clean), max_softmax(probe.probabilities(features))]
        found[f"ood.{source}.softmax"] = ood_detection(*scores).auroc
        scores = [knn_distance(each, subject.train_features) for each in (seen["test"], features)]
        found[f"ood.{source}.knn"] = ood_detection(*scores).auroc
    return found
