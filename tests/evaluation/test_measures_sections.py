"""Sections: lists of labels, held-out images, scaled confidence, the probe's other measures, shifts."""

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import minimize_scalar
from sklearn.metrics import accuracy_score, log_loss
from sklearn.neighbors import NearestNeighbors
from torch import Tensor, nn
from torch.nn.functional import normalize

import handmade
from byov.data.images import ImageSet
from byov.data.shifts import SEVERITIES, SHIFTS
from byov.evaluation import measures
from byov.evaluation.measures import (
    held_out,
    label_lists,
    probe_measures,
    semi_measures,
    shift_measures,
    shift_names,
    shift_settings,
    uncertainty_section,
)
from byov.evaluation.probe import Labelled, Subject, fit_probe
from byov.inference.run import ReferenceSet


@given(st.lists(st.integers(0, 4), min_size=1, max_size=400))
def test_lists_are_balanced_nested_and_leave_no_class_out(labels: list[int]) -> None:
    y = torch.tensor(labels)
    lists = label_lists(y)
    there = torch.bincount(y)
    each = {percent: max(1, round(len(y) * percent / 100 / int((there > 0).sum()))) for percent in lists}
    for percent, chosen in lists.items():
        assert torch.equal(torch.bincount(y[chosen], minlength=len(there)), there.clamp(max=each[percent]))
        assert torch.equal(chosen, torch.unique(chosen))
    assert set(lists[1].tolist()) <= set(lists[10].tolist())
    held = held_out(y)
    assert torch.equal(torch.bincount(y[held], minlength=len(there)), there // 5)


def test_lists_are_the_same_for_ever() -> None:
    """Results on 1% of the labels are compared over versions: the list must not change."""
    labels = torch.arange(1000) % 10
    assert label_lists(labels)[1].tolist() == [36, 82, 188, 281, 434, 693, 789, 850, 927, 955]


@pytest.fixture(scope="module")
def subject(tmp_path_factory: pytest.TempPathFactory) -> Subject:
    """Raw pixels of three kinds of noise, of which two are alike."""
    folder: Path = tmp_path_factory.mktemp("probes")
    g = torch.Generator().manual_seed(0)
    labels = torch.arange(900) % 3
    centres = torch.tensor([60, 130, 150])[labels]
    pixels = centres[:, None, None, None] + 60 * torch.randn(900, 1, handmade.SIDE, handmade.SIDE, generator=g)
    images = pixels.clamp(0, 255).to(torch.uint8)
    train, test = (ImageSet(images[part], labels[part]) for part in (slice(600), slice(600, 900)))
    data = Labelled("made", train, test, torch.arange(600), True, None)
    run = handmade.run(folder / "run", handmade.Affine(6))
    return Subject(run, nn.Flatten(), data, handmade.SIDE, lambda *what: None)


def _pixels(data: ImageSet) -> Tensor:
    return data.images.flatten(1).float()


def test_neighbours_by_another_library(subject: Subject) -> None:
    found = probe_measures(subject)
    asked = normalize(_pixels(subject.data.test), dim=1).numpy()
    labels = subject.data.test_labels.numpy()
    nearest = NearestNeighbors(n_neighbors=2, algorithm="brute").fit(asked).kneighbors(asked)[1][:, 1]
    assert found["recall_at_1"] == pytest.approx(np.mean(labels[nearest] == labels))
    guesses = subject.probe.probabilities(_pixels(subject.data.test))
    assert found["top1"] == pytest.approx(accuracy_score(labels, guesses.argmax(1))) and found["top5"] == 1
    assert found["probe_converged"] and 0.5 < found["top1"] < 0.95


def test_the_temperature_is_fitted_where_its_probe_has_not_looked(subject: Subject) -> None:
    section = uncertainty_section(subject)
    found, data = section.measures, subject.data
    held, features = held_out(data.train_labels), _pixels(data.train)
    probe = fit_probe(features[~held], data.train_labels[~held])
    logits, labels = probe.logits(features[held]), data.train_labels[held]

    def nll(log_temperature: float) -> float:
        return float(log_loss(labels, (logits / np.exp(log_temperature)).softmax(1)))

    assert found["temperature"] == pytest.approx(np.exp(minimize_scalar(nll, bounds=(-3, 3)).x), rel=1e-3)
    scaled = (probe.logits(_pixels(data.test)) / found["temperature"]).softmax(1)
    assert found["scaled.nll"] == pytest.approx(log_loss(data.test_labels, scaled), rel=1e-5)
    assert found["scaled.top1"] == pytest.approx(accuracy_score(data.test_labels, scaled.argmax(1)))
    assert {"means.top1", "means.brier", "means.nll", "score.energy", "retrieved"} < set(section.rows)
    assert all(row.shape == (300,) for row in section.rows.values())
    assert found["selective.max_softmax.error_auroc"] == probe_measures(subject)["error_auroc"]
    assert not any("label_free" in key for key in found)  # there is no bank


def test_few_labels(subject: Subject) -> None:
    found, data = semi_measures(subject), subject.data
    assert (found["semi.1.labels"], found["semi.10.labels"]) == (6, 60)
    chosen = label_lists(data.train_labels)[10]
    probe = fit_probe(_pixels(data.train)[chosen], data.train_labels[chosen])
    guesses = probe.probabilities(_pixels(data.test)).argmax(1)
    assert found["semi.10.top1"] == pytest.approx(accuracy_score(data.test_labels, guesses))
    assert found["semi.1.nll"] > found["semi.10.nll"] > probe_measures(subject)["nll"]


# ------------------------------------------------------------------------------------------------------------- shifts


def shift_subject(folder: Path, channels: int, encoder: nn.Module | None = None) -> Subject:
    run = handmade.run(folder / "run", handmade.Affine(4))
    g = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (40, channels, 4, 4), generator=g, dtype=torch.uint8)
    data = ImageSet(pixels, torch.arange(40) % 2)
    labelled = Labelled("made", data, data, torch.arange(40), True, None)
    return Subject(run, encoder or run.encoder, labelled, 4, lambda *what: None, ReferenceSet(run))


