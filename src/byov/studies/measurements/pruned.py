"""What pruning studies share: encoders with weights set to 0 compared on the same images, and conditions to compare."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from statistics import mean

from torch import Tensor

from byov._core.callbacks import Say
from byov.evaluation.probe import Subject, subject_of
from byov.inference.inputs import spread
from byov.inference.run import Run
from byov.metrics import pearson
from byov.metrics.resampling import paired_top1
from byov.pruning.criteria import prunable_weights
from byov.studies.framework.claims import Effect, Row, Rows
from byov.studies.framework.replicates import REPLICATES, packed
from byov.training.initial_weights import initialiser
from byov.training.learners import build_learner

LEFT_START = 0.7  # correlation below which less than half of the weights' variance is their start's (.7^2 = .49)
START = "start_correlation"
RANDOM_START = "random_start"


def tested_subject(run: Run, say: Say, most: int) -> Subject:
    """Return a run's encoder with at most so many of its source's test images."""
    whole = subject_of(run, say=say)
    test = whole.data.test.subset(spread(len(whole.data.test), most))
    return replace(whole, data=replace(whole.data, test=test))


def top1_difference(name: str, p: Tensor | None, q: Tensor, labels: Tensor, seed: int = 0) -> Row:
    """Return by how much p is more accurate than q on the same images, with error and replicates (None without p)."""
    if p is None:
        return {f"{name}.difference": None, f"{name}.error": None, f"{name}{REPLICATES}": None}
    found = paired_top1(p, q, labels, seed)
    return {
        f"{name}.difference": found.value,
        f"{name}.error": found.error,
        f"{name}{REPLICATES}": packed(found.replicates),
    }


# ---------------------------------------------------------------------------- have the weights left where they started?


def start_of(run: Run) -> Row:
    """Return the correlation of the encoder's prunable weights with their start, and whether the start was random.

    It is the mean over layers, each weighted by its number of weights: layers differ in scale, which would correlate.
    SNR and magnitude rank weights by |mean|. Where that is still the start's, pruning ranks random numbers.
    """
    given = None if run.config.init == "none" else run.config.init
    initial = build_learner(run.config, run.image_shape, run.classes, initialise=initialiser(given))
    return {
        START: correlation_by_layer(prunable_weights(run.learner.posterior), prunable_weights(initial.posterior)),
        RANDOM_START: given is None,
    }


def correlation_by_layer(weights: Mapping[str, Tensor], initial: Mapping[str, Tensor]) -> float:
    """Return the mean over layers, weighted by their size, of the correlation of two sets of weights."""
    layers = [(weight.numel(), pearson(weight.flatten(), initial[name].flatten())) for name, weight in weights.items()]
    return sum(size * float(found) for size, found in layers) / sum(size for size, _ in layers)


def start_caveats(rows: Rows) -> list[str]:
    """Say how near the weights are to their start, and whether too near for their magnitude to mean anything."""
    known = [row for row in rows if row.get(START) is not None]
    if not known:
        return [] if not rows else ["the weights' correlation with their start was not measured"]
    found, random = mean(row[START] for row in known), all(row[RANDOM_START] for row in known)
    text = f"the weights' correlation with their {'random' if random else 'pretrained'} start is {found:.2f}"
    return [f"{text}: they have hardly left it"] if random and found > LEFT_START else [text]


def room_above(rows: Rows, unpruned: Rows, measure: str = "top1") -> list[Effect]:
    """Return for each seed how far the unpruned encoder lies above the rows: pruning does not make it more accurate.

    Of several rows of a seed, the lowest counts.
    """
    lowest: dict[int, float] = {}
    for row in rows:
        lowest[row["seed"]] = min(row[measure], lowest.get(row["seed"], 1.0))
    whole = {row["seed"]: row[measure] for row in unpruned}
    return [Effect(seed, 100 * (whole[seed] - value)) for seed, value in lowest.items()]
