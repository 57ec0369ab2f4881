"""Pruned weights stay pruned: 0 in every draw, no gradient, not in the KL."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.distributions import Normal, kl_divergence

import tiny
from byov import priors
from byov._core.files import without_prefix
from byov.config import Config, Optim, Posterior
from byov.posterior import Posterior as Gaussian
from byov.runs import checkpoints
from byov.training.loop import Trainer
from byov.training.masks import PRUNED, hold_pruned, pruned

LAST = Path("checkpoints") / "last.safetensors"


def half_masks(trainer: Trainer) -> dict[str, Tensor]:
    """About half of every weight matrix of the encoder, at random."""
    g = torch.Generator().manual_seed(1)
    names = {
        k.removeprefix("mean."): v for k, v in trainer.learner.posterior.tensors().items() if "log_variance" not in k
    }
    names = {k.removeprefix("other."): v for k, v in names.items()}
    wanted = [k for k, v in names.items() if k.startswith("encoder.backbone") and k.endswith("weight") and v.dim() > 1]
    return {k: torch.rand(names[k].shape, generator=g) > 0.5 for k in wanted}


def pruned_trainer(folder: Path, settings, **changes: object) -> tuple[Trainer, dict[str, Tensor]]:
    """A run of one epoch, pruned, and ready to resume for another."""
    rate = 0.02 if settings.optim.variances == "adam" else None  # by default it depends on the epochs
    optim = replace(settings.optim, log_variance_lr=rate)
    first = tiny.trainer(folder, replace(settings, optim=replace(optim, epochs=1)))
    first.run()
    masks = half_masks(first)
    tensors, state = checkpoints.load(folder / LAST)
    checkpoints.save(folder / LAST, pruned(tensors, masks), state)
    second = tiny.trainer(folder, replace(settings, optim=replace(optim, epochs=2)))
    second.restore()
    return second, masks


def weights(trainer: Trainer) -> dict[str, Tensor]:
    tensors = trainer.learner.posterior.tensors()
    return {k.split(".", 1)[1]: v for k, v in tensors.items() if not k.startswith("log_variance.")}


NEWTON = replace(tiny.config(), optim=replace(tiny.config().optim, variances="newton", log_variance_lr=None))
CASES = {
    "byov": tiny.config(),
    "byol": tiny.config("byol"),
    "lars": tiny.config(optim=Optim(epochs=2, batch_size=8, optimizer="lars", lr=0.2)),
    "decayed": tiny.config(optim=Optim(epochs=2, batch_size=8, weight_decay=0.1)),
    "moments": tiny.config(posterior=Posterior(prior="teacher_moments")),
    "flipout": tiny.config(posterior=Posterior(draw="flipout", prior="teacher_mean")),
    "linear": tiny.config(posterior=Posterior(where="linear")),
    "supervised": tiny.config("supervised-bbb"),
    "double": tiny.config(precision="64-true"),
    "newton": NEWTON,
}


@pytest.mark.parametrize("case", CASES)
def test_training_leaves_what_is_pruned_at_zero_and_moves_the_rest(case: str, tmp_path: Path) -> None:
    trainer, masks = pruned_trainer(tmp_path / "run", CASES[case])
    before = {name: value.clone() for name, value in weights(trainer).items()}
    trainer.run()
    after = weights(trainer)
    for name, mask in masks.items():
        assert torch.equal(after[name][~mask], torch.zeros_like(after[name][~mask])), name
        assert not torch.equal(after[name][mask], before[name][mask]), name
        if trainer.learner.teacher is not None:
            teacher = {k.split(".", 1)[1]: v for k, v in trainer.learner.teacher.tensors().items()}
            assert not teacher[name][~mask].any()
    sigmas = trainer.learner.posterior.segments.named(trainer.learner.posterior.log_variances.detach())
    for name in set(masks) & set(sigmas):
        assert (sigmas[name][~masks[name]] == PRUNED).all() and (sigmas[name][masks[name]] > -20).all()
    stored, _ = checkpoints.load(tmp_path / "run" / LAST)
    for name, mask in without_prefix(stored, "mask.").items():
        assert torch.equal(mask, masks[name])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_draw_is_exactly_zero_where_pruned_with_the_right_spread_elsewhere(dtype: torch.dtype) -> None:
    posterior = Gaussian(torch.nn.Linear(40, 50).to(dtype), init_log_variance=-2.0)
    mask = torch.arange(posterior.means.numel()) % 3 > 0
    with torch.no_grad():
        posterior.means.mul_(mask)
        posterior.log_variances.masked_fill_(~mask, PRUNED)
    with posterior.sampled(torch.Generator().manual_seed(0)):
        drawn = torch.cat([posterior.module.weight.flatten(), posterior.module.bias])
    drawn.square().sum().backward()
    assert torch.equal(drawn[~mask], torch.zeros_like(drawn[~mask]))
    assert torch.equal(posterior.log_variances.grad[~mask], torch.zeros_like(drawn[~mask]))
    z = (drawn - posterior.means)[mask] / torch.exp(torch.tensor(-1.0))
    assert abs(float(z.detach().square().mean()) - 1) < 5 * (2 / int(mask.sum())) ** 0.5


@pytest.mark.parametrize("prior", [priors.Standard(), "around"])
def test_pruned_weights_are_out_of_the_kl(prior: object) -> None:
    torch.manual_seed(0)
    posterior = Gaussian(torch.nn.Linear(7, 9).double())
    count = posterior.means.numel()
    mask = torch.rand(count) > 0.4
    around, variance = torch.randn(count).double(), torch.rand(count).double() + 0.1
    prior = prior if isinstance(prior, priors.Gaussian) else priors.Gaussian(around, variance)
    with torch.no_grad():
        posterior.log_variances.copy_(torch.randn(count))
        posterior.means.mul_(mask)
        posterior.log_variances.masked_fill_(~mask, PRUNED)

    prior.kept = mask.nonzero()[:, 0]
    kl = priors.add_kl(posterior, prior, scale=0.5)
    wanted = [torch.as_tensor(v).double().expand(count)[mask] for v in (prior.mean, prior.variance)]
    mean, log_v = (p.detach()[mask].requires_grad_() for p in (posterior.means, posterior.log_variances))
    expected = kl_divergence(Normal(mean, (log_v / 2).exp()), Normal(wanted[0], wanted[1].sqrt())).sum()
    (0.5 * expected).backward()
    torch.testing.assert_close(kl, expected.detach())
    for own, other in ((posterior.means.grad, mean.grad), (posterior.log_variances.grad, log_v.grad)):
        torch.testing.assert_close(own[mask], other)
        assert not own[~mask].any()


@pytest.mark.parametrize("config", [tiny.config(), NEWTON], ids=["adam", "newton"])
def test_a_pruned_run_resumed_equals_one_never_stopped(tmp_path: Path, config: Config) -> None:
    whole, _ = pruned_trainer(tmp_path / "whole", config)
    stopped, _ = pruned_trainer(tmp_path / "stopped", config)
    whole.run()
    stopped._advance()
    stopped.save()
    resumed = tiny.trainer(tmp_path / "stopped", config)
    resumed.restore()
    assert resumed.step == 4
    resumed.run()
    a, b = whole.tensors(), resumed.tensors()
    assert set(a) == set(b) and all(torch.equal(a[name], b[name]) for name in a)


def test_no_masks_change_nothing(tmp_path: Path) -> None:
    trainer = tiny.trainer(tmp_path, tiny.config())
    hold_pruned(trainer.learner, {})
    assert not trainer.learner.masks and trainer.learner.prior.kept is None
    assert not trainer.learner.posterior.means._backward_hooks
