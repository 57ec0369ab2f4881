"""LARS against the definition of DeepMind's BYOL, written out tensor by tensor; resuming; the encoder's rate."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import byov
import tiny
from byov import schedules
from byov.config import Optim
from byov.training.optimizers import build
from byov.training.optimizers.build import build_optimizer, encoder_slowed, set_learning_rates

LARS = Optim(epochs=2, batch_size=8, optimizer="lars", lr=0.4, weight_decay=1e-2, clip=None, warmup=0.0)


def network(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    layers = nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3), nn.LayerNorm(3)
    )
    nn.init.zeros_(layers[4].weight[0])
    return layers.double()


def reference(weights: dict[str, Tensor], gradients: list[dict[str, Tensor]], config: Optim, lr: float) -> None:
    """In place. Names ending in 'weight' of layers 0 and 4 are matrices; the rest are biases and norms."""
    velocity = {name: torch.zeros_like(w) for name, w in weights.items()}
    for step in gradients:
        for name, w in weights.items():
            g = step[name].clone()
            if name in ("0.weight", "4.weight"):
                g = g + config.weight_decay * w
                if w.norm() > 0 and g.norm() > 0:
                    g = g * config.trust * w.norm() / g.norm()
            velocity[name] = config.momentum * velocity[name] + g
            w.sub_(lr * velocity[name])


def random_gradients(names_and_shapes: dict[str, Tensor], steps: int) -> list[dict[str, Tensor]]:
    g = torch.Generator().manual_seed(3)
    return [
        {name: torch.randn(w.shape, generator=g, dtype=w.dtype) for name, w in names_and_shapes.items()}
        for _ in range(steps)
    ]


@pytest.mark.parametrize("where", ["all", "linear", "none"])
def test_lars_is_deepminds(where: str) -> None:
    """The flat means, some of them, or plain parameters: always the same tensors, the same norms."""
    posterior = byov.Posterior(network(), where)
    optimizer = build_optimizer(posterior, LARS)
    expected = {name: p.detach().clone() for name, p in network().named_parameters()}
    gradients = random_gradients(expected, 4)
    gradients[1]["0.weight"].zero_()
    for step in gradients:
        set_learning_rates(optimizer, LARS, 0.0)
        if where != "none":
            posterior.means.grad = torch.cat([step[s.name].reshape(-1) for s in posterior.segments])
            posterior.log_variances.grad = torch.zeros_like(posterior.means)
        for name, p in posterior.module.named_parameters():
            p.grad = step[name].clone()
        optimizer.step()
    reference(expected, gradients, LARS, lr=schedules.learning_rate(0.0, LARS.lr, 0.0))
    own = posterior.segments.named(posterior.means.detach()) | dict(posterior.module.named_parameters())
    for name, value in expected.items():
        torch.testing.assert_close(own[name].detach(), value)


def test_a_weight_of_zeros_or_a_gradient_of_zeros_is_left_at_trust_one() -> None:
    layer = nn.Linear(3, 2, bias=False)
    nn.init.zeros_(layer.weight)
    posterior = byov.Posterior(layer)
    optimizer = build_optimizer(posterior, replace(LARS, weight_decay=0.0))
    set_learning_rates(optimizer, LARS, 0.0)
    posterior.means.grad, posterior.log_variances.grad = torch.ones(6), torch.zeros(6)
    optimizer.step()
    torch.testing.assert_close(posterior.means.detach(), torch.full((6,), -LARS.lr))
    posterior.means.grad = torch.zeros(6)
    optimizer.step()
    assert posterior.means.isfinite().all()


def test_log_variances_have_adamw(tmp_path: Path) -> None:
    posterior = byov.Posterior(network())
    optimizer = build_optimizer(posterior, LARS)
    twin = posterior.log_variances.detach().clone().requires_grad_()
    torchs = torch.optim.AdamW([twin], lr=0.0, betas=LARS.betas, weight_decay=0.0, fused=True)
    for k in range(3):
        _, rate = set_learning_rates(optimizer, LARS, k / 10)
        torchs.param_groups[0]["lr"] = rate
        posterior.means.grad = torch.zeros_like(posterior.means)
        posterior.log_variances.grad = torch.randn(twin.shape, dtype=twin.dtype)
        twin.grad = posterior.log_variances.grad.clone()
        optimizer.step()
        torchs.step()
    assert torch.equal(posterior.log_variances, twin)


@pytest.mark.parametrize("method", ["byov", "byol", "supervised-bbb"])
def test_a_run_with_lars_goes_on_bit_equally(tmp_path: Path, method: str) -> None:
    settings = tiny.config(method, optim=replace(LARS, weight_decay=None))
    whole = tiny.trainer(tmp_path / "whole", settings, say=lambda text: None)
    whole.run()
    cut = tiny.trainer(tmp_path / "cut", settings, say=lambda text: None)
    for _ in range(3):
        cut._advance()
    cut.save()
    again = tiny.trainer(tmp_path / "cut", settings, say=lambda text: None)
    again.restore()
    assert again.step == 3
    saved = build.optimizer_tensors(cut.optimizer)
    assert saved and all(torch.equal(v, saved[k]) for k, v in build.optimizer_tensors(again.optimizer).items())
    again.run()
    ends = whole.tensors(), again.tensors()
    assert ends[0].keys() == ends[1].keys() and all(torch.equal(v, ends[1][k]) for k, v in ends[0].items())
    assert all(v.isfinite().all() for v in ends[0].values())


def test_lars_decays_once(tmp_path: Path) -> None:
    """The decoupled decay of AdamW is not added to LARS's own: without learning there is no change at all."""
    trainer = tiny.trainer(tmp_path, tiny.config(optim=replace(LARS, trust=1e-30, weight_decay=0.5)))
    weight = "mean.encoder.backbone.blocks.0.mlp.0.weight"
    before = trainer.learner.posterior.tensors()[weight].clone()
    trainer._advance()
    torch.testing.assert_close(trainer.learner.posterior.tensors()[weight], before, rtol=1e-6, atol=1e-9)


