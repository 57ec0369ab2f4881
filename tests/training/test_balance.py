"""The balance of a layer and the margin over the prior, against closed forms."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import tiny
from byov import Posterior, priors
from byov._core.randomness import generator
from byov.config import Optim
from byov.runs.folder import RunFolder, read_log
from byov.training.balance import Balance, effective_images, loss_at_prior, pulls_of


def test_the_balance_is_one_at_the_known_posterior_and_elsewhere_its_ratio() -> None:
    # loss = h w^2 / 2 at the mean 0: the balance is sigma^2 (1 / v + ess h), whose estimate has a relative variance of
    # 2 / (weights x draws).
    h, v, effective, size, draws = 3.0, 0.5, 40.0, 400, 200
    for factor in (1.0, 4.0):
        posterior = Posterior(nn.Linear(size, 1, bias=False))
        with torch.no_grad():
            posterior.means.zero_()
            posterior.log_variances.fill_(float(torch.tensor(factor / (1 / v + effective * h)).log()))
        balance = Balance(posterior, priors.Gaussian(0.0, v), effective)
        for k in range(draws):
            posterior.zero_grad()
            with posterior.sampled(generator=generator(1, k)):
                loss = h * posterior(torch.eye(size)).square().sum() / 2
            loss.backward()
            pulls = pulls_of(posterior)
            assert pulls is not None
            balance.add(pulls, float(loss.detach()))
        (found,), mean = balance.take()
        assert found == pytest.approx(factor, rel=4 * (2 / size / draws) ** 0.5)
        assert mean == pytest.approx(h / 2 * size * factor / (1 / v + effective * h), rel=0.05)
        assert balance.take()[1] == 0.0  # it starts again


def test_the_loss_at_the_prior_changes_nothing(tmp_path: Path) -> None:
    trainer = tiny.trainer(tmp_path, tiny.config())
    before = {name: value.clone() for name, value in trainer.tensors().items()}
    batch = trainer.batches(0)[0]
    loss = loss_at_prior(trainer.learner, batch, trainer.config, 0)
    assert 2.0 < loss < 6.0  # random projections of two views: about 4 of at most 8
    assert (
        loss
        == loss_at_prior(trainer.learner, batch, trainer.config, 0)
        != loss_at_prior(trainer.learner, batch, trainer.config, 1)
    )
    assert all(torch.equal(before[name], value) for name, value in trainer.tensors().items())


def test_a_run_logs_balance_and_margin_and_warns_where_the_prior_is_better(tmp_path: Path) -> None:
    said: list[str] = []
    hot = replace(tiny.config(), posterior=replace(tiny.config().posterior, temperature=10.0))
    trainer = tiny.trainer(tmp_path, hot, say=said.append)
    trainer.run()
    assert trainer.margin is not None and trainer.margin < 0
    assert len(said) == 1 and "worse than its prior" in said[0] and "--optim.variances newton" in said[0]
    rows = read_log(RunFolder(tmp_path).posterior).rows
    assert all(("balance" in row) == (row["step"] > 0) for row in rows)
    logged = [row["elbo_margin"] for row in read_log(RunFolder(tmp_path).metrics).rows if "elbo_margin" in row]
    assert logged[-1] == trainer.margin


def test_newton_is_better_than_its_prior(tmp_path: Path) -> None:
    said: list[str] = []
    config = replace(tiny.config(), optim=Optim(epochs=8, batch_size=8, variances="newton"))
    trainer = tiny.trainer(tmp_path, config, say=said.append)
    trainer.run()
    assert not said and trainer.margin is not None and trainer.margin > 0


def test_effective_images_are_those_over_the_kls_weight() -> None:
    config = tiny.config(images=50)
    posterior = replace(config.posterior, temperature=0.1, beta_end=0.5)
    assert effective_images(replace(config, posterior=posterior)) == pytest.approx(1000.0)
    assert effective_images(replace(config, posterior=replace(posterior, beta_end=0.0))) == float("inf")
