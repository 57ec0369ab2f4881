"""Temperature scaling in closed form, against a general optimiser, and what must hold for any logits."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize_scalar
from torch import Tensor
from torch.nn.functional import cross_entropy

from byov.metrics import fit_temperature, nll, top_k_accuracy
from byov.metrics.temperature_scaling import COLDEST, HOTTEST


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
def test_properties(seed: int, images: int, scale: float) -> None:
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


def test_bad_inputs_get_a_sentence() -> None:
    z, y = held_out(3, 10)
    for arguments, says in (
        ((z * torch.nan, y), "finite"),
        ((z, y + 5), "only classes"),
        ((z, y[:5]), "do not go with"),
    ):
        with pytest.raises(ValueError, match=says):
            fit_temperature(*arguments)
