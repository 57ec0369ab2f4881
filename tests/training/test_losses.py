"""The losses of learners.py against their formulas, written out image by image, and against cross-entropy."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from byov._core.errors import BadInput
from byov.config import Config, Objective
from byov.training.learners import byol_loss, contrastive_loss, cross_entropy, repulsion
from byov.training.resolve import resolve


def four(seed: int = 0) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(6, 5, generator=g, dtype=torch.float64) for _ in range(4)]


def test_equals_the_squared_distance_of_unit_vectors() -> None:
    p1, p2, z1, z2 = four()
    unit = [F.normalize(t, dim=1) for t in (p1, p2, z1, z2)]
    expected = ((unit[0] - unit[3]) ** 2).sum(1) + ((unit[1] - unit[2]) ** 2).sum(1)
    torch.testing.assert_close(byol_loss(p1, p2, z1, z2), expected.mean())


def test_the_two_directions_are_summed() -> None:
    a = torch.tensor([[1.0, 0.0]])
    b = torch.tensor([[0.0, 1.0]])
    assert float(byol_loss(a, b, b, a)) == pytest.approx(0.0)  # each predicts the other view's target
    assert float(byol_loss(a, b, a, b)) == pytest.approx(4.0)  # both at right angles: 2 + 2
    assert float(byol_loss(a, b, -b, -a)) == pytest.approx(8.0)


def test_no_gradient_to_the_teacher() -> None:
    p1, p2, z1, z2 = (t.requires_grad_() for t in four())
    byol_loss(p1, p2, z1, z2).backward()
    assert p1.grad is not None and p2.grad is not None and z1.grad is None and z2.grad is None


@settings(max_examples=20, deadline=None)
@given(st.floats(0.1, 50), st.floats(0.1, 50))
def test_scale_does_not_matter_and_views_may_be_exchanged(a: float, b: float) -> None:
    p1, p2, z1, z2 = four()
    value = byol_loss(p1, p2, z1, z2)
    torch.testing.assert_close(byol_loss(a * p1, b * p2, b * z1, a * z2), value)
    torch.testing.assert_close(byol_loss(p2, p1, z2, z1), value)
    assert 0 <= float(value) <= 8


def test_bfloat16_is_computed_in_float32() -> None:
    assert byol_loss(*(t.to(torch.bfloat16) for t in four())).dtype == torch.float32


def test_cross_entropy_by_hand() -> None:
    logits = torch.tensor([[0.0, 0.0], [2.0, 0.0]], dtype=torch.float64)
    expected = (torch.log(torch.tensor(2.0)) + torch.log1p(torch.exp(torch.tensor(2.0)))) / 2
    torch.testing.assert_close(cross_entropy(logits, torch.tensor([0, 1])), expected.double())


def test_the_repulsion_written_out() -> None:
    p, z, *_ = four()
    total = 0.0
    for i in range(6):
        others = [math.exp(float(F.cosine_similarity(p[i], z[j], dim=0)) / 0.1) for j in range(6) if j != i]
        total += 2 * 0.1 * math.log(sum(others) / 5)
    assert float(repulsion(p, z, 0.1)) == pytest.approx(total / 6)


def test_without_weight_it_is_byol_and_else_the_directions_are_summed() -> None:
    p1, p2, z1, z2 = four()
    assert torch.equal(contrastive_loss(p1, p2, z1, z2, weight=0.0), byol_loss(p1, p2, z1, z2))
    added = repulsion(p1, z2, 0.2) + repulsion(p2, z1, 0.2)
    torch.testing.assert_close(contrastive_loss(p1, p2, z1, z2, 3.0, 0.2), byol_loss(p1, p2, z1, z2) + 3 * added)


def test_others_all_alike_give_their_cosine() -> None:
    same = torch.ones(4, 3)
    assert float(repulsion(same, same, 0.1)) == pytest.approx(2.0)
    assert float(repulsion(same, -same, 0.1)) == pytest.approx(-2.0)


def test_one_image_has_no_others() -> None:
    with pytest.raises(ValueError, match="at least two"):
        repulsion(torch.ones(1, 3), torch.ones(1, 3), 0.1)


def test_with_weight_1_it_is_infonce_whose_sum_leaves_the_image_itself_out() -> None:
    p1, p2, z1, z2 = four()
    expected = torch.tensor(4 - 4 * 0.1 * math.log(5), dtype=torch.float64)
    for p, z in ((p1, z2), (p2, z1)):
        cosines = F.normalize(p, dim=1) @ F.normalize(z, dim=1).T / 0.1
        for i in range(6):
            rest = torch.cat([cosines[i, :i], cosines[i, i + 1 :]])
            expected += 2 * 0.1 * (rest.logsumexp(0) - cosines[i, i]) / 6
    torch.testing.assert_close(contrastive_loss(p1, p2, z1, z2), expected)


def test_no_gradient_to_the_teacher_and_float32_for_bfloat16() -> None:
    p1, p2, z1, z2 = (t.requires_grad_() for t in four())
    contrastive_loss(p1, p2, z1, z2).backward()
    assert p1.grad is not None and p2.grad is not None and z1.grad is None and z2.grad is None
    assert contrastive_loss(*(t.detach().to(torch.bfloat16) for t in four())).dtype == torch.float32


@pytest.mark.parametrize(
    ("method", "world", "objective"),
    [
        ("supervised", 1, Objective("byol_negatives")),
        ("byov", 2, Objective("byol_negatives")),
        ("byov", 1, Objective("byol_negatives", negatives_temperature=0.0)),
        ("byov", 1, Objective("byol_negatives", negatives_weight=-1.0)),
    ],
)
def test_what_it_cannot_do_is_bad_input(method: str, world: int, objective: Objective) -> None:
    config = replace(Config(), method=method, objective=objective)
    with pytest.raises(BadInput, match=r"objective\."):
        resolve(config, (1, 8, 8), 256, flips=False, world=world)
