"""Accuracy, scoring rules, calibration and temperature scaling against other libraries and by hand."""

from __future__ import annotations

import contextlib
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize_scalar
from sklearn.calibration import calibration_curve
from sklearn.metrics import brier_score_loss, log_loss
from torch import Tensor
from torch.nn.functional import cross_entropy

from byov.backbones._torchvision import import_torchvision
from byov.metrics import (
    adaptive_ece,
    brier,
    brier_decomposition,
    classwise_ece,
    ece,
    fit_temperature,
    nll,
    reliability_bins,
    top_k_accuracy,
)
from byov.metrics.classification import COLDEST, HOTTEST

with contextlib.suppress(ImportError):
    import_torchvision()  # torchmetrics imports torchvision wherever it is installed
from torchmetrics.functional.classification import (
    binary_calibration_error,
    multiclass_accuracy,
    multiclass_calibration_error,
)


def predictions_of_accuracy(seed: int, images: int = 200, classes: int = 7) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, classes, (images,), generator=g)
    logits = 2 * torch.randn(images, classes, generator=g) + torch.eye(classes)[labels]
    return logits.softmax(1), labels


@pytest.mark.parametrize("k", [1, 2, 5])
def test_equals_torchmetrics(k: int) -> None:
    p, y = predictions_of_accuracy(0)
    theirs = multiclass_accuracy(p, y, num_classes=7, top_k=k, average="micro")
    assert top_k_accuracy(p, y, k) == pytest.approx(float(theirs), abs=1e-6)


def test_by_hand_of_accuracy() -> None:
    p = torch.tensor([[0.5, 0.3, 0.2], [0.5, 0.3, 0.2], [0.5, 0.3, 0.2], [0.1, 0.1, 0.8]])
    y = torch.tensor([0, 1, 2, 2])
    assert [top_k_accuracy(p, y, k) for k in (1, 2, 3, 5)] == [0.5, 0.75, 1.0, 1.0]


def test_ties_rank_as_argmax_does() -> None:
    p = torch.full((4, 4), 0.25)
    y = torch.arange(4)
    assert [top_k_accuracy(p, y, k) for k in (1, 2, 3, 4)] == [0.25, 0.5, 0.75, 1.0]


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**31), images=st.integers(1, 60), classes=st.integers(2, 9), k=st.integers(1, 9))
def test_properties_of_accuracy(seed: int, images: int, classes: int, k: int) -> None:
    p, y = predictions_of_accuracy(seed, images, classes)
    value = top_k_accuracy(p, y, k)
    assert 0 <= value <= top_k_accuracy(p, y, k + 1) <= 1
    order = torch.randperm(images, generator=torch.Generator().manual_seed(seed))
    assert top_k_accuracy(p[order], y[order], k) == pytest.approx(value, abs=1e-12)
    names = torch.randperm(classes, generator=torch.Generator().manual_seed(seed))
    assert top_k_accuracy(p[:, names], names.argsort()[y], k) == value  # no ties here
    assert top_k_accuracy(torch.eye(classes)[y], y, 1) == 1


@pytest.mark.parametrize(
    ("p", "y", "says"),
    [
        (torch.rand(4), torch.zeros(4, dtype=torch.int64), "shape"),
        (torch.eye(3), torch.zeros(3), "int64"),
        (torch.eye(3), torch.zeros(2, dtype=torch.int64), "do not match"),
        (torch.eye(3)[:0], torch.zeros(0, dtype=torch.int64), "do not match"),
        (torch.randn(3, 3) * 5, torch.zeros(3, dtype=torch.int64), "softmax"),
        (torch.full((3, 3), torch.nan), torch.zeros(3, dtype=torch.int64), "softmax"),
        (torch.eye(3), torch.tensor([0, 1, 3]), "classes 0 to 2"),
        (torch.eye(3), torch.tensor([0, 1, -1]), "classes 0 to 2"),
    ],
)
def test_bad_inputs_get_a_sentence_of_accuracy(p: torch.Tensor, y: torch.Tensor, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        top_k_accuracy(p, y, 1)


def test_k_below_one() -> None:
    with pytest.raises(ValueError, match="k is 0"):
        top_k_accuracy(torch.eye(3), torch.arange(3), 0)


def predictions_of_calibration(seed: int, images: int = 500, classes: int = 6) -> tuple[torch.Tensor, torch.Tensor]:
    """Unbalanced classes: class 0 takes about half of the images."""
    g = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, classes, (images,), generator=g) * torch.randint(0, 2, (images,), generator=g)
    logits = 2 * torch.randn(images, classes, generator=g) + torch.eye(classes)[labels]
    return logits.double().softmax(1), labels


