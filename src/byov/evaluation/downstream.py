"""A run's encoder on another task: a probe on a part of another source's images, at the means and over draws."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from byov.data import fetch
from byov.data.decoded import Say
from byov.evaluation.measures import Measures, errors_of, strict
from byov.evaluation.outcomes import Outcomes, measures_of
from byov.evaluation.predictive import predict_classes
from byov.evaluation.reference import Bank
from byov.evaluation.run import Run
from byov.evaluation.score import is_deterministic
from byov.evaluation.subject import Subject, load_labelled
from byov.metrics import auroc, max_softmax
from byov.metrics.paired import paired_errors
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


def downstream(run: Run, source: str, draws: int, say: Say) -> Outcomes:
    """What the probe says of test images of the source: at the means and, where weights are random, over draws."""
    data = load_labelled(run, source, lambda what, done, total: None, say)
    data = replace(data, train=subset(data.train, TRAIN), test=subset(data.test, TEST))
    subject = Subject(run, run.encoder, data, run.image_shape[-1], lambda what, done, total: None)
    found = {"means": subject.probe.probabilities(subject.test_features)}
    if not is_deterministic(run):
        aligned, _ = predict_classes(Bank(run), subject.probe, data.test.images, draws)
        found["draws"] = aligned.mean.float()
    return Outcomes(data.test_labels, found)


def task_measures(mine: Outcomes, other: Outcomes, at: str) -> Measures:
    """Measures of a run; `errors`, the AUROC of finding its errors by the top probability; and top-1 beside another's.

    `top1.difference` is to the other at the same place, or at its means; `top1.error` its error over images.
    """
    p, labels = mine.probabilities[at], mine.labels
    q = other.probabilities.get(at, other.probabilities["means"])
    own, theirs = measures_of(p, labels), measures_of(q, labels)
    found: Measures = own | {"errors": auroc(max_softmax(p), errors_of(p, labels))}
    found |= {"top1.difference": own["top1"] - theirs["top1"], "top1.error": paired_errors(p, q, labels)["top1"]}
    return strict(found)
