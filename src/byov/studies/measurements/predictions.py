"""What a run says of every test image: class probabilities at the means and over draws, to be set beside another's."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from byov._core.callbacks import Progress
from byov._core.files import write_atomically
from byov.evaluation.labelled import subject_of
from byov.evaluation.named_metrics import class_measures
from byov.evaluation.predictive import predict_classes
from byov.inference.load import Run
from byov.inference.reference import ReferenceSet
from byov.scoring.scorer import is_deterministic

MEASURES = ("top1", "top5", "ece", "brier", "reliability", "resolution", "nll")
PLACES = ("means", "draws", "draws_unaligned")  # in the order of rows, which a file does not keep


@dataclass(frozen=True)
class Outcomes:
    """Of the test images of a run's own source."""

    labels: Tensor
    """(images,) int64."""
    probabilities: dict[str, Tensor]
    """(images, classes) float32, at "means"; where weights are random, of "draws" and "draws_unaligned" too."""


def outcomes(run: Run, draws: int, progress: Progress = lambda what, done, total: None) -> Outcomes:
    """The probe is fitted at the means on the run's training images, as `byov evaluate` does."""
    subject = subject_of(run, progress)
    found = {"means": subject.probe.probabilities(subject.test_features)}
    if not is_deterministic(run):
        aligned, unaligned = predict_classes(
            ReferenceSet(run), subject.probe, subject.test_images, draws, progress=progress
        )
        found |= {"draws": aligned.mean.float(), "draws_unaligned": unaligned.mean.float()}
    return Outcomes(subject.data.test_labels, found)


def check_same_images(one: Outcomes, other: Outcomes) -> None:
    """Two runs can be set beside each other only on the same test images."""
    if not torch.equal(one.labels, other.labels):
        raise ValueError("the runs differ in their test images: compare runs of one source, measured anew.")


def measures_of(probabilities: Tensor, labels: Tensor) -> dict[str, float]:
    """MEASURES, by the names and definitions of `byov evaluate`."""
    found = class_measures(probabilities, labels)
    return {name: found[name] for name in MEASURES}


def write_outcomes(path: Path, found: Outcomes, settings: Mapping[str, Any]) -> None:
    """A safetensors file, with what the numbers hang on in its header."""
    tensors = {"labels": found.labels, **found.probabilities}
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    write_atomically(path, lambda temporary: save_file(tensors, temporary, metadata=_header(settings)))


def read_outcomes(path: Path, settings: Mapping[str, Any]) -> Outcomes | None:
    """What `write_outcomes` wrote with the same settings; None where there is no such file, or no whole one."""
    try:
        with safe_open(path, framework="pt") as file:
            if file.metadata() != _header(settings):
                return None
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError):
        return None
    return Outcomes(tensors["labels"], {at: tensors[at] for at in PLACES if at in tensors})


def _header(settings: Mapping[str, Any]) -> dict[str, str]:
    return {"settings": json.dumps(settings, sort_keys=True)}
