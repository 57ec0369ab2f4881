"""AUROC, average precision and FPR at a TPR against scikit-learn, with ties; what must hold for any scores."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import rankdata
from sklearn.metrics import average_precision_score, roc_auc_score, roc_curve
from torch import Tensor

from byov.metrics import auroc, average_precision, fpr_at_tpr
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


def test_by_hand() -> None:
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
def test_properties(seed: int, images: int, distinct: int) -> None:
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


def test_bad_inputs_get_a_sentence() -> None:
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
