"""OOD detection against scikit-learn, and what must hold for any scores."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import average_precision_score, roc_auc_score, roc_curve
from torch import Tensor

from byov.metrics import ood_detection


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


def test_by_hand() -> None:
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
def test_properties(seed: int, inside: int, outside: int) -> None:
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