METRICS = {
    "nll": nll,
    "ece": ece,
    "adaptive_ece": adaptive_ece,
    "classwise_ece": classwise_ece,
    "brier": brier,
    "uncertainty": lambda p, y: brier_decomposition(p, y).uncertainty,
    "resolution": lambda p, y: brier_decomposition(p, y).resolution,
    "reliability": lambda p, y: brier_decomposition(p, y).reliability,
    "within_group": lambda p, y: brier_decomposition(p, y).within_group,
    "reliability_jensen": lambda p, y: brier_decomposition(p, y).reliability_jensen,
}


@pytest.mark.parametrize("bins", [1, 10, 15])
def test_ece_equals_torchmetrics(bins: int) -> None:
    p, y = predictions_of_calibration(0)
    theirs = multiclass_calibration_error(p, y, num_classes=6, n_bins=bins, norm="l1")
    assert ece(p, y, bins) == pytest.approx(float(theirs), abs=1e-6)


@pytest.mark.parametrize("bins", [1, 10, 15])
def test_classwise_ece_equals_torchmetrics(bins: int) -> None:
    p, y = predictions_of_calibration(0)
    theirs = [binary_calibration_error(p[:, c].contiguous(), (y == c).long(), n_bins=bins, norm="l1") for c in range(6)]
    assert classwise_ece(p, y, bins) == pytest.approx(float(torch.stack(theirs).mean()), abs=1e-6)


@pytest.mark.parametrize("bins", [1, 10, 20])
def test_adaptive_ece_equals_sklearn(bins: int) -> None:
    p, y = predictions_of_calibration(0)  # 500 images: as many in each bin
    confidence, predicted = p.max(1)
    accuracies, confidences = calibration_curve(predicted == y, confidence, n_bins=bins, strategy="quantile")
    assert adaptive_ece(p, y, bins) == pytest.approx(abs(accuracies - confidences).mean(), abs=1e-12)


def test_adaptive_ece_by_hand() -> None:
    # rising confidence .6 (wrong), .7, .7 (one right), .9 (right): two bins, the two of .7 half right on either side
    p = torch.tensor([[0.7, 0.3], [0.9, 0.1], [0.6, 0.4], [0.3, 0.7]], dtype=torch.float64)
    y = torch.tensor([1, 0, 1, 1])
    assert adaptive_ece(p, y, bins=2) == pytest.approx((abs(1.3 - 0.5) + abs(1.6 - 1.5)) / 4)
    # more bins than images: each alone, the two of .7 with their mean
    assert adaptive_ece(p, y) == pytest.approx((0.6 + 0.2 + 0.2 + 0.1) / 4)


def test_nll_and_brier_equal_sklearn() -> None:
    p, y = predictions_of_calibration(1)
    assert nll(p, y) == pytest.approx(log_loss(y, p.numpy(), labels=range(6)), rel=1e-12)
    # scikit-learn's Brier for two classes is of one column: half of the sum over classes
    binary = torch.stack([1 - p[:, 0], p[:, 0]], 1)
    is_zero = (y == 0).long()
    assert brier(binary, is_zero) == pytest.approx(2 * brier_score_loss(is_zero, p[:, 0].numpy()), rel=1e-12)


