"""softplus instead of exp: the optimizer steps in rho, and everything else sees log-variances."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tiny
from byov.posterior import Posterior
from byov.training.masks import PRUNED
from byov.training.optimizers.parametrization import optimized_scale, slope, to_log_variance, to_rho


def test_rho_has_the_sigma_of_the_log_variance_and_back() -> None:
    log_variance = torch.tensor([PRUNED, -90.0, -79.0, -10.0, -1.0, 0.0, 2.0, 12.0], dtype=torch.float64)
    rho = to_rho(log_variance)
    torch.testing.assert_close(F.softplus(rho), (log_variance / 2).exp())
    torch.testing.assert_close(to_log_variance(rho), log_variance)
    assert bool(to_rho(log_variance.float()).isfinite().all())


def test_a_pruned_weight_stays_exactly_where_it_is() -> None:
    lv = torch.tensor([PRUNED])
    assert torch.equal(to_log_variance(to_rho(lv)), lv)
    assert torch.equal(slope(to_rho(lv)), torch.tensor([2.0]))


def test_the_slope_is_autograds() -> None:
    rho = torch.tensor([-60.0, -30.0, -5.0, 0.0, 3.0, 30.0], dtype=torch.float64, requires_grad=True)
    (expected,) = torch.autograd.grad((2 * F.softplus(rho).log()).sum(), rho)
    torch.testing.assert_close(slope(rho.detach()), expected)


def test_a_step_is_that_of_a_network_written_in_rho() -> None:
    """SGD on the loss of a drawn Linear, against the same loss written with sigma = softplus(rho) and autograd."""
    torch.manual_seed(0)
    posterior = Posterior(nn.Linear(3, 2).double(), init_log_variance=-1.0)
    optimizer = torch.optim.SGD([posterior.log_variances], lr=0.1)
    x = torch.randn(5, 3, dtype=torch.float64)
    means = posterior.means.detach().clone()
    with posterior.sampled(torch.Generator().manual_seed(1)):
        posterior(x).square().sum().backward()
    drawn = torch.cat([t.reshape(-1) for t in _draw(posterior)])
    noise = (drawn - means) / posterior.sigma

    rho = to_rho(posterior.log_variances.detach()).requires_grad_()
    weight, bias = posterior.segments.views(means + F.softplus(rho) * noise)
    F.linear(x, weight, bias).square().sum().backward()
    with torch.no_grad():
        expected = F.softplus(rho - 0.1 * rho.grad)
    with optimized_scale(posterior, "softplus"):
        optimizer.step()
    torch.testing.assert_close(posterior.sigma, expected)


def _draw(posterior: Posterior) -> list[torch.Tensor]:
    with torch.no_grad(), posterior.sampled(torch.Generator().manual_seed(1)):
        return [getattr(owner, name).clone() for owner, name, _ in posterior.segments.slots]


def test_an_error_in_the_step_leaves_log_variances() -> None:
    posterior = Posterior(nn.Linear(2, 2), init_log_variance=-4.0)
    with pytest.raises(ZeroDivisionError), optimized_scale(posterior, "softplus"):
        raise ZeroDivisionError
    torch.testing.assert_close(posterior.log_variances.detach(), torch.full((6,), -4.0))


def test_with_exp_nothing_is_touched() -> None:
    posterior = Posterior(nn.Linear(2, 2))
    posterior.log_variances.grad = torch.ones(6)
    version = posterior.log_variances._version
    with optimized_scale(posterior, "exp"):
        assert torch.equal(posterior.log_variances.grad, torch.ones(6))
    assert posterior.log_variances._version == version


def test_a_run_with_softplus_begins_at_the_same_sigma_and_learns_another(tmp_path: Path) -> None:
    config = tiny.config()
    soft = replace(config, posterior=replace(config.posterior, scale="softplus"))
    sigmas = []
    for name, settings in (("exp", config), ("soft", soft)):
        trainer = tiny.trainer(tmp_path / name, settings)
        sigmas.append(trainer.learner.posterior.sigma)
        trainer.run()
        sigmas.append(trainer.learner.posterior.sigma)
    assert torch.equal(sigmas[0], sigmas[2])
    assert bool(sigmas[3].isfinite().all()) and not torch.equal(sigmas[1], sigmas[3])
    moved = [(sigma / sigmas[0]).log().abs().mean() for sigma in (sigmas[1], sigmas[3])]
    assert float(moved[1] / moved[0]) == pytest.approx(2, rel=0.2)  # Adam moves rho, about log(sigma), by the same