def test_grey_images_have_no_shifts_of_colour(tmp_path: Path) -> None:
    assert shift_names(shift_subject(tmp_path, 3)) == list(SHIFTS)
    assert set(SHIFTS) - set(shift_names(shift_subject(tmp_path, 1))) == {"saturation", "hue"}


def test_a_stronger_shift_is_worse_and_draws_see_a_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measures, "SHIFT_DRAWN_IMAGES", 8)
    monkeypatch.setattr(measures, "SHIFT_DRAWS", 2)
    steps: list[int] = []
    whom = shift_subject(tmp_path, 1, nn.Flatten())  # raw pixels: 16 for 40 images, which a probe learns by heart
    at_means = shift_measures(whom, "salt_pepper", 0, steps.append)
    assert steps == list(SEVERITIES) and not any("draws" in key for key in at_means)
    assert (8 * at_means["shifts.salt_pepper.2.at_means.top1"]).is_integer()  # to compare with the draws of another run
    assert at_means["shifts.salt_pepper.1.nll"] < at_means["shifts.salt_pepper.5.nll"]
    found = shift_measures(shift_subject(tmp_path, 1), "salt_pepper", 3, steps.append)
    # of 8 images: a multiple of an eighth
    assert (8 * found["shifts.salt_pepper.2.draws.top1"]).is_integer() and found[
        "shifts.salt_pepper.2.draws.entropy"
    ] > 0
    assert (8 * found["shifts.salt_pepper.2.at_means.top1"]).is_integer()
    assert shift_settings(whom, 3) == {"images": 40, "seed": 0, "side": 4, "drawn_images": 8, "draws": 2}
    assert shift_settings(whom, 0) == {"images": 40, "seed": 0, "side": 4, "drawn_images": 8}
