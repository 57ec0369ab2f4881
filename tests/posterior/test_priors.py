"""Each prior's KL and gradient against torch.distributions and autograd."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributions import Normal, kl_divergence

import byov
from byov import priors
from byov._compiled import fused
from byov._core.randomness import CHUNK

N = 2 * CHUNK + 17  # more than one chunk, and an odd end


def flat(seed: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    means = torch.randn(N, generator=g, dtype=dtype)
    return means.requires_grad_(), (torch.randn(N, generator=g, dtype=dtype) * 2 - 5).requires_grad_()


OTHER = torch.randn(N, dtype=torch.float64, generator=torch.Generator().manual_seed(8))
VARIANCE = torch.rand(N, dtype=torch.float64, generator=torch.Generator().manual_seed(9)) * 1e-3
FLOOR = math.exp(-10)

CASES = {
    "standard": (priors.Standard(), torch.zeros(N), torch.ones(N)),
    "teacher_mean": (priors.TeacherMean(OTHER), OTHER, torch.ones(N)),
    "teacher_moments": (priors.TeacherMoments(OTHER, VARIANCE), OTHER, VARIANCE.clamp(min=FLOOR)),
    "pretrained": (priors.Pretrained(OTHER, 0.3), OTHER, torch.full((N,), 0.3**2, dtype=torch.float64)),
    "pretrained_stds": (priors.Pretrained(OTHER, 0.1 + VARIANCE), OTHER, (0.1 + VARIANCE) ** 2),
}


@pytest.mark.parametrize("name", CASES)
def test_kl_and_gradient_equal_torch_distributions(name: str) -> None:
    prior, mean, variance = CASES[name]
    means, log_variances = flat(1)
    kl = prior.kl(means, log_variances)
    expected = kl_divergence(
        Normal(means, (log_variances / 2).exp()), Normal(mean.double(), variance.double().sqrt())
    ).sum()
    torch.testing.assert_close(kl, expected)
    got, want = (torch.autograd.grad(3 * v, (means, log_variances)) for v in (kl, expected))
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("name", CASES)
def test_float32_is_close_to_float64(name: str) -> None:
    prior, _, _ = CASES[name]
    means, log_variances = flat(2)
    single = prior.kl(means.float(), log_variances.float())
    assert single.dtype == torch.float32
    torch.testing.assert_close(single.double(), prior.kl(means, log_variances), rtol=1e-5, atol=0)


@pytest.mark.parametrize("name", CASES)
def test_kl_is_zero_at_the_prior(name: str) -> None:
    prior, mean, variance = CASES[name]
    means, log_variances = mean.double().requires_grad_(), variance.double().log().requires_grad_()
    kl = prior.kl(means, log_variances)
    kl.backward()
    assert abs(float(kl.detach())) < 1e-9 * N
    assert means.grad.abs().max() == 0 and log_variances.grad.abs().max() < 1e-12


@pytest.mark.parametrize("threads", [1, 3])
def test_add_kl_equals_backward(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "ALONE", 0)  # so few weights would stay on one thread
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        posterior = byov.Posterior(nn.Linear(300, 250), init_log_variance=-4.0)
        prior = priors.Gaussian(torch.randn_like(posterior.means), 0.5)
        with posterior.sampled():
            posterior(torch.randn(2, 300)).square().sum().backward()
        start = [p.grad.clone() for p in (posterior.means, posterior.log_variances)]
        (0.1 * posterior.kl(prior)).backward()
        expected = [p.grad.clone() for p in (posterior.means, posterior.log_variances)]
        posterior.means.grad, posterior.log_variances.grad = start
        kl = priors.add_kl(posterior, prior, 0.1)
        torch.testing.assert_close(kl, posterior.kl(prior).detach())
        torch.testing.assert_close([posterior.means.grad, posterior.log_variances.grad], expected)
    finally:
        torch.set_num_threads(before)


def test_a_users_own_prior() -> None:
    class Laplace:  # E_q |w| needs no closed form for the test: any differentiable scalar will do
        def kl(self, means: Tensor, log_variances: Tensor) -> Tensor:
            return means.abs().sum() - log_variances.sum() / 2

    posterior = byov.Posterior(nn.Linear(3, 2))
    assert priors.add_kl(posterior, Laplace(), 2.0) == posterior.kl(Laplace()).detach()
    torch.testing.assert_close(posterior.means.grad, 2 * posterior.means.detach().sign())
    torch.testing.assert_close(posterior.log_variances.grad, torch.full((8,), -1.0))


def test_no_gradient_flows_into_a_prior() -> None:
    mean = torch.zeros(N, dtype=torch.float64, requires_grad=True)
    means, log_variances = flat(3)
    priors.Gaussian(mean, 1.0).kl(means, log_variances).backward()
    assert mean.grad is None


def test_a_prior_reads_its_tensors_afresh() -> None:
    mean = torch.zeros(N, dtype=torch.float64)
    prior = priors.TeacherMean(mean)
    means, log_variances = flat(4)
    before = float(prior.kl(means, log_variances).detach())
    mean.add_(1)
    assert float(prior.kl(means, log_variances).detach()) != before
    kept = priors.Pretrained(mean, 1.0)
    value = float(kept.kl(means, log_variances).detach())
    mean.add_(1)
    assert float(kept.kl(means, log_variances).detach()) == value  # given weights do not move


def test_a_subclass_with_a_kl_of_its_own_is_asked() -> None:
    class Doubled(priors.Standard):
        def kl(self, means: Tensor, log_variances: Tensor) -> Tensor:
            return 2 * super().kl(means, log_variances)

    posterior = byov.Posterior(nn.Linear(3, 2))
    assert priors.add_kl(posterior, Doubled(), 1.0) == 2 * posterior.kl(priors.Standard()).detach()


def test_add_kl_checks_shapes_too() -> None:
    with pytest.raises(ValueError, match="weights"):
        priors.add_kl(byov.Posterior(nn.Linear(3, 2)), priors.TeacherMean(torch.zeros(1)), 1.0)


def test_wrong_shapes_and_variances_are_refused() -> None:
    means, log_variances = flat(5)
    with pytest.raises(ValueError, match="weights"):
        priors.TeacherMean(torch.zeros(3)).kl(means, log_variances)
    with pytest.raises(ValueError, match="positive"):
        priors.Gaussian(0.0, 0.0)


@settings(max_examples=30, deadline=None)
@given(st.floats(-3, 3), st.floats(-12, 3), st.floats(-3, 3), st.floats(1e-4, 10))
def test_kl_of_one_weight_by_hand(mean: float, log_variance: float, mean0: float, variance0: float) -> None:
    kl = priors.Gaussian(mean0, variance0).kl(
        torch.tensor([mean], dtype=torch.float64), torch.tensor([log_variance], dtype=torch.float64)
    )
    v = math.exp(log_variance)
    by_hand = 0.5 * ((v + (mean - mean0) ** 2) / variance0 - 1 - log_variance + math.log(variance0))
    assert float(kl) == pytest.approx(by_hand, rel=1e-9, abs=1e-9)
    assert float(kl) >= -1e-12


def test_kl_keeps_its_digits_near_the_prior() -> None:
    """A million weights almost at the prior: sums of a million cancel to less than one."""
    log_variances = torch.full((1_000_000,), 2 * math.log(0.1)) + 1e-3
    means = torch.zeros_like(log_variances)
    truth = 0.5 * (math.expm1(1e-3) - 1e-3) * 1_000_000
    rounding = 0.5 * 1_000_000 * 4.6 * 2.0**-24  # of the log-variances themselves, at worst
    found = float(priors.Pretrained(means, 0.1).kl(means, log_variances))
    exact = float(priors.Pretrained(means.double(), 0.1).kl(means.double(), log_variances.double()))
    assert abs(exact - truth) < rounding
    assert abs(found - exact) < 0.5 * 1_000_000 * 2.0**-23  # exp's rounding: the same for all, as they are the same
