"""What is measured of class probabilities and of uncertainties, under the names that evaluation.json has for it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

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
"""Flat: a name with dots, and a number (or None where it is not defined)."""
Scores = dict[str, Tensor]
"""Uncertainties (images,) by name: higher means less certain."""


def class_measures(probabilities: Tensor, labels: Tensor) -> Measures:
    """Accuracy, calibration and, with the top probability for certainty, selective prediction."""
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
    """The reliability diagram: images, mean confidence and accuracy of each bin."""
    return [list(row) for row in reliability_bins(probabilities, labels)]


def errors_of(probabilities: Tensor, labels: Tensor) -> Tensor:
    """(images,) bool."""
    return probabilities.argmax(1) != labels


def selective_measures(scores: Mapping[str, Tensor], errors: Tensor, hits: Tensor | None = None) -> Measures:
    """`selective.SCORE.*`: how well each score finds the errors and, given retrieval's hits, its misses."""
    found: Measures = {}
    for name, score in scores.items():
        found |= below(f"selective.{name}.", selective_prediction(score, errors)._asdict())
        if hits is not None:
            found[f"selective.{name}.r_auroc"] = r_auroc(score, hits)
    return found


def predictive_scores(predictive: Predictive) -> Scores:
    """The uncertainties that class probabilities over draws give."""
    return {
        "max_softmax": max_softmax(predictive.mean),
        "entropy": predictive.entropy,
        "expected_entropy": predictive.expected_entropy,
        "mutual_information": predictive.mutual_information,
        "predictive_std": predictive.predictive_std,
        "predictive_std_classes": predictive.predictive_std_classes,
    }


def predictive_measures(predictive: Predictive, labels: Tensor) -> Measures:
    """Of the mean over draws, as at the means; and the means over images of what the draws differ in."""
    scores = predictive_scores(predictive)
    averages = {name: float(score.mean()) for name, score in scores.items() if name != "max_softmax"}
    return class_measures(predictive.mean, labels) | averages


def ood_measures(inside: Mapping[str, Tensor], outside: Mapping[str, Tensor]) -> Measures:
    """`SCORE.*` for every score: images of the test set against images of another source."""
    found: Measures = {}
    for name, score in outside.items():
        found |= below(f"{name}.", ood_detection(inside[name], score)._asdict())
    return found


def below(prefix: str, measures: Mapping[str, Any]) -> Measures:
    """The measures with a prefix before their names."""
    return {prefix + name: value for name, value in measures.items()}


def strict(measures: Mapping[str, Any]) -> Measures:
    """The same for JSON, which knows no NaN and no infinity: None instead."""
    return {name: _strict(value) for name, value in measures.items()}


def _strict(value: Any) -> Any:
    if isinstance(value, Mapping):
        return strict(value)
    if isinstance(value, list):
        return [_strict(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
