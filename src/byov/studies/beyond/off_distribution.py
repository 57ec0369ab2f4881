"""Calibration and pruning off the training distribution: shifted images and other sources, before and after pruning.

The third of the next checks in the reader's summary: does the posterior's uncertainty hold beyond the images it was
learned from?
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from statistics import mean

import matplotlib as mpl
import torch
from matplotlib.figure import Figure
from torch import Tensor

from byov._core.callbacks import Say
from byov._core.files import without_prefix
from byov.config import Config
from byov.data.shifts import SHIFTS, shifted
from byov.evaluation.measures import SHIFT_SEED, ood_images, shift_names
from byov.evaluation.probe import Probe, Subject, plain_name
from byov.inference.inputs import spread
from byov.inference.run import Run, features_of
from byov.metrics import ece, knn_distance, max_softmax, ood_detection, top_k_accuracy
from byov.metrics.resampling import RESAMPLES
from byov.pruning.criteria import By, drop_weights, weight_scores
from byov.pruning.prune import pruned_subject, top1_and_ece
from byov.report.plots.seed_plots import STYLE, dots
from byov.studies.framework.claims import Claim, Effect, Row, Rows, differences, select
from byov.studies.framework.lab import Lab
from byov.studies.measurements.pruned import room_above, start_caveats, start_of, tested_subject, top1_difference

TITLE = "calibration, OOD detection and pruning on shifted images and other sources"
SPARSITY = 0.5
SEVERITIES = (1, 3, 5)
IMAGES = 1000  # at most, of the test images and of each other source
METHODS = {"byov": "BYOV", "byol": "BYOL"}
UNPRUNED = "unpruned"


def runs(lab: Lab) -> list[Config]:
    return lab.configs(*METHODS)


def results(lab: Lab) -> Rows:
    """A row for each run, pruning (none, by SNR, by magnitude) and probe (the unpruned encoder's, or refitted)."""
    sources = lab.ood_sources()
    settings = {"sparsity": SPARSITY, "ood": sources, "images": IMAGES, "resamples": RESAMPLES}
    settings |= {"shifts": list(SHIFTS), "severities": SEVERITIES, "shift_seed": SHIFT_SEED}
    measure = partial(robustness_rows, sparsity=SPARSITY, ood=sources, say=lab.say)
    return [
        {"method": config.method, **row}
        for config in runs(lab)
        for row in lab.measured_rows("off-distribution", config, measure, settings)
    ]


# --------------------------------------------------------------------------------------------------------- measurement


def robustness_rows(run: Run, sparsity: float, ood: Sequence[str], say: Say) -> Rows:
    """Return rows for the encoder unpruned and pruned by each score, with the old probe (`kept`) and one `refitted`.

    `shifted.*` are averages over shifts and severities. `shifted.top1.difference` is to the encoder pruned by
    magnitude, through the same probe, with its standard error over images. OOD: AUROC, by the distance to the nearest
    training images (`knn`) and by one minus the probe's top probability (`softmax`).
    """
    subject = tested_subject(run, say, IMAGES)
    outside = {plain_name(spec): _some(ood_images(subject, spec, say)) for spec in ood}
    pruned = _pruned(subject, sparsity)
    seen = {name: _features(each, outside) for name, each in pruned.items()}
    start, rows = start_of(run), []
    for name, each in pruned.items():
        for how, probe in (("kept", subject.probe), ("refitted", each.probe)):
            reference = subject.probe if how == "kept" else pruned["magnitude"].probe
            by_magnitude = _shifted(seen["magnitude"], reference)
            rows.append({"pruned": name, "probe": how, **start, **_measures(each, seen[name], probe, by_magnitude)})
    return rows


def _some(images: Tensor) -> Tensor:
    return images[spread(len(images), IMAGES)]


def _pruned(subject: Subject, sparsity: float) -> dict[str, Subject]:
    """The run's encoder, and its copies without the lowest-scoring weights of every layer."""
    posterior = subject.run.learner.posterior
    scores: tuple[By, ...] = ("magnitude",) if subject.run.deterministic else ("snr", "magnitude")
    masks = {by: drop_weights(weight_scores(posterior, by), sparsity) for by in scores}
    return {UNPRUNED: subject} | {str(by): pruned_subject(subject, mask) for by, mask in masks.items()}


class Features(dict[str, Tensor]):
    """Features by name: `test`, `shift.NAME.SEVERITY`, `ood.SOURCE`."""

    def below(self, prefix: str) -> dict[str, Tensor]:
        return without_prefix(self, prefix)


def _features(subject: Subject, outside: dict[str, Tensor]) -> Features:
    """All features that the measures need."""
    images = subject.test_images
    ids = torch.arange(len(images))
    seen = Features(test=subject.test_features)
    for name in shift_names(subject):
        for severity in SEVERITIES:
            now = shifted(images, ids, name, severity, SHIFT_SEED)
            seen[f"shift.{name}.{severity}"] = features_of(subject.encoder, now)
    return Features(seen | {f"ood.{name}": subject.features(others, name) for name, others in outside.items()})


def _shifted(seen: Features, probe: Probe) -> Tensor:
    """A probe's probabilities for the shifted test images: (shifts and severities, images, classes)."""
    return torch.stack([probe.probabilities(features) for features in seen.below("shift.").values()])


def _measures(subject: Subject, seen: Features, probe: Probe, by_magnitude: Tensor) -> Row:
    labels = subject.data.test_labels
    clean = probe.probabilities(seen["test"])
    moved = _shifted(seen, probe)
    found = {
        **top1_and_ece(clean, labels),
        "shifted.top1": mean(top_k_accuracy(p, labels, 1) for p in moved),
        "shifted.ece": mean(ece(p, labels) for p in moved),
        **top1_difference("shifted.top1", moved, by_magnitude, labels),
    }
    for source, features in seen.below("ood.").items():
        scores = [max_softmax(clean), max_softmax(probe.probabilities(features))]
        found[f"ood.{source}.softmax"] = ood_detection(*scores).auroc
        scores = [knn_distance(each, subject.train_features) for each in (seen["test"], features)]
        found[f"ood.{source}.knn"] = ood_detection(*scores).auroc
    return found


# -------------------------------------------------------------------------------------------------------------- claims


def _room(rows: Rows) -> list[Effect]:
    """How far the unpruned encoder lies above the one pruned by magnitude."""
    kept = select(rows, method="byov", probe="kept")
    return room_above(select(kept, pruned="magnitude"), select(kept, pruned=UNPRUNED), "shifted.top1")


CLAIMS = [
    Claim(
        where="reader's summary, next check 3",
        says="SNR pruning keeps more accuracy than magnitude pruning, here on shifted images with half of the weights.",
        paper="up to 12 points of top-1 (on clean images)",
        unit="points of top-1",
        size=1.0,  # as in fig4-pruning at half of the weights: the 12 are the paper's maximum over sparsities
        effects=partial(differences, measure="shifted.top1", method="byov", pruned="snr", probe="kept"),
        room=_room,
        caveats=lambda rows: start_caveats(select(rows, method="byov")),
    ),
]


# -------------------------------------------------------------------------------------------------------------- figure


def draw(rows: Rows, scale: str) -> Figure:
    """Top-1 and ECE on clean and shifted images, and OOD detection, by pruning and probe."""
    names = {(m, p): f"{METHODS[m]}, {p if p == UNPRUNED else f'by {p}'}" for m in METHODS for p in _prunings(rows)}
    labels = [name for pair, name in names.items() if any((row["method"], row["pruned"]) == pair for row in rows)]

    def values(key: str, probe: str, factor: float) -> dict[str, list[float]]:
        found: dict[str, list[float]] = {label: [] for label in labels}
        for row in rows:
            if row["probe"] == probe and row.get(key) is not None:
                found[names[row["method"], row["pruned"]]].append(factor * row[key])
        return found

    sources = list(dict.fromkeys(key.split(".")[1] for row in rows for key in row if key.startswith("ood.")))
    panels = {
        "shifted.top1": ("top-1, shifted (%)", 100.0),
        "ece": ("ECE, clean (points)", 100.0),
        "shifted.ece": ("ECE, shifted (points)", 100.0),
    }
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(2 + 1.8 * (len(panels) + len(sources)), 2.7), layout="constrained")
        all_axes = figure.subplots(1, len(panels) + len(sources), sharey=True)
        for axes, (key, (label, factor)) in zip(all_axes, panels.items(), strict=False):
            dots(axes, {f"probe {probe}": values(key, probe, factor) for probe in ("kept", "refitted")}, labels)
            axes.set_xlabel(label)
        for axes, source in zip(all_axes[len(panels) :], sources, strict=True):
            series = {f"probe {p}, softmax": values(f"ood.{source}.softmax", p, 1) for p in ("kept", "refitted")}
            dots(axes, series | {"nearest neighbours": values(f"ood.{source}.knn", "kept", 1)}, labels)
            axes.set_xlabel(f"AUROC, {source}")
        handles, texts = all_axes[-1].get_legend_handles_labels()
        figure.legend(handles, texts, loc="outside lower center", ncols=3, fontsize=7)
        figure.suptitle(f"Off the training distribution, {SPARSITY:.0%} pruned ({scale}): dots are seeds")
        return figure


def _prunings(rows: Rows) -> list[str]:
    return list(dict.fromkeys(row["pruned"] for row in rows))
