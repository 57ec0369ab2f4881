"""Selective prediction by hand, against every order of equals, and what must hold for any uncertainty."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import roc_auc_score
from torch import Tensor

from byov.metrics import accuracy_at_coverage, aurc, excess_aurc, risk_coverage, selective_prediction


def answers(seed: int, images: int = 200, distinct: int = 30) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    wrong = torch.rand(images, generator=g) < 0.3
    return ((torch.randn(images, generator=g) + wrong) * distinct / 6).round(), wrong


def test_by_hand() -> None:
    u, wrong = torch.tensor([0.3, 0.1, 0.4, 0.2]), torch.tensor([True, False, False, False])
    curve = risk_coverage(u, wrong)
    assert curve.coverage.tolist() == [0.25, 0.5, 0.75, 1]
    assert curve.risk.tolist() == pytest.approx([0, 0, 1 / 3, 1 / 4])
    assert aurc(u, wrong) == pytest.approx((1 / 3 + 1 / 4) / 4)
    assert excess_aurc(u, wrong) == pytest.approx(1 / 3 / 4)  # best: the error last
    assert [accuracy_at_coverage(u, wrong, c) for c in (0.01, 0.5, 0.51, 0.75, 1)] == pytest.approx(
        [1, 1, 2 / 3, 2 / 3, 3 / 4]
    )


def test_ties_are_the_mean_over_every_order() -> None:
    u = torch.tensor([1.0, 1.0, 0.0, 1.0, 2.0, 2.0])
    wrong = torch.tensor([True, False, False, False, True, False])
    curves = []
    for order in itertools.permutations(range(6)):
        if all(u[a] <= u[b] for a, b in itertools.pairwise(order)):
            curves.append(wrong[list(order)].double().cumsum(0) / torch.arange(1, 7))
    assert len(curves) == 6 * 2
    expected = torch.stack(curves).mean(0)
    assert risk_coverage(u, wrong).risk.tolist() == pytest.approx(expected.tolist())
    assert aurc(u, wrong) == pytest.approx(float(expected.mean()))


def test_an_uncertainty_that_knows_nothing_has_the_error_rate_everywhere() -> None:
    _, wrong = answers(0)
    assert risk_coverage(torch.zeros(200), wrong).risk.tolist() == pytest.approx([float(wrong.double().mean())] * 200)


def test_excess_is_near_the_closed_form_of_the_paper() -> None:
    """The best AURC of n images with error rate r tends to r + (1 - r) log(1 - r), within about log(n) / n."""
    n, r = 10_000, 0.3
    wrong = torch.arange(n) < r * n
    best = r + (1 - r) * math.log(1 - r)
    assert aurc(wrong.double(), wrong) == pytest.approx(best, abs=math.log(n) / n)
    assert excess_aurc(torch.zeros(n), wrong) == pytest.approx(r - best, abs=math.log(n) / n)


def test_coverages_that_are_whole_numbers_of_images() -> None:
    """20 images: 80%, 90%, 95% are 16, 18, 19 of them, in whatever way .95 * 20 rounds."""
    wrong = torch.zeros(20, dtype=torch.bool)
    wrong[[16, 18, 19]] = True
    found = selective_prediction(torch.arange(20.0), wrong)
    assert (found.accuracy_at_80, found.accuracy_at_90, found.accuracy_at_95) == pytest.approx((1, 17 / 18, 17 / 19))


def test_all_together() -> None:
    u, wrong = answers(1)
    found = selective_prediction(u, wrong)
    assert found.error_auroc == pytest.approx(roc_auc_score(wrong, u), abs=1e-12)
    assert (found.aurc, found.excess_aurc) == (aurc(u, wrong), excess_aurc(u, wrong))
    assert found.accuracy_at_90 == accuracy_at_coverage(u, wrong, 0.9)
    assert all(type(value) is float for value in found)
    none = selective_prediction(u, wrong & False)
    assert none[:5] == (0, 0, 1, 1, 1) and math.isnan(none.error_auroc)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**31), images=st.integers(1, 60), distinct=st.integers(1, 30))
def test_properties(seed: int, images: int, distinct: int) -> None:
    u, wrong = answers(seed, images, distinct)
    value = aurc(u, wrong)
    assert 0 <= value <= 1 and excess_aurc(u, wrong) >= -1e-12
    assert excess_aurc(wrong.double(), wrong) == pytest.approx(0, abs=1e-12)
    assert value <= aurc(-wrong.double(), wrong) + 1e-12  # no order is worse than all errors first
    curve = risk_coverage(u, wrong)
    assert float(curve.risk[-1]) == pytest.approx(float(wrong.double().mean()))
    assert accuracy_at_coverage(u, wrong, 1) == pytest.approx(1 - float(wrong.double().mean()))
    order = torch.randperm(images, generator=torch.Generator().manual_seed(seed))
    assert aurc(u[order], wrong[order]) == pytest.approx(value, abs=1e-12)
    assert aurc((u / 10).exp(), wrong) == value


def test_bad_inputs_get_a_sentence() -> None:
    u, wrong = answers(2, 10)
    for function in (aurc, excess_aurc, risk_coverage, selective_prediction):
        with pytest.raises(ValueError, match="bool"):
            function(u, wrong.double())
    for coverage in (0, 1.5):
        with pytest.raises(ValueError, match="coverage is"):
            accuracy_at_coverage(u, wrong, coverage)
