"""The teacher (moved by exactly 1 - tau, of the means and never of a draw) and the learners' prior `pretrained`."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributions import Normal, kl_divergence

import tiny
from byov import config as byov_config
from byov._core.randomness import generator
from byov.backbones import build_encoder
from byov.config import Model
from byov.posterior import Posterior
from byov.posterior.priors import add_kl
from byov.training.learners import SelfSupervised, Student, Supervised, Teacher

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


def learner(folder: Path, method: str, **posterior: float | str) -> SelfSupervised | Supervised:
    config = byov_config.Posterior(prior="pretrained", prior_std=0.3, **posterior)  # type: ignore[arg-type]
    return tiny.trainer(folder, tiny.config(method, posterior=config)).learner


@pytest.mark.parametrize("method", ["byov", "supervised-bbb"])
def test_the_pretrained_prior_against_the_closed_form(tmp_path: Path, method: str) -> None:
    trained = learner(tmp_path, method)
    posterior = trained.posterior
    start = {name: value.clone() for name, value in posterior.segments.named(posterior.means.detach()).items()}
    with torch.no_grad():
        posterior.means.add_(torch.randn(posterior.means.shape, generator=torch.Generator().manual_seed(0)))
    expected = torch.zeros((), dtype=torch.float64)
    means, log_variances = (t.detach().double().requires_grad_() for t in (posterior.means, posterior.log_variances))
    sigmas = posterior.segments.named((log_variances / 2).exp())
    for name, mean in posterior.segments.named(means).items():
        inside = name.startswith("encoder.")
        centre = start[name].double() if inside else torch.zeros_like(mean)
        prior = Normal(centre, torch.full_like(mean, 0.3 if inside else 1.0))
        expected = expected + kl_divergence(Normal(mean, sigmas[name]), prior).sum()
    assert trained.prior is not None
    torch.testing.assert_close(add_kl(posterior, trained.prior, 2.0).double(), expected.detach(), rtol=1e-5, atol=0)
    wanted = torch.autograd.grad(2 * expected, (means, log_variances))
    torch.testing.assert_close(posterior.means.grad.double(), wanted[0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(posterior.log_variances.grad.double(), wanted[1], rtol=1e-4, atol=1e-5)


def test_a_checkpoint_keeps_the_prior(tmp_path: Path) -> None:
    config = tiny.config(posterior=byov_config.Posterior(prior="pretrained", prior_std=0.3))
    trainer = tiny.trainer(tmp_path, config)
    mean = trainer.learner.prior.mean.clone()  # type: ignore[union-attr]
    trainer._advance()
    trainer.save()
    again = tiny.trainer(tmp_path, replace(config))
    again.learner.prior.mean.zero_()  # type: ignore[union-attr]
    again.restore()
    assert torch.equal(again.learner.prior.mean, mean)  # type: ignore[union-attr]
    assert not torch.equal(again.learner.posterior.means, mean)
