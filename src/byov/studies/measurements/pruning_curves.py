"""Scores to prune by beside each other at the same sparsities and on the same test images (the paper's Figure 4, left).

Nothing is trained after pruning, and images go through the probe of the unpruned encoder. "byol" is the deterministic
baseline, which has only magnitudes to go by.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from byov.evaluation.labelled import Subject, subject_of
from byov.evaluation.named_metrics import Measures
from byov.evaluation.probe import fit_probe
from byov.inference.features import features_of
from byov.inference.load import Run
from byov.metrics import ece, top_k_accuracy
from byov.metrics.resampling import paired_top1
from byov.pruning.criteria import By, Pruning, choose_masks
from byov.pruning.prune import encoder_of, without

SCORES: tuple[By, ...] = ("snr", "magnitude", "variance", "random")
REFITTED = ("snr", "magnitude", "byol")  # the others are only there to tell what SNR's two parts are worth
SPARSER = 0.25  # "with a 25% sparser model" (1.1)


class Pruned(NamedTuple):
    """Class probabilities (images, classes) of a pruned encoder."""

    kept: Tensor
    """By the probe of the unpruned one."""
    refitted: Tensor | None
    """By a probe fitted anew."""


Curve = dict[float, Pruned]
"""By sparsity."""


def compare_pruning(run: Run, baseline: Run, sparsities: Sequence[float]) -> list[Measures]:
    """A row for each arm (a score, or "byol") and sparsity.

    `top1.difference`: SNR's accuracy at this sparsity less this arm's; `sparser.difference`: SNR's at a sparsity that
    is .25 higher less this arm's (None where that is not measured). `.error`: standard error over images.
    """
    subject, beside = subject_of(run), subject_of(baseline)
    labels = subject.data.test_labels
    arms: dict[str, Curve] = {by: pruning_curve(subject, by, sparsities, by in REFITTED) for by in SCORES}
    arms["byol"] = pruning_curve(beside, "magnitude", sparsities, "byol" in REFITTED)
    rows = []
    for arm, curve in arms.items():
        for sparsity, pruned in curve.items():
            row: Measures = {"arm": arm, "sparsity": sparsity, **_measures(pruned, labels)}
            sparser = arms["snr"].get(round(sparsity + SPARSER, 6))
            row |= _beside("top1", arms["snr"][sparsity], pruned, labels)
            row |= _beside("sparser", sparser, pruned, labels)
            rows.append(row)
    return rows


def pruning_curve(subject: Subject, by: By, sparsities: Sequence[float], refit: bool = False) -> Curve:
    """The encoder of a run with the lowest part of each layer, by a score, set to 0."""
    run, found, unpruned = subject.run, {}, encoder_of(subject.run)
    for sparsity in sparsities:
        encoder, anew = unpruned, subject.probe
        if sparsity > 0:
            how = Pruning(by, sparsity, seed=run.config.seed)
            encoder = without(unpruned, choose_masks(run.learner.posterior, how, sparsity, {}))
            if refit:
                known = features_of(encoder, subject.data.train.images, size=subject.side)
                anew = fit_probe(known, subject.data.train_labels, classes=subject.data.classes)
        features = features_of(encoder, subject.test_images)
        refitted = anew.probabilities(features) if refit else None
        found[sparsity] = Pruned(subject.probe.probabilities(features), refitted)
    return found


def _measures(pruned: Pruned, labels: Tensor) -> Measures:
    found: Measures = {}
    for prefix, p in (("", pruned.kept), ("refitted.", pruned.refitted)):
        found[f"{prefix}top1"] = None if p is None else top_k_accuracy(p, labels, 1)
        found[f"{prefix}ece"] = None if p is None else ece(p, labels)
    return found


def _beside(name: str, snr: Pruned | None, other: Pruned, labels: Tensor) -> Measures:
    """The difference of two accuracies on the same images, and its standard error."""
    if snr is None:
        return {f"{name}.difference": None, f"{name}.error": None}
    difference, error = paired_top1(snr.kept, other.kept, labels)
    return {f"{name}.difference": difference, f"{name}.error": error}
