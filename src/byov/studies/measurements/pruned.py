"""A run's encoder with some of its weights set to 0, and its accuracy compared with another's on the same images."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from byov._core.callbacks import Say
from byov.evaluation.labelled import Subject, subject_of
from byov.inference.inputs import spread
from byov.inference.load import Run
from byov.metrics.resampling import paired_top1
from byov.studies.framework.claims import Row


def tested_subject(run: Run, say: Say, most: int) -> Subject:
    """Return a run's encoder with at most so many of its source's test images."""
    whole = subject_of(run, say=say)
    test = whole.data.test.subset(spread(len(whole.data.test), most))
    return replace(whole, data=replace(whole.data, test=test))


def top1_difference(name: str, p: Tensor | None, q: Tensor, labels: Tensor) -> Row:
    """Return by how much p is more accurate than q on the same images, and the standard error (None without p)."""
    difference, error = (None, None) if p is None else paired_top1(p, q, labels)
    return {f"{name}.difference": difference, f"{name}.error": error}
