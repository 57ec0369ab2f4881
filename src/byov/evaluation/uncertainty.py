"""Every uncertainty of every image: at the means, and over weight draws in a single pass.

Each draw encodes all images once. Its features give class probabilities by the probe, aligned and not, and the terms of
the label-free scores. Memory is flat in the draws.
"""

from __future__ import annotations

from typing import Self

from torch import Tensor

from byov._core.cache import digest
from byov._core.files import without_prefix
from byov.evaluation.labelled import Subject
from byov.evaluation.measures import Scores, below, predictive_scores
from byov.evaluation.predictive import Advance, over_draws
from byov.evaluation.probe import Probe
from byov.inference.features import features_of
from byov.inference.inputs import at_side
from byov.inference.reference import ReferenceSet, at_draw
from byov.metrics import Predictive, energy, entropy, knn_distance, mahalanobis, max_softmax
from byov.scoring.candidates import AT_MEANS, CANDIDATES, OVER_DRAWS, TermSums

LABEL_FREE = "label_free_"  # before the names of CANDIDATES, some of which are also names of baselines


def scores_at_means(subject: Subject, images: Tensor, features: Tensor) -> Scores:
    """Return the baselines, which use the training images and labels, and the label-free scores without draws."""
    logits = subject.probe.logits(features)
    probabilities = logits.softmax(1)
    known, labels = subject.train_features, subject.data.train_labels
    found: Scores = {
        "max_softmax": max_softmax(probabilities),
        "entropy": entropy(probabilities),
        "energy": energy(logits),
        "knn_distance": knn_distance(features, known),
        "mahalanobis": mahalanobis(features, known, labels),
    }
    if subject.reference is not None:
        sums = TermSums(AT_MEANS)
        sums.add(subject.reference, features, None, subject.reference.own(at_side(images, subject.side)))
        found |= below(LABEL_FREE, sums.scores(0))
    return found


class Drawn:
    """What is accumulated over draws of the same images."""

    def __init__(self, aligned: Predictive, unaligned: Predictive, totals: dict[str, Tensor]) -> None:
        self.aligned, self.unaligned = aligned, unaligned
        self.sums = TermSums(OVER_DRAWS, totals)
        """Of the terms of the label-free scores."""

    @classmethod
    def nothing(cls, images: int, classes: int) -> Self:
        return cls(Predictive(images, classes), Predictive(images, classes), {})

    def update(
        self, reference: ReferenceSet, probe: Probe, features: Tensor, k: int, own: Tensor | None = None
    ) -> None:
        """Add draw k, from its features of all images; `own`: their positions in the reference set."""
        self.aligned.update(probe.probabilities(reference.aligned(features, k)))
        self.unaligned.update(probe.probabilities(features))
        self.sums.add(reference, features, k, own)

    def merge(self, other: Drawn) -> Self:
        self.aligned.merge(other.aligned)
        self.unaligned.merge(other.unaligned)
        self.sums.merge(other.sums.totals)
        return self

    def state(self) -> dict[str, Tensor]:
        both = below("aligned.", self.aligned.state()) | below("unaligned.", self.unaligned.state())
        return both | below("total.", self.sums.totals)

    @classmethod
    def from_state(cls, state: dict[str, Tensor]) -> Self:
        aligned, unaligned, totals = (without_prefix(state, p) for p in ("aligned.", "unaligned.", "total."))
        return cls(Predictive.from_state(aligned), Predictive.from_state(unaligned), totals)

    def label_free_scores(self) -> Scores:
        """Return those that this many draws allow."""
        draws = self.aligned.draws
        allowed = [name for name in OVER_DRAWS if draws >= CANDIDATES[name].least_draws]
        return below(LABEL_FREE, TermSums(allowed, self.sums.totals).scores(draws))

    def scores(self) -> Scores:
        """Return the label-free scores, and those of the class probabilities as `draws_NAME`."""
        return self.label_free_scores() | below("draws_", predictive_scores(self.aligned))


def pass_draws(subject: Subject, images: Tensor, draws: int, what: str) -> Drawn:
    """Pass images through all draws; stopped work resumes in the next call with the same images and probe."""
    run, reference, probe = subject.run, subject.reference, subject.probe
    assert reference is not None, "draws are the run's own encoder's"
    images = at_side(images, subject.side)
    own = reference.own(images)

    def take(found: dict[str, Drawn], k: int, advance: Advance) -> None:
        with at_draw(run.encoder, run.config.seed, k):
            features = features_of(run.encoder, images, advance=advance)
        found["all"].update(reference, probe, features, k, own)

    def progress(_: str, done: int, total: int) -> None:
        subject.progress(f"{what}: {len(images):,} images through {draws} draws", done, total)

    start, work = {"all": Drawn.nothing(len(images), len(probe.bias))}, f"draws-{digest(images, *probe.tensors())}"
    return over_draws(reference, draws, start, take, len(images), work, progress)["all"]
