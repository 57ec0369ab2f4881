"""Measures of class probabilities and of uncertainties, under their names in evaluation.json."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor

from byov.metrics import (
    Predictive,
    adaptive_ece,
    brier,
    brier_decomposition,
    classwise_ece,
    ece,
    max_softmax,
    nll,
    ood_detection,
    r_auroc,
    reliability_bins,
    selective_prediction,
    top_k_accuracy,
)

Measures = dict[str, Any]
"""Flat: names with dots; numbers, or None where undefined."""
Scores = dict[str, Tensor]
"""Uncertainties (images,) by name: higher means less certain."""


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


def predictive_scores(predictive: Predictive) -> Scores:
    """Return the uncertainties that class probabilities over draws give."""
    return {
        "max_softmax": max_softmax(predictive.mean),
        "entropy": predictive.entropy,
        "expected_entropy": predictive.expected_entropy,
        "mutual_information": predictive.mutual_information,
        "predictive_std": predictive.predictive_std,
        "predictive_std_classes": predictive.predictive_std_classes,
    }


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


def below(prefix: str, measures: Mapping[str, Any]) -> Measures:
    """Return the measures with a prefix before their names."""
    return {prefix + name: value for name, value in measures.items()}


def strict(measures: Mapping[str, Any]) -> Measures:
    """Replace NaN and infinity, which JSON lacks, by None."""
    return {name: _strict(value) for name, value in measures.items()}


def _strict(value: Any) -> Any:
    if isinstance(value, Mapping):
        return strict(value)
    if isinstance(value, list):
        return [_strict(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
