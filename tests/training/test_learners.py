"""The prior `pretrained`: around the given weights for the encoder, standard for the heads."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.distributions import Normal, kl_divergence

import tiny
from byov.config import Posterior
from byov.posterior.priors import add_kl
from byov.training.learners import SelfSupervised, Supervised


def learner(folder: Path, method: str, **posterior: float | str) -> SelfSupervised | Supervised:
    settings = Posterior(prior="pretrained", prior_std=0.3, **posterior)  # type: ignore[arg-type]
    return tiny.trainer(folder, tiny.config(method, posterior=settings)).learner


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
    settings = tiny.config(posterior=Posterior(prior="pretrained", prior_std=0.3))
    trainer = tiny.trainer(tmp_path, settings)
    mean = trainer.learner.prior.mean.clone()  # type: ignore[union-attr]
    trainer._advance()
    trainer.save()
    again = tiny.trainer(tmp_path, replace(settings))
    again.learner.prior.mean.zero_()  # type: ignore[union-attr]
    again.restore()
    assert torch.equal(again.learner.prior.mean, mean)  # type: ignore[union-attr]
    assert not torch.equal(again.learner.posterior.means, mean)