def test_by_hand_of_calibration() -> None:
    p = torch.tensor([[0.9, 0.1], [0.8, 0.2], [0.3, 0.7]], dtype=torch.float64)
    y = torch.tensor([0, 1, 1])
    assert nll(p, y) == pytest.approx(-(math.log(0.9) + math.log(0.2) + math.log(0.7)) / 3)
    assert brier(p, y) == pytest.approx(2 * (0.1**2 + 0.8**2 + 0.3**2) / 3)
    # five bins of .2: .8 and .7 in (.6, .8] with one hit, .9 in (.8, 1] with a hit
    assert ece(p, y, bins=5) == pytest.approx((2 * abs(0.75 - 0.5) + abs(0.9 - 1)) / 3)
    assert [tuple(row) for row in reliability_bins(p, y, 5)][3] == pytest.approx((2, 0.75, 0.5))
    parts = brier_decomposition(p, y)
    # groups: images 0, 1 predicted 0 (mean outcome (.5, .5)), image 2 predicted 1 (mean outcome (0, 1))
    assert parts.uncertainty == pytest.approx(1 - (1 / 9 + 4 / 9))
    assert parts.resolution == pytest.approx(2 / 3 * 2 * (1 / 6) ** 2 + 1 / 3 * 2 * (1 / 3) ** 2)
    assert parts.reliability == pytest.approx((2 * 0.4**2 + 2 * 0.3**2 + 2 * 0.3**2) / 3)
    assert parts.reliability_jensen == pytest.approx(2 / 3 * 2 * 0.35**2 + 1 / 3 * 2 * 0.3**2)
    assert parts.within_group == pytest.approx(2 * (2 * 0.4 * 0.5 - 2 * 0.3 * 0.5) / 3)


def test_calibrated_by_construction() -> None:
    p = torch.tensor([[0.75, 0.25]]).repeat(4, 1)
    y = torch.tensor([0, 0, 0, 1])
    assert ece(p, y) == pytest.approx(0, abs=1e-7)
    assert brier_decomposition(p, y).reliability == pytest.approx(0, abs=1e-12)


def test_certain_and_wrong_stays_finite() -> None:
    p, y = torch.tensor([[1.0, 0.0]]), torch.tensor([1])
    assert nll(p, y) == pytest.approx(-math.log(torch.finfo(torch.float32).tiny))
    assert nll(p.double(), y) == nll(p, y)  # of draws, which are float64, as of the means
    assert (ece(p, y), brier(p, y)) == (1, 2)


def test_returns_python_floats_of_float32_input() -> None:
    p, y = predictions_of_calibration(2)
    assert all(type(metric(p.float(), y)) is float for metric in METRICS.values())
    assert all(type(metric(p, y)) is float for metric in METRICS.values())


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**31), images=st.integers(1, 80), classes=st.integers(2, 9))
def test_properties_of_calibration(seed: int, images: int, classes: int) -> None:
    p, y = predictions_of_calibration(seed, images, classes)
    parts = brier_decomposition(p, y)
    identity = parts.uncertainty - parts.resolution + parts.reliability - parts.within_group
    assert brier(p, y) == pytest.approx(identity, abs=1e-10)
    assert all(0 <= metric(p, y) <= 1 for metric in (ece, adaptive_ece, classwise_ece))
    # one bin: the least that any bins can give
    assert adaptive_ece(p, y, 1) == pytest.approx(ece(p, y, 1)) and adaptive_ece(p, y) >= adaptive_ece(p, y, 1) - 1e-12
    assert 0 <= brier(p, y) <= 2 and nll(p, y) >= 0
    assert -1e-12 <= parts.resolution <= parts.uncertainty + 1e-12 <= 1
    assert 0 <= parts.reliability_jensen <= parts.reliability + 1e-12
    table = reliability_bins(p, y)
    assert sum(row.images for row in table) == images
    for i, row in enumerate(table):
        assert row.images == 0 or i / 15 - 1e-12 <= row.confidence <= (i + 1) / 15 + 1e-12
    g = torch.Generator().manual_seed(seed)
    order, names = torch.randperm(images, generator=g), torch.randperm(classes, generator=g)
    for metric in METRICS.values():
        value = pytest.approx(metric(p, y), abs=1e-10)
        assert metric(p[order], y[order]) == value
        assert metric(p[:, names], names.argsort()[y]) == value


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**31), images=st.integers(1, 40), classes=st.integers(2, 9))
def test_perfect_predictions(seed: int, images: int, classes: int) -> None:
    _, y = predictions_of_calibration(seed, images, classes)
    p = torch.eye(classes)[y]
    parts = brier_decomposition(p, y)
    assert (nll(p, y), ece(p, y), brier(p, y)) == (0, 0, 0)
    assert adaptive_ece(p, y) == classwise_ece(p, y) == 0
    assert parts.resolution == pytest.approx(parts.uncertainty, abs=1e-12)
    assert parts.reliability == parts.reliability_jensen == 0


