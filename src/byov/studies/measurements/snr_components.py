"""Pruning by SNR taken apart: what the mean, the sigma and the layer each contribute to it; whole units; retraining.

SNR = |mean| / sigma mixes three things: a weight's magnitude, its own sigma, and the usual sigma of its layer. Each is
taken away in turn. Within a layer, a factor of the layer changes no order, so `magnitude_by_layer` differs from
`magnitude` only where all layers are ranked together.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from torch import Tensor, nn

from byov._core.callbacks import Say
from byov._core.randomness import RandomStream, permutation
from byov.data.transforms import resized
from byov.evaluation.labelled import Subject, subject_of
from byov.inference.inputs import spread
from byov.inference.load import Run, load
from byov.metrics import ece, top_k_accuracy
from byov.metrics.resampling import paired_top1
from byov.posterior import Posterior
from byov.pruning.criteria import (
    By,
    Masks,
    Pruning,
    choose_masks,
    drop_weights,
    prunable_weights,
    sparsity_of,
    weight_scores,
)
from byov.pruning.prune import BATCH, encoder_masks, encoder_of, images_per_second, prune, stored_bytes, without
from byov.pruning.structured import compact
from byov.scoring.scorer import is_deterministic
from byov.training.loop import Trainer

Scope = Literal["layer", "global"]
PARTS = ("snr", "magnitude", "variance", "snr_shuffled", "magnitude_by_layer")
SCOPES: tuple[Scope, ...] = ("layer", "global")
SPARSITIES = (0.25, 0.5, 0.75, 0.9)
UNITS = (0.25, 0.5)  # sparsities of whole units
RETRAINED, ROUNDS = 0.9, 3  # the sparsity that is reached in so many rounds of pruning and training
ROUND = 30  # a round takes the run's own epochs divided by this
IMAGES = 2000  # test images at most

Row = dict[str, Any]


def part_scores(posterior: Posterior, part: str, seed: int = 0) -> dict[str, Tensor]:
    """A score for every prunable weight of the encoder, by parameter name; the lowest goes first.

    `snr`, `magnitude` and `variance` are those of `byov prune`; `snr_shuffled` gives each weight the sigma of another
    of its layer; `magnitude_by_layer` divides by the layer's mean sigma instead of the weight's own.
    """
    if part in ("snr", "magnitude", "variance"):
        return weight_scores(posterior, part)  # type: ignore[arg-type]
    sigmas = {name: 1 / score for name, score in weight_scores(posterior, "variance").items()}
    magnitudes = weight_scores(posterior, "magnitude")
    if part == "magnitude_by_layer":
        return {name: magnitudes[name] / sigma.mean() for name, sigma in sigmas.items()}
    if part != "snr_shuffled":
        raise ValueError(f"there is no part {part!r}: use one of {', '.join(PARTS)}.")
    return {
        name: magnitudes[name]
        / sigma.flatten()[permutation(sigma.numel(), RandomStream.SHUFFLED_SIGMA, seed, place)].view_as(sigma)
        for place, (name, sigma) in enumerate(sigmas.items())
    }


def apart_rows(run: Run, say: Say) -> list[Row]:
    """All of it for one run: single weights, whole units, and rounds of retraining (where weights are random)."""
    subject = tested_subject(run, say, IMAGES)
    rows = [_unpruned(subject), *weight_rows(subject)]
    if is_deterministic(run):
        return rows
    return [*rows, *unit_rows(subject), *retrained_rows(subject, say)]


def apart_settings() -> dict[str, Any]:
    """What the rows hang on."""
    weights = {"parts": PARTS, "scopes": SCOPES, "sparsities": SPARSITIES, "units": UNITS, "images": IMAGES}
    return weights | {"retrained": RETRAINED, "rounds": ROUNDS, "round_epochs": f"1/{ROUND}"}


def tested_subject(run: Run, say: Say, most: int) -> Subject:
    """A run's encoder on at most so many of its source's test images."""
    whole = subject_of(run, say=say)
    test = whole.data.test.subset(spread(len(whole.data.test), most))
    return replace(whole, data=replace(whole.data, test=test))


def _unpruned(subject: Subject) -> Row:
    probabilities = subject.probe.probabilities(subject.test_features)
    measures = _measures(subject, encoder_of(subject.run), probabilities)
    return {"kind": "none", "by": None, "scope": None, "asked": 0.0, "sparsity": 0.0, **measures} | {
        "refitted.top1": measures["top1"],
        "speed": 1.0,
    }


# ------------------------------------------------------------------------------------------------------- single weights


def weight_rows(subject: Subject) -> Iterator[Row]:
    """Every part, scope and sparsity; where nothing is random, by magnitude alone."""
    run = subject.run
    posterior, encoder = run.learner.posterior, encoder_of(run)
    prunable = prunable_weights(posterior)
    others = [] if is_deterministic(run) else [part for part in PARTS if part != "magnitude"]
    scores = {part: part_scores(posterior, part, run.config.seed) for part in ("magnitude", *others)}
    for scope in SCOPES:
        for sparsity in SPARSITIES:
            beside: Tensor | None = None
            for part, score in scores.items():
                masks = drop_weights(score, sparsity, scope)
                pruned = replace(subject, encoder=without(encoder, masks))
                own = subject.probe.probabilities(pruned.test_features)
                beside = own if beside is None else beside  # by magnitude, which comes first
                row = {"kind": "weights", "by": part, "scope": scope, "asked": sparsity}
                row |= {"sparsity": sparsity_of(masks, prunable)}
                row |= _measures(subject, pruned.encoder, own) | _beside(subject, own, beside)
                last = sparsity == RETRAINED and scope == "layer" and part in ("snr", "magnitude")
                yield row | {"refitted.top1": _refitted(pruned) if last else None, "speed": 1.0}


def _measures(subject: Subject, encoder: nn.Module, probabilities: Tensor) -> Row:
    """Through the unpruned encoder's probe, and what the encoder takes when compressed."""
    labels = subject.data.test_labels
    found: Row = {"top1": top_k_accuracy(probabilities, labels, 1), "ece": ece(probabilities, labels)}
    return found | {"compressed_bytes": stored_bytes(encoder, compressed=True)}


