"""Variances from the curvature, against posteriors that are known in closed form."""

import pytest
import torch
from torch import Tensor, nn

import byov
from byov import NewtonVariances, Posterior, priors
from byov._core.errors import BadInput
from byov._core.randomness import generator


class Weights(nn.Module):
    """A module that is its weights."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size))

    def forward(self) -> Tensor:
        return self.weight


def train(posterior: Posterior, prior: priors.Gaussian, effective: float, loss, steps: int, lr: float = 0.01) -> None:
    """Fit means by Adam and variances by Newton; `loss(k)` is the loss at step k's draw, without the KL."""
    means = torch.optim.Adam([posterior.means], lr=lr)
    variances = NewtonVariances(posterior, prior, effective)
    for k in range(steps):
        means.param_groups[0]["lr"] = lr * (1 - k / steps)
        posterior.zero_grad()
        with posterior.sampled(generator=generator(3, k)):
            loss(k).backward()
        variances.observe()
        priors.add_kl(posterior, prior, 1 / effective)
        means.step()
        variances.step()


@pytest.mark.parametrize("start", [-4.0, -10.0, -16.0])
@pytest.mark.parametrize("variance", [1.0, 0.04])
def test_a_quadratic_loss_has_its_known_posterior_from_any_start(start: float, variance: float) -> None:
    curvature = torch.logspace(-3, 1, 64)  # the prior rules the first, the loss the last
    posterior = Posterior(Weights(64), init_log_variance=start)
    train(posterior, priors.Gaussian(0.0, variance), 1000.0, lambda k: (curvature * posterior() ** 2).sum() / 2, 1500)
    ratio = posterior.sigma**2 * (1 / variance + 1000.0 * curvature)
    # g^2 is averaged over about 2 * 300 steps, so a variance's logarithm has a standard error of sqrt(2 / 600) / 2.
    assert float(ratio.log().abs().median()) < 2 * (2 / 600) ** 0.5
    assert abs(float(ratio.mean()) - 1) < 0.06


def test_linear_regression_has_its_known_posterior() -> None:
    make = torch.Generator().manual_seed(1)
    scales = torch.logspace(-1, 1, 20)
    x = torch.randn(2000, 20, generator=make) * scales
    y = 0.1 * (x / scales) @ torch.randn(20, generator=make) + torch.randn(2000, generator=make)  # noise of variance 1
    posterior = Posterior(nn.Linear(20, 1, bias=False), init_log_variance=-8.0)

    def loss(k: int) -> Tensor:
        batch = torch.randint(2000, (50,), generator=generator(4, k))
        return (posterior(x[batch])[:, 0] - y[batch]).square().mean() / 2

    train(posterior, priors.Standard(), 2000.0, loss, 2000)
    expected = 1 / (1 + x.square().sum(0))  # mean field: one over the diagonal of I + X'X
    ratio = posterior.sigma**2 / expected
    assert abs(float(ratio.log().mean())) < 0.1 and float(ratio.log().abs().max()) < 0.4


def test_a_weight_that_nothing_depends_on_goes_to_the_prior() -> None:
    posterior = Posterior(Weights(8), init_log_variance=-10.0)
    train(posterior, priors.Gaussian(0.0, 0.25), 100.0, lambda k: (posterior()[:4] ** 2).sum(), 300)
    torch.testing.assert_close(posterior.sigma[4:], torch.full((4,), 0.5), rtol=1e-4, atol=0)
    assert bool((posterior.sigma[:4] < 0.2).all())


def test_groups_are_balanced_one_by_one() -> None:
    network = nn.Sequential(nn.Linear(50, 50), nn.Linear(50, 50))
    variances = NewtonVariances(Posterior(network), priors.Standard(), 10.0)
    assert variances.sizes == [2550, 2550]  # a bias joins the matrix before it
    small = nn.Sequential(nn.Linear(4, 4), nn.Linear(50, 50))
    assert NewtonVariances(Posterior(small), priors.Standard(), 10.0).sizes == [20 + 2550]


def test_a_pruned_weight_keeps_no_noise() -> None:
    posterior = Posterior(Weights(4))
    with torch.no_grad():
        posterior.log_variances[1] = -2000.0
    train(posterior, priors.Standard(), 100.0, lambda k: (posterior() ** 2).sum(), 20)
    assert float(posterior.log_variances[1]) == -2000.0 and float(posterior.sigma[1]) == 0.0
    assert bool(posterior.log_variances.isfinite().all())


@pytest.mark.parametrize("own_variances", [False, True])
def test_compiled_and_plain_passes_agree(own_variances: bool) -> None:
    def fitted(dtype: torch.dtype) -> Posterior:
        torch.manual_seed(0)
        network = nn.Sequential(nn.Linear(60, 60), nn.Linear(60, 3)).to(dtype)
        posterior = Posterior(network, init_log_variance=-6.0)
        v = torch.linspace(1e-4, 2, posterior.means.numel(), dtype=dtype) if own_variances else 1.0
        prior = priors.Gaussian(torch.zeros_like(posterior.means), v, 0.01)
        x = torch.randn(30, 60, generator=torch.Generator().manual_seed(2)).to(dtype)
        variances = NewtonVariances(posterior, prior, 500.0)
        for k in range(30):
            posterior.zero_grad()
            to_means = torch.randn(posterior.means.numel(), generator=generator(1, k)).to(dtype)
            posterior.means.grad = to_means * x.std()
            posterior.log_variances.grad = 1e-3 * to_means.flip(0)
            variances.observe()
            variances.step()
        return posterior

    single, double = fitted(torch.float32), fitted(torch.float64)
    assert float(single.log_variances.std()) > 0.1
    torch.testing.assert_close(single.log_variances.double(), double.log_variances, rtol=0, atol=2e-3)


def test_saved_state_continues_bit_for_bit() -> None:
    def stepped(posterior: Posterior, variances: NewtonVariances, ks: range) -> None:
        for k in ks:
            posterior.means.grad = torch.randn(posterior.means.numel(), generator=generator(1, k))
            posterior.log_variances.grad = 1e-3 * posterior.means.grad**2
            variances.observe()
            variances.step()

    torch.manual_seed(0)
    whole, parts = (Posterior(Weights(100)) for _ in range(2))
    once = NewtonVariances(whole, priors.Standard(), 100.0)
    stepped(whole, once, range(20))
    first = NewtonVariances(parts, priors.Standard(), 100.0)
    stepped(parts, first, range(9))
    second = NewtonVariances(parts, priors.Standard(), 100.0)
    second.load_tensors({name: t.clone() for name, t in first.tensors().items()})
    stepped(parts, second, range(9, 20))
    assert torch.equal(whole.log_variances, parts.log_variances)
    with pytest.raises(BadInput, match="another network"):
        second.load_tensors({"squares": torch.zeros(3)})


def test_what_cannot_work_is_refused() -> None:
    class Custom:
        def kl(self, means: Tensor, log_variances: Tensor) -> Tensor:
            return means.sum()

    posterior = Posterior(Weights(4))
    with pytest.raises(BadInput, match="Gaussian prior"):
        NewtonVariances(posterior, Custom(), 10.0)  # type: ignore[arg-type]
    with pytest.raises(BadInput, match="positive and finite"):
        NewtonVariances(posterior, priors.Standard(), float("inf"))
    assert byov.NewtonVariances is NewtonVariances
