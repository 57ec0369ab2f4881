import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from byov.objectives import byol, supervised


def four(seed: int = 0) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(6, 5, generator=g, dtype=torch.float64) for _ in range(4)]


def test_equals_the_squared_distance_of_unit_vectors() -> None:
    p1, p2, z1, z2 = four()
    unit = [F.normalize(t, dim=1) for t in (p1, p2, z1, z2)]
    expected = ((unit[0] - unit[3]) ** 2).sum(1) + ((unit[1] - unit[2]) ** 2).sum(1)
    torch.testing.assert_close(byol.loss(p1, p2, z1, z2), expected.mean())


def test_the_two_directions_are_summed() -> None:
    a = torch.tensor([[1.0, 0.0]])
    b = torch.tensor([[0.0, 1.0]])
    assert float(byol.loss(a, b, b, a)) == pytest.approx(0.0)  # each predicts the other view's target
    assert float(byol.loss(a, b, a, b)) == pytest.approx(4.0)  # both at right angles: 2 + 2
    assert float(byol.loss(a, b, -b, -a)) == pytest.approx(8.0)


def test_no_gradient_to_the_teacher() -> None:
    p1, p2, z1, z2 = (t.requires_grad_() for t in four())
    byol.loss(p1, p2, z1, z2).backward()
    assert p1.grad is not None and p2.grad is not None and z1.grad is None and z2.grad is None


@settings(max_examples=20, deadline=None)
@given(st.floats(0.1, 50), st.floats(0.1, 50))
def test_scale_does_not_matter_and_views_may_be_exchanged(a: float, b: float) -> None:
    p1, p2, z1, z2 = four()
    value = byol.loss(p1, p2, z1, z2)
    torch.testing.assert_close(byol.loss(a * p1, b * p2, b * z1, a * z2), value)
    torch.testing.assert_close(byol.loss(p2, p1, z2, z1), value)
    assert 0 <= float(value) <= 8


def test_bfloat16_is_computed_in_float32() -> None:
    assert byol.loss(*(t.to(torch.bfloat16) for t in four())).dtype == torch.float32


def test_cross_entropy_by_hand() -> None:
    logits = torch.tensor([[0.0, 0.0], [2.0, 0.0]], dtype=torch.float64)
    expected = (torch.log(torch.tensor(2.0)) + torch.log1p(torch.exp(torch.tensor(2.0)))) / 2
    torch.testing.assert_close(supervised.loss(logits, torch.tensor([0, 1])), expected.double())