def test_bad_inputs_get_a_sentence_of_calibration() -> None:
    logits, y = torch.tensor([[3.0, -2.0]]), torch.tensor([0])
    for metric in METRICS.values():
        with pytest.raises(ValueError, match="softmax"):
            metric(logits, y)
    for metric in (ece, adaptive_ece, classwise_ece):
        with pytest.raises(ValueError, match="bins is 0"):
            metric(torch.eye(2), torch.arange(2), bins=0)


def held_out(seed: int, images: int = 200, classes: int = 5) -> tuple[Tensor, Tensor]:
    """Overconfident logits: right about half of the time."""
    g = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, classes, (images,), generator=g)
    logits = 4 * torch.randn(images, classes, generator=g, dtype=torch.float64) + 4 * torch.eye(classes)[labels]
    return logits, labels


@pytest.mark.parametrize("right", [60, 75, 99])
def test_two_classes_in_closed_form(right: int) -> None:
    """Logits (a, 0), right in a part q of the images: sigmoid(a / T) = q."""
    logits = torch.tensor([[3.0, 0.0]]).repeat(100, 1)
    labels = (torch.arange(100) >= right).long()
    q = right / 100
    assert fit_temperature(logits, labels) == pytest.approx(3 / math.log(q / (1 - q)), rel=1e-8)


def test_equals_a_general_optimiser() -> None:
    z, y = held_out(0)
    theirs = minimize_scalar(lambda t: float(cross_entropy(z / t, y)), bounds=(0.1, 20), options={"xatol": 1e-8})
    assert fit_temperature(z, y) == pytest.approx(theirs.x, rel=1e-6)


def test_labels_drawn_at_a_temperature_give_it_back() -> None:
    """The error of a maximum-likelihood 1 / T is 1 / sqrt(information): the variance of the logits, summed."""
    g = torch.Generator().manual_seed(1)
    z = 3 * torch.randn(4000, 6, generator=g, dtype=torch.float64)
    p = (z / 2.5).softmax(1)
    y = torch.multinomial(p, 1, generator=g).squeeze(1)
    information = float(((p * z.square()).sum(1) - (p * z).sum(1).square()).sum())
    assert 1 / fit_temperature(z, y) == pytest.approx(1 / 2.5, abs=4 / math.sqrt(information))


def test_ends_and_classes_that_cannot_be() -> None:
    z, y = held_out(2)
    assert fit_temperature(torch.eye(5)[y], y) == COLDEST  # all right: the colder the better
    assert fit_temperature(-torch.eye(5)[y], y) == HOTTEST  # all wrong: the less it says the better
    without = torch.cat([z, torch.full((200, 1), -torch.inf)], 1)
    assert fit_temperature(without, y) == pytest.approx(fit_temperature(z, y), rel=1e-9)
    y_new = y.clone()
    y_new[:50] = 5  # of a class with logit -inf: left out
    assert fit_temperature(without, y_new) == pytest.approx(fit_temperature(z[50:], y[50:]), rel=1e-9)
    with pytest.raises(ValueError, match="every label has logit -inf"):
        fit_temperature(without, torch.full_like(y, 5))


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**31), images=st.integers(30, 80), scale=st.floats(0.3, 3))
def test_properties_of_the_temperature(seed: int, images: int, scale: float) -> None:
    z, y = held_out(seed, images)
    t = fit_temperature(z, y)
    before, after = z.softmax(1), (z / t).softmax(1)
    assert nll(after, y) <= nll(before, y) + 1e-12
    assert top_k_accuracy(after, y, 1) == top_k_accuracy(before, y, 1)
    if COLDEST * 3 < t < HOTTEST / 3:
        assert fit_temperature(scale * z, y) == pytest.approx(scale * t, rel=1e-6)
    assert fit_temperature(z + torch.arange(images)[:, None], y) == pytest.approx(t, rel=1e-6)
    order = torch.randperm(images, generator=torch.Generator().manual_seed(seed))
    assert fit_temperature(z[order], y[order]) == pytest.approx(t, rel=1e-6)


def test_bad_inputs_get_a_sentence_of_the_temperature() -> None:
    z, y = held_out(3, 10)
    for arguments, says in (
        ((z * torch.nan, y), "finite"),
        ((z, y + 5), "only classes"),
        ((z, y[:5]), "do not match"),
    ):
        with pytest.raises(ValueError, match=says):
            fit_temperature(*arguments)
