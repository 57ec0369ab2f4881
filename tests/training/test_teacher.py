"""The teacher: moved by exactly 1 - tau, of the means and never of a draw; its running variance."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from byov._core.randomness import generator
from byov.backbones import build_encoder
from byov.config import Model
from byov.posterior import Posterior
from byov.training.networks import Student
from byov.training.teacher import Teacher

MODEL = Model(width=16, depth=1, heads=2, patch=4, head_hidden=12, head_output=6)


def pair(where: str = "all", moments: bool = False) -> tuple[Posterior, Teacher]:
    torch.manual_seed(0)
    student = Student(build_encoder(MODEL, (1, 8, 8)), MODEL).double()
    teacher = Teacher(student, where, moments)
    return Posterior(student, where), teacher


def test_moves_by_one_minus_tau_towards_the_means() -> None:
    for where in ("all", "linear", "none"):
        posterior, teacher = pair(where)
        with torch.no_grad():
            for p in posterior.parameters():
                p.add_(torch.randn_like(p))
        before = [p.clone() for p in (teacher.means, *teacher.module.parameters())]
        now = [posterior.means, *posterior.module.parameters()]
        with torch.no_grad(), posterior.sampled(generator(1)):  # a draw must not leak into the teacher
            teacher.update(posterior, 0.9)
        for old, target, new in zip(before, now, (teacher.means, *teacher.module.parameters()), strict=True):
            torch.testing.assert_close(new, 0.9 * old + 0.1 * target)


def test_tau_one_stands_still_and_tau_zero_copies() -> None:
    posterior, teacher = pair()
    with torch.no_grad():
        posterior.means.add_(1)
    before = teacher.means.clone()
    teacher.update(posterior, 1.0)
    assert torch.equal(teacher.means, before)
    teacher.update(posterior, 0.0)
    torch.testing.assert_close(teacher.means.detach(), posterior.means.detach())


@settings(max_examples=15, deadline=None)
@given(st.floats(0.5, 0.999), st.integers(0, 10_000))
def test_variance_equals_the_second_moment_less_the_square_of_the_first(tau: float, seed: int) -> None:
    posterior, teacher = pair(moments=True)
    g = torch.Generator().manual_seed(seed)
    first, second = teacher.means.detach().clone(), teacher.means.detach() ** 2
    for _ in range(12):
        with torch.no_grad():
            posterior.means.copy_(torch.randn(posterior.means.shape, generator=g, dtype=torch.float64))
        teacher.update(posterior, tau)
        first = tau * first + (1 - tau) * posterior.means.detach()
        second = tau * second + (1 - tau) * posterior.means.detach() ** 2
    torch.testing.assert_close(teacher.variance, second - first**2)
    assert (teacher.variance >= 0).all()


def test_batch_statistics_are_its_own_and_no_gradient_flows() -> None:
    posterior, teacher = pair()
    images = torch.rand(5, 1, 8, 8, dtype=torch.float64)
    assert not teacher(images).requires_grad
    norms = [m.module.projector[1].running_mean for m in (teacher, posterior)]
    assert not torch.equal(*norms)  # the teacher's moved, the student's has seen nothing
    assert teacher.module.training


def test_only_encoder_and_projector_run() -> None:
    _, teacher = pair()
    teacher.module.predictor.forward = None  # calling it would fail
    assert teacher(torch.rand(3, 1, 8, 8, dtype=torch.float64)).shape == (3, 6)


def test_distance() -> None:
    posterior, teacher = pair()
    assert teacher.distance(posterior) == 0
    with torch.no_grad():
        posterior.means.mul_(1.5)
    assert abs(teacher.distance(posterior) - 0.5) < 1e-9