def _beside(subject: Subject, own: Tensor, magnitude: Tensor) -> Row:
    """How far the same sparsity by magnitude lies below, and the error of that over images."""
    difference, error = paired_top1(own, magnitude, subject.data.test_labels)
    return {"top1.difference": difference, "top1.error": error}


def _refitted(pruned: Subject) -> float:
    return top_k_accuracy(pruned.probe.probabilities(pruned.test_features), pruned.data.test_labels, 1)


# ------------------------------------------------------------------------------------------ whole units, and retraining


def unit_rows(subject: Subject) -> Iterator[Row]:
    """Neurons and heads (or channels): the network that is left is smaller, so it is also timed."""
    run = subject.run
    posterior, encoder = run.learner.posterior, encoder_of(run)
    prunable = prunable_weights(posterior)
    batch = resized(subject.test_images[:BATCH], subject.side)
    by: By
    for by in ("magnitude", "snr"):
        for sparsity in UNITS:
            masks = choose_masks(posterior, Pruning(by, sparsity, structured=True), sparsity, {})
            smaller = _compacted(encoder, masks)
            pruned = replace(subject, encoder=smaller)
            before, after = images_per_second([encoder, smaller], batch)
            own = subject.probe.probabilities(pruned.test_features)
            row = {"kind": "units", "by": by, "scope": "layer", "asked": sparsity}
            row |= {"sparsity": sparsity_of(masks, prunable), **_measures(subject, smaller, own)}
            yield row | {"refitted.top1": _refitted(pruned), "speed": after / before, "images_per_second": after}


def _compacted(encoder: nn.Module, masks: Masks) -> nn.Module:
    return compact(without(encoder, masks), encoder_masks(masks))


def retrained_rows(subject: Subject, say: Say) -> Iterator[Row]:
    """Pruned by SNR, trained on, and again, in a folder that is thrown away; measured on the images of all other rows.

    No run is retrained after pruning by magnitude: the rows tell what retraining wins back, not what SNR adds to it.
    """
    run, after = subject.run, []
    how = Pruning("snr", RETRAINED, rounds=ROUNDS, epochs=max(1, run.config.optim.epochs // ROUND))

    def train(trainer: Trainer) -> None:
        trainer.run()
        after.append(encoder_of(load(trainer.folder, run.encoder.means.device.type)))

    with tempfile.TemporaryDirectory() as folder:
        found = prune(run, Path(folder) / "pruned", how, curve=(), say=say, train=train)
    for number, (encoder, told) in enumerate(zip(after, found["rounds"], strict=True), 1):
        pruned = replace(subject, encoder=encoder)
        own = subject.probe.probabilities(pruned.test_features)
        row = {"kind": "retrained", "by": "snr", "scope": "layer", "asked": how.sparsity_after(number, 0.0)}
        row |= {"sparsity": told["sparsity"], **_measures(subject, encoder, own), "refitted.top1": _refitted(pruned)}
        last = number == how.rounds
        yield row | {"compressed_bytes": found["bytes"]["pruned_compressed"] if last else None, "speed": 1.0}
