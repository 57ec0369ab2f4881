"""Ranking, selective prediction and OOD detection against other libraries and by hand."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import rankdata
from sklearn.metrics import average_precision_score, roc_auc_score, roc_curve
from torch import Tensor

from byov.metrics import (
    accuracy_at_coverage,
    aurc,
    auroc,
    average_precision,
    excess_aurc,
    fpr_at_tpr,
    ood_detection,
    risk_coverage,
    selective_prediction,
)
from byov.metrics.ranking import midranks

MEASURES = {"auroc": auroc, "average_precision": average_precision, "fpr95": fpr_at_tpr}


def scored(seed: int, images: int = 300, distinct: int = 40) -> tuple[Tensor, Tensor]:
    """Scores with many ties, a little higher for the positive images; at least one image of either kind."""
    g = torch.Generator().manual_seed(seed)
    positive = torch.rand(images, generator=g) < 0.3
    positive[:2] = torch.tensor([True, False])
    scores = torch.randn(images, generator=g).double() + positive
    return (scores * distinct / 6).round(), positive


@pytest.mark.parametrize("distinct", [3, 40, 10**6])
def test_equal_sklearn(distinct: int) -> None:
    s, positive = scored(0, distinct=distinct)
    assert auroc(s, positive) == pytest.approx(roc_auc_score(positive, s), abs=1e-12)
    assert average_precision(s, positive) == pytest.approx(average_precision_score(positive, s), abs=1e-12)
    fpr, tpr, _ = roc_curve(positive, s, drop_intermediate=False)
    for wanted in (0.5, 0.8, 0.95, 1.0):
        assert fpr_at_tpr(s, positive, wanted) == pytest.approx(fpr[tpr >= wanted][0], abs=1e-12)


def test_by_hand_of_ranking() -> None:
    s, positive = torch.tensor([4.0, 3.0, 3.0, 2.0, 1.0]), torch.tensor([True, True, False, False, True])
    # pairs of a positive and another: 4 beats both, 3 beats 2 and ties with 3, 1 loses both
    assert auroc(s, positive) == pytest.approx((2 + 1.5 + 0) / 6)
    # thresholds 4 (1 of 1), 3 (2 of 3), 1 (3 of 5): each brings a third of the recall
    assert average_precision(s, positive) == pytest.approx((1 + 2 / 3 + 3 / 5) / 3)
    assert fpr_at_tpr(s, positive, 0.6) == 0.5 and fpr_at_tpr(s, positive) == 1


def test_a_rate_that_a_whole_number_of_images_meets_exactly() -> None:
    s = torch.arange(40.0)
    positive = s >= 20
    positive[[0, 20]] = positive[[20, 0]]  # 19 of 20 positive images are above every other
    assert fpr_at_tpr(s, positive, 0.95) == 0
    assert fpr_at_tpr(s, positive, 1.0) == 1


def test_one_kind_only_is_nan() -> None:
    s, yes = torch.rand(5), torch.ones(5, dtype=torch.bool)
    assert all(math.isnan(value) for value in (auroc(s, yes), auroc(s, ~yes), fpr_at_tpr(s, yes), fpr_at_tpr(s, ~yes)))
    assert math.isnan(average_precision(s, ~yes)) and average_precision(s, yes) == 1


def test_midranks_equal_scipy_and_weights_repeat_images() -> None:
    s, _ = scored(1, 50, 10)
    assert midranks(s).tolist() == rankdata(s).tolist()
    counts = torch.randint(0, 4, (3, 50), generator=torch.Generator().manual_seed(0))
    for row, times in zip(midranks(s, counts.double()), counts, strict=True):
        assert row.repeat_interleave(times).tolist() == rankdata(s.repeat_interleave(times)).tolist()


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**31), images=st.integers(2, 60), distinct=st.integers(1, 30))
def test_properties_of_ranking(seed: int, images: int, distinct: int) -> None:
    s, positive = scored(seed, images, distinct)
    order = torch.randperm(images, generator=torch.Generator().manual_seed(seed))
    for measure in MEASURES.values():
        value = measure(s, positive)
        assert 0 <= value <= 1
        assert measure(s[order], positive[order]) == value
        assert measure((s / 10).exp() - 5, positive) == value  # a rising function of the scores
        assert measure(s.float(), positive) == value
    assert auroc(-s, positive) == pytest.approx(1 - auroc(s, positive), abs=1e-12)
    assert auroc(s, ~positive) == pytest.approx(1 - auroc(s, positive), abs=1e-12)
    assert [m(positive.double(), positive) for m in MEASURES.values()] == [1, 1, 0]
    assert auroc(s * 0, positive) == 0.5


def test_bad_inputs_get_a_sentence_of_ranking() -> None:
    s, positive = scored(2, 10)
    for measure in MEASURES.values():
        for arguments, says in (
            ((s[:, None], positive), "shape"),
            ((s.long(), positive), "float"),
            ((s / 0 * 0, positive), "NaN"),
            ((s, positive.long()), "bool"),
            ((s, positive[:9]), "as many flags"),
            ((s[:0], positive[:0]), "at least one"),
        ):
            with pytest.raises(ValueError, match=says):
                measure(*arguments)
    with pytest.raises(ValueError, match="tpr is 0"):
        fpr_at_tpr(s, positive, 0)


def answers(seed: int, images: int = 200, distinct: int = 30) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    wrong = torch.rand(images, generator=g) < 0.3
    return ((torch.randn(images, generator=g) + wrong) * distinct / 6).round(), wrong


def test_by_hand_of_selective_prediction() -> None:
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
def test_properties_of_selective_prediction(seed: int, images: int, distinct: int) -> None:
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


def test_bad_inputs_get_a_sentence_of_selective_prediction() -> None:
    u, wrong = answers(2, 10)
    for function in (aurc, excess_aurc, risk_coverage, selective_prediction):
        with pytest.raises(ValueError, match="bool"):
            function(u, wrong.double())
    for coverage in (0, 1.5):
        with pytest.raises(ValueError, match="coverage is"):
            accuracy_at_coverage(u, wrong, coverage)


def uncertainties(seed: int, inside: int = 200, outside: int = 70) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    u = (10 * torch.randn(inside + outside, generator=g)).round()
    return u[:inside], u[inside:] + 8


def test_equals_sklearn_in_both_roles() -> None:
    inside, outside = uncertainties(0)
    found = ood_detection(inside, outside)
    scores, out = torch.cat([inside, outside]), torch.arange(270) >= 200
    assert found.auroc == pytest.approx(roc_auc_score(out, scores), abs=1e-12)
    assert found.aupr_out == pytest.approx(average_precision_score(out, scores), abs=1e-12)
    assert found.aupr_in == pytest.approx(average_precision_score(~out, -scores), abs=1e-12)
    fpr, tpr, _ = roc_curve(~out, -scores, drop_intermediate=False)
    assert found.fpr95 == pytest.approx(fpr[tpr >= 0.95][0], abs=1e-12)


def test_by_hand_of_ood_detection() -> None:
    inside = torch.arange(20.0)  # 95% of them are at or below 18
    found = ood_detection(inside, torch.tensor([17.5, 18.0, 18.5, 30.0]))
    assert found.fpr95 == 0.5
    assert found.auroc == pytest.approx((18 + 18.5 + 19 + 20) / 80)


def test_two_normals_in_closed_form() -> None:
    """N(0, 1) inside and N(d, 1) outside: AUROC = Phi(d / sqrt 2), FPR95 = Phi(1.645 - d)."""
    n, d = 20_000, 1.5
    g = torch.Generator().manual_seed(0)
    found = ood_detection(torch.randn(n, generator=g), torch.randn(n, generator=g) + d)
    phi = torch.distributions.Normal(0, 1).cdf
    area, rate = float(phi(torch.tensor(d / math.sqrt(2)))), float(phi(torch.tensor(1.6449 - d)))
    assert found.auroc == pytest.approx(area, abs=4 * math.sqrt(area * (1 - area) / n))  # above Hanley and McNeil's
    # the counts outside, and the 95% quantile inside times the density of the others there
    density = math.exp(-((1.6449 - d) ** 2) / 2) / math.sqrt(2 * math.pi)
    quantile = math.sqrt(0.95 * 0.05 / n) / 0.1031
    error = math.hypot(math.sqrt(rate * (1 - rate) / n), density * quantile)
    assert found.fpr95 == pytest.approx(rate, abs=4 * error)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**31), inside=st.integers(1, 40), outside=st.integers(1, 40))
def test_properties_of_ood_detection(seed: int, inside: int, outside: int) -> None:
    a, b = uncertainties(seed, inside, outside)
    found = ood_detection(a, b)
    assert all(0 <= value <= 1 for value in found)
    assert ood_detection(a.flip(0), b.flip(0)) == found
    assert ood_detection((a / 20).exp(), (b / 20).exp()) == pytest.approx(found)
    assert ood_detection(a, a.max() + 1 + b.abs()) == (1, 1, 1, 0)
    assert ood_detection(b, a).auroc == pytest.approx(1 - found.auroc, abs=1e-12)


def test_none_of_one_kind_is_nan_and_bad_inputs_get_a_sentence() -> None:
    a, b = uncertainties(0)
    assert math.isnan(ood_detection(a, b[:0]).auroc)
    with pytest.raises(ValueError, match="NaN"):
        ood_detection(a, b * torch.nan)
