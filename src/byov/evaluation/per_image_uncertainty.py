"""Every uncertainty of every image: at the means, and over weight draws in one pass that serves them all.

A draw passes all images once. Its features give class probabilities through the probe, aligned and not, and the terms
of the label-free scores; memory is flat in the draws.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from byov._core.files import without_prefix
from byov.evaluation.labelled import Subject
from byov.evaluation.named_metrics import Scores, below, predictive_scores
from byov.evaluation.predictive import Advance, Pass, over_draws, work_key
from byov.evaluation.probe import Probe
from byov.inference.features import features_of
from byov.inference.inputs import at_side
from byov.inference.reference import ReferenceSet, at_draw
from byov.metrics import Predictive, energy, entropy, knn_distance, mahalanobis, max_softmax
from byov.scoring.candidates import BLOCK, CANDIDATES, TERMS, OneDraw

LABEL_FREE = "label_free_"  # before the names of score.CANDIDATES, of which some are also baselines' names
STILL = {name: c for name, c in CANDIDATES.items() if not c.least_draws}
MOVING = {name: c for name, c in CANDIDATES.items() if c.least_draws}


def scores_at_means(subject: Subject, features: Tensor) -> Scores:
    """The baselines, which know the training images and their labels, and the label-free scores without draws."""
    logits = subject.probe.logits(features)
    probabilities = logits.softmax(1)
    known, labels = subject.train_features, subject.data.train_labels
    return {
        "max_softmax": max_softmax(probabilities),
        "entropy": entropy(probabilities),
        "energy": energy(logits),
        "knn_distance": knn_distance(features, known),
        "mahalanobis": mahalanobis(features, known, labels),
    } | _label_free_at_means(subject.bank, features)


def _label_free_at_means(bank: ReferenceSet | None, features: Tensor) -> Scores:
    if bank is None:
        return {}
    terms = terms_of(bank, features, None, {term for c in STILL.values() for term in c.terms})
    return {LABEL_FREE + name: c.score([terms[term].double() for term in c.terms], 0) for name, c in STILL.items()}


def terms_of(bank: ReferenceSet, features: Tensor, k: int | None, names: set[str]) -> dict[str, Tensor]:
    """Terms of the label-free scores at draw k, some images at a time."""
    parts: dict[str, list[Tensor]] = {name: [] for name in names}
    for block in torch.split(features, BLOCK):
        draw = OneDraw(bank, block, k)
        for name in names:
            parts[name].append(TERMS[name](draw))
    return {name: torch.cat(blocks) for name, blocks in parts.items()}


class Drawn:
    """What images do over draws, so far."""

    def __init__(self, aligned: Predictive, unaligned: Predictive, totals: dict[str, Tensor]) -> None:
        self.aligned, self.unaligned = aligned, unaligned
        self.totals = totals
        """Sums over draws of the label-free scores' terms, float64."""

    @classmethod
    def nothing(cls, images: int, classes: int) -> Self:
        return cls(Predictive(images, classes), Predictive(images, classes), {})

    def update(self, bank: ReferenceSet, probe: Probe, features: Tensor, k: int) -> None:
        """Takes in draw k's features of all images."""
        self.aligned.update(probe.probabilities(bank.aligned(features, k)))
        self.unaligned.update(probe.probabilities(features))
        self._add(terms_of(bank, features, k, {term for c in MOVING.values() for term in c.terms}))

    def merge(self, other: Drawn) -> Self:
        self.aligned.merge(other.aligned)
        self.unaligned.merge(other.unaligned)
        self._add(other.totals)
        return self

    def _add(self, terms: dict[str, Tensor]) -> None:
        for name, value in terms.items():
            self.totals[name] = self.totals[name].add_(value) if name in self.totals else value.double()

    def state(self) -> dict[str, Tensor]:
        both = below("aligned.", self.aligned.state()) | below("unaligned.", self.unaligned.state())
        return both | below("total.", self.totals)

    @classmethod
    def from_state(cls, state: dict[str, Tensor]) -> Self:
        aligned, unaligned, totals = (without_prefix(state, p) for p in ("aligned.", "unaligned.", "total."))
        return cls(Predictive.from_state(aligned), Predictive.from_state(unaligned), totals)

    def label_free_scores(self) -> Scores:
        """Those that so many draws allow."""
        draws = self.aligned.draws
        averages = {name: total.double() / draws for name, total in self.totals.items()}
        return {
            LABEL_FREE + name: c.score([averages[term] for term in c.terms], draws)
            for name, c in MOVING.items()
            if draws >= c.least_draws
        }

    def scores(self) -> Scores:
        """The label-free scores, and those of the class probabilities as `draws_NAME`."""
        return self.label_free_scores() | below("draws_", predictive_scores(self.aligned))


def pass_draws(subject: Subject, images: Tensor, draws: int, what: str) -> Drawn:
    """Passes images through all draws; what is stopped goes on in the next call for the same images and probe."""
    bank, probe = subject.bank, subject.probe
    assert bank is not None, "draws are the run's own encoder's"
    images = at_side(images, subject.side)

    def progress(_: str, done: int, total: int) -> None:
        subject.progress(f"{what}: {len(images):,} images through {draws} draws", done, total)

    work = work_key(bank, "draws", images, probe.weights, probe.bias, probe.mean, probe.std)
    return over_draws(bank, draws, _Scored(images, probe), work, progress)["all"]


@dataclass(frozen=True)
class _Scored(Pass[Drawn]):
    """The pass of `pass_draws`."""

    probe: Probe

    def nothing(self) -> dict[str, Drawn]:
        return {"all": Drawn.nothing(len(self.images), len(self.probe.bias))}

    def take(self, bank: ReferenceSet, k: int, found: dict[str, Drawn], advance: Advance) -> None:
        run = bank.run
        with at_draw(run.encoder, run.config.seed, k):
            features = features_of(run.encoder, self.images, advance=advance)
        found["all"].update(bank, self.probe, features, k)
