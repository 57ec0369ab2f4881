"""Variance over draws after encoder, projector and predictor (or classifier): without labels, aligned and not."""

from __future__ import annotations

from byov.evaluation.labelled import Subject
from byov.evaluation.named_metrics import Measures, errors_of
from byov.evaluation.predictive import Level, predict_levels
from byov.inference.inputs import spread
from byov.metrics import auroc

IMAGES = 2000  # at most: the heads' draws are others than those of the encoder alone, so this is a pass of its own


def level_measures(subject: Subject, draws: int) -> Measures:
    """`levels.NAME.KIND.*`: the variance, averaged over outputs and images, and whether an image's own finds errors."""
    assert subject.bank is not None, "draws are the run's own encoder's"
    chosen = spread(len(subject.data.test), IMAGES)
    features, labels = subject.test_features[chosen], subject.data.test_labels[chosen]
    errors = errors_of(subject.probe.logits(features), labels)

    def progress(_: str, done: int, total: int) -> None:
        subject.progress(f"levels: {len(chosen):,} images through {draws} draws", done, total)

    levels = predict_levels(subject.bank, subject.test_images[chosen], draws, resumable=True, progress=progress)
    found: Measures = {}
    for name, level in levels.items():
        for kind, outputs in zip(Level._fields, level, strict=True):
            variance = outputs.variance.mean(1)
            one = draws == 1  # of which there is no variance
            found[f"levels.{name}.{kind}.variance"] = None if one else float(variance.mean())
            found[f"levels.{name}.{kind}.error_auroc"] = None if one else auroc(variance, errors)
    return found
