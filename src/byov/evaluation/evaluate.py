"""A run's first measure: a linear probe on frozen features, beside an untrained encoder and raw pixels."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from byov.data.decoded import Say, say_on_stderr
from byov.data.fetch import Progress
from byov.data.images import SPLITS, ImageSet
from byov.data.sources import open_source
from byov.errors import BadInput
from byov.evaluation.features import features_of
from byov.evaluation.probe import fit_probe
from byov.evaluation.run import Run
from byov.files import write_json
from byov.metrics import brier, brier_decomposition, ece, knn_accuracy, nll, reliability_bins, top_k_accuracy
from byov.training.loop import subset

PIXELS = 32  # side of the raw pixels that are probed at most: 12,288 numbers an image at 64 would take minutes to fit


def evaluate(
    run: Run,
    data: str | None = None,
    teacher: bool = False,
    progress: Progress = lambda what, done, total: None,
    say: Say = say_on_stderr,
) -> dict[str, Any]:
    """Probes the run on a source with labels (its own by default) and writes `results/evaluation.json`."""
    data = data or run.config.data
    side = run.image_shape[-1]
    source = open_source(data, side)
    test, train = (source.load(split, progress, say) for split in reversed(SPLITS))  # test first: it may be missing
    if train.labels is None or test.labels is None:
        raise BadInput(f"{data} has no labels to evaluate with: give a source that has, with --data.")
    if data == run.config.data and run.config.images is not None:
        train = subset(train, run.config.images)  # the probe sees the images that the encoder saw
    run.check(train.images)
    run.check(test.images)

    encoders: dict[str, nn.Module] = {
        "": run.teacher_encoder() if teacher else run.encoder,
        "untrained.": run.untrained_encoder(),
        "pixels.": nn.Flatten(),
    }
    results: dict[str, Any] = {}
    for prefix, encoder in encoders.items():
        what = (
            f"probing {prefix.rstrip('.') or run.folder} on {data}, {len(train):,} images to fit, {len(test):,} to test"
        )
        seen = min(side, PIXELS) if prefix == "pixels." else side
        fitted, tested = (_features(encoder, images, seen, what, progress) for images in (train.images, test.images))
        measures = probe_results(fitted, tested, train, test)
        results |= {f"{prefix}{key}": value for key, value in measures.items() if not prefix or key != "bins"}
    sigma = run.learner.posterior.sigma  # of all random weights, heads too
    results["median_sigma"] = float(sigma.median()) if sigma.numel() else None
    results["settings"] = {
        "run": str(run.folder),
        "step": run.step,
        "data": data,
        "train_images": len(train),
        "test_images": len(test),
        "encoder": "teacher" if teacher else "student at its means",
        "probe": "multinomial logistic regression; L2 by NLL on a held-out fifth, one-standard-error rule",
        "knn": {"k": 20, "temperature": 0.07},
    }
    write_json(results_path(run, data, teacher), results)
    return results


def _features(encoder: nn.Module, images: Tensor, side: int, what: str, progress: Progress) -> Tensor:
    done = 0

    def advance(count: int) -> None:
        nonlocal done
        done += count
        progress(what, done, len(images))

    return features_of(encoder, images, advance=advance, size=side)


def results_path(run: Run, data: str, teacher: bool) -> Path:
    """`evaluation.json` is the student on the run's own data; anything else has a name of its own."""
    other = "" if data == run.config.data else "-" + re.sub(r"[^\w.]+", "-", data).strip("-")
    return run.folder / "results" / f"evaluation{other}{'-teacher' if teacher else ''}.json"


def probe_results(train_features: Tensor, test_features: Tensor, train: ImageSet, test: ImageSet) -> dict[str, Any]:
    """All measures of one set of features."""
    assert train.labels is not None and test.labels is not None
    classes = 1 + int(max(train.labels.max(), test.labels.max()))
    probe = fit_probe(train_features, train.labels, classes=classes)
    probabilities = probe.probabilities(test_features)
    parts = brier_decomposition(probabilities, test.labels)
    return {
        "top1": top_k_accuracy(probabilities, test.labels, 1),
        "top5": top_k_accuracy(probabilities, test.labels, min(5, probabilities.shape[1])),
        "ece": ece(probabilities, test.labels),
        "brier": brier(probabilities, test.labels),
        "reliability": parts.reliability,
        "reliability_jensen": parts.reliability_jensen,
        "resolution": parts.resolution,
        "within_group": parts.within_group,
        "uncertainty": parts.uncertainty,
        "nll": nll(probabilities, test.labels),
        "knn": knn_accuracy(train_features, train.labels, test_features, test.labels),
        "probe_l2": probe.l2,
        "probe_gradient_norm": probe.gradient_norm,
        "probe_converged": probe.converged,
        "bins": [list(b) for b in reliability_bins(probabilities, test.labels)],
    }
