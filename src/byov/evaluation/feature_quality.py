"""What a linear probe and neighbours make of frozen features: all labels, 1% and 10% of them, and scaled confidence."""

from __future__ import annotations

import torch
from torch import Tensor

from byov._core.randomness import RandomStream, permutation
from byov.evaluation.labelled import Subject
from byov.evaluation.named_metrics import Measures, below, bins_of, class_measures, errors_of, selective_measures
from byov.evaluation.partial_results import Section
from byov.evaluation.per_image_uncertainty import scores_at_means
from byov.metrics import fit_temperature, knn_accuracy, recall_at_1, retrieval_hits
from byov.metrics.resampling import image_rows

KNN_K, KNN_TEMPERATURE = 20, 0.07  # DINO's
HELD_OUT = 5  # one image in so many is held out to fit the temperature on
PERCENTS = (1, 10)  # of the labels, in semi-supervised learning


def probe_measures(subject: Subject) -> Measures:
    """Of the probe at the means, and of neighbours among the features."""
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
    """Of the run itself: the reliability diagram, scaled confidence, and what each score at the means is worth."""
    labels = subject.data.test_labels
    probabilities = subject.probe.probabilities(subject.test_features)
    scores = scores_at_means(subject, subject.test_features)
    hits = retrieval_hits(subject.test_features, labels) if len(labels) > 1 else None
    measures = {"bins": bins_of(probabilities, labels)} | scaled_measures(subject)
    measures |= selective_measures(scores, errors_of(probabilities, labels), hits)
    rows = below("means.", image_rows(probabilities, labels)) | below("score.", scores)
    return Section(measures, rows if hits is None else rows | {"retrieved": hits.double()})


def scaled_measures(subject: Subject) -> Measures:
    """The baseline of calibration: a probe on a part of the images, and one temperature fitted on the rest.

    The temperature is of no use to the probe on all images, which may have another L2 and so another confidence: what
    it does is the difference to the same probe without it.
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
    """(images,) bool: one image in HELD_OUT of every class, none of a class that has fewer."""
    held = torch.zeros(len(labels), dtype=torch.bool)
    for order in _orders(labels).values():
        held[order[: len(order) // HELD_OUT]] = True
    return held


def label_lists(labels: Tensor) -> dict[int, Tensor]:
    """For each percentage the sorted images whose labels are known: as many of each class, at least one.

    A class that is short of images gives all it has. The lists hang on the labels alone, and the longer holds the
    shorter.
    """
    orders = _orders(labels)
    found = {}
    for percent in PERCENTS:
        each = max(1, round(len(labels) * percent / 100 / len(orders)))
        found[percent] = torch.cat([order[:each] for order in orders.values()]).sort().values
    return found


def semi_measures(subject: Subject) -> Measures:
    """`semi.PERCENT.*`: the probe fitted to the images of each list alone."""
    data = subject.data
    found: Measures = {}
    for percent, chosen in label_lists(data.train_labels).items():
        probe = subject.fit(subject.train_features[chosen], data.train_labels[chosen])
        measures = class_measures(probe.probabilities(subject.test_features), data.test_labels)
        measures |= {"labels": len(chosen), "probe_l2": probe.l2}
        found |= below(f"semi.{percent}.", measures)
    return found


def _orders(labels: Tensor) -> dict[int, Tensor]:
    """The images of each class that there is, in a random order of their own."""
    classes = {int(c): (labels == c).nonzero()[:, 0] for c in torch.unique(labels)}
    return {c: images[permutation(len(images), RandomStream.CLASS_LISTS, c)] for c, images in classes.items()}
