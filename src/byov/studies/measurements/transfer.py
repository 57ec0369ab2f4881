"""A run's encoder on another task: a probe on a part of another source's images, at the means and over draws."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from byov._core.callbacks import Say
from byov.data import fetch
from byov.evaluation.labelled import subject_of
from byov.evaluation.named_metrics import Measures, errors_of, strict
from byov.evaluation.predictive import predict_classes
from byov.inference.load import Run
from byov.inference.reference import ReferenceSet
from byov.metrics import auroc, max_softmax
from byov.metrics.resampling import paired_top1
from byov.scoring.scorer import is_deterministic
from byov.studies.measurements.predictions import Outcomes, check_same_images, measures_of
from byov.training.loop import subset

TRAIN, TEST = 2000, 1000  # images at most: fixed random ones, the same for every run


def sources_there(names: Iterable[str], say: Say) -> list[str]:
    """Those of some sources that can be had without a network; what cannot is said."""
    there = []
    for name in names:
        if name in fetch.PUBLISHED and not fetch.is_there(name):
            say(f"{name} is left out: it is not here; `byov data get {name}` fetches it.")
        else:
            there.append(name)
    return there


def downstream_settings(draws: int) -> Measures:
    """What the numbers hang on."""
    return {"draws": draws, "train": TRAIN, "test": TEST}


def downstream(run: Run, source: str, draws: int, say: Say) -> Outcomes:
    """What the probe says of test images of the source: at the means and, where weights are random, over draws."""
    whole = subject_of(run, say=say, source=source)
    data = replace(whole.data, train=subset(whole.data.train, TRAIN), test=subset(whole.data.test, TEST))
    subject = replace(whole, data=data)
    found = {"means": subject.probe.probabilities(subject.test_features)}
    if not is_deterministic(run):
        aligned, _ = predict_classes(ReferenceSet(run), subject.probe, data.test.images, draws)
        found["draws"] = aligned.mean.float()
    return Outcomes(data.test_labels, found)


def task_measures(mine: Outcomes, other: Outcomes, at: str) -> Measures:
    """Measures of a run; `errors`, the AUROC of finding its errors by the top probability; and top-1 beside another's.

    `top1.difference` is to the other at the same place, or at its means; `top1.error` its error over images.
    """
    check_same_images(mine, other)
    p, labels = mine.probabilities[at], mine.labels
    q = other.probabilities.get(at, other.probabilities["means"])
    difference, error = paired_top1(p, q, labels)
    found: Measures = measures_of(p, labels) | {"errors": auroc(max_softmax(p), errors_of(p, labels))}
    return strict(found | {"top1.difference": difference, "top1.error": error})