# ------------------------------------------------------------------------------------------ the encoder's learning rate


class WithHead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.projector = network(), nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).double()
        self.encoder[0].bias.requires_grad_(False)


@pytest.mark.parametrize("where", ["all", "linear", "none"])
def test_the_encoders_learning_rate_is_that_of_a_group_of_its_own(where: str) -> None:
    """Against AdamW over plain parameters in two groups, with another rate in every step and weight decay."""
    torch.manual_seed(1)
    plain = WithHead()
    torch.manual_seed(1)
    posterior = byov.Posterior(WithHead(), where)
    config = Optim(lr=0.1, encoder_lr=0.2, weight_decay=0.05 if where == "none" else 0.0)
    optimizer = build_optimizer(posterior, config)
    trained = {name: p for name, p in plain.named_parameters() if p.requires_grad}
    matrices = {name for name in trained if name.endswith(("0.weight", "4.weight"))}
    groups = [
        {
            "params": [
                p for n, p in trained.items() if n.startswith("encoder.") == inside and (n in matrices) == decayed
            ],
            "inside": inside,
            "weight_decay": (config.weight_decay or 0.0) * decayed,
        }
        for inside in (True, False)
        for decayed in (True, False)
    ]
    twin = torch.optim.AdamW(groups, lr=0.0)
    log_variances = posterior.log_variances.detach().clone().requires_grad_()
    alone = torch.optim.AdamW([log_variances], lr=0.0, weight_decay=0.0)
    for k, step in enumerate(random_gradients(trained, 4)):
        rate, alone.param_groups[0]["lr"] = set_learning_rates(optimizer, config, k / 10)
        for group in twin.param_groups:
            group["lr"] = rate * (config.encoder_lr if group["inside"] else 1.0)
        for name, p in (*trained.items(), *posterior.module.named_parameters()):
            p.grad = step[name].clone() if name in step else None
        if posterior.segments.numel:
            posterior.means.grad = torch.cat([step[s.name].reshape(-1) for s in posterior.segments])
            posterior.log_variances.grad = torch.sin(posterior.means.detach())
            log_variances.grad = posterior.log_variances.grad.clone()
        with encoder_slowed(posterior, config.encoder_lr):
            optimizer.step()
        twin.step()
        alone.step()
    own = posterior.segments.named(posterior.means.detach()) | dict(posterior.module.named_parameters())
    for name, p in trained.items():
        torch.testing.assert_close(own[name].detach(), p.detach(), msg=lambda m, n=name: f"{n}: {m}")
    torch.testing.assert_close(posterior.log_variances, log_variances)


def test_a_factor_of_one_changes_no_bit_and_one_of_zero_keeps_the_encoder(tmp_path: Path) -> None:
    ends = []
    for factor in (1.0, 1.0, 0.0):
        config = tiny.config(optim=Optim(epochs=1, batch_size=8, lr=0.01, log_variance_lr=0.02, encoder_lr=factor))
        trainer = tiny.trainer(tmp_path, config)
        before = trainer.learner.posterior.means.detach().clone()
        trainer._advance(), trainer._advance()
        ends.append(trainer.learner.posterior.means.detach().clone())
    named = trainer.learner.posterior.segments.named
    assert torch.equal(ends[0], ends[1])
    for name, value in named(ends[2]).items():
        assert torch.equal(value, named(before)[name]) == name.startswith("encoder."), name


def test_decay_of_random_weights_is_slowed_too(tmp_path: Path) -> None:
    optim = Optim(epochs=1, batch_size=8, lr=0.01, log_variance_lr=0.0, weight_decay=0.5, encoder_lr=0.0)
    trainer = tiny.trainer(tmp_path, tiny.config(optim=optim))
    weight = "mean.encoder.backbone.blocks.0.mlp.0.weight"
    before = trainer.learner.posterior.tensors()[weight].clone()
    trainer._advance(), trainer._advance()
    assert torch.equal(trainer.learner.posterior.tensors()[weight], before)
