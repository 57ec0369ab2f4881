"""One step against the formulas written out by hand with plain torch."""

import copy
from dataclasses import replace
from itertools import product

import pytest
import torch
from torch.distributions import Normal, kl_divergence

import tiny
from byov import schedules
from byov._core.randomness import RandomStream, fold, generator
from byov.config import Optim, Posterior
from byov.data.views import two_views
from byov.training.monitors import first_bad_parameter
from byov.training.optimizers.build import build_optimizer, set_learning_rates
from byov.training.step import noise_key, training_step


def one_step(trainer, step: int = 5, total: int = 10):
    return training_step(
        trainer.learner, trainer.optimizer, trainer.batches(step % trainer.steps_per_epoch), trainer.config, step, total
    )


@pytest.mark.parametrize("prior", ["standard", "teacher_mean", "teacher_moments"])
def test_a_byov_step_is_the_papers_loss_differentiated_by_autograd(tmp_path, prior: str) -> None:
    settings = tiny.config(
        precision="64-true",
        posterior=Posterior(prior=prior, temperature=0.5, init_log_variance=-3.0, variance_floor=0.01),
        optim=Optim(epochs=2, batch_size=8, clip=None),
    )
    trainer = tiny.trainer(tmp_path, settings)
    learner, k, total = trainer.learner, 5, 10
    if learner.teacher.variance is not None:
        learner.teacher.variance.uniform_(0, 0.05)
    student, teacher = copy.deepcopy(learner.posterior), copy.deepcopy(learner.teacher)
    batch = trainer.batches(1)[0]

    # By hand: draw, two views, the loss with the KL before the EMA moves, autograd through everything.
    means, log_variances = (p.detach().clone().requires_grad_() for p in (student.means, student.log_variances))
    with torch.no_grad(), student.sampled(generator(*noise_key(trainer.config, k, 0))):
        drawn = torch.cat([getattr(o, a).reshape(-1) for o, a, _ in student.segments.slots])
    noise = (drawn - means.detach()) / (log_variances.detach() / 2).exp()
    weights = student.segments.named(means + (log_variances / 2).exp() * noise)
    plain = student.unwrapped()
    views = [
        v.double()
        for v in two_views(batch.images, batch.ids, trainer.config.views, 8, fold(RandomStream.VIEWS, 0), batch.epoch)
    ]
    outputs = [torch.func.functional_call(plain, weights, (v,)) for v in views]
    targets = [teacher(v) for v in views]
    cosine = torch.nn.functional.cosine_similarity
    nll = (4 - 2 * cosine(outputs[0].prediction, targets[1]) - 2 * cosine(outputs[1].prediction, targets[0])).mean()
    mean0 = {"standard": torch.zeros_like(means)}.get(prior, teacher.means.detach())
    variance0 = teacher.variance.clamp(min=0.01) if prior == "teacher_moments" else torch.ones_like(means)
    kl = kl_divergence(Normal(means, (log_variances / 2).exp()), Normal(mean0, variance0.sqrt())).sum()
    loss = nll + schedules.beta(k / total) * 0.5 * kl / len(trainer.data)
    loss.backward()

    report = training_step(learner, trainer.optimizer, trainer.batches(1), trainer.config, k, total)
    assert report.nll == pytest.approx(float(nll.detach())) and report.kl == pytest.approx(float(kl.detach()))
    assert report.loss == pytest.approx(float(loss.detach()))
    torch.testing.assert_close(learner.posterior.means.grad, means.grad)
    torch.testing.assert_close(learner.posterior.log_variances.grad, log_variances.grad)
    # The teacher followed the new means, after the optimizer.
    tau = schedules.tau(k / total, trainer.config.optim.tau)
    expected = tau * teacher.means + (1 - tau) * learner.posterior.means
    torch.testing.assert_close(learner.teacher.means.detach(), expected.detach())


def test_adamw_has_its_own_rates_and_equals_torchs(tmp_path) -> None:
    trainer = tiny.trainer(tmp_path, tiny.config(precision="64-true"))
    posterior = trainer.learner.posterior
    reference = [p.detach().clone().requires_grad_() for p in (posterior.means, posterior.log_variances)]
    lr, lr_log = set_learning_rates(trainer.optimizer, trainer.config.optim, 0.5)
    assert (lr, lr_log) == (
        schedules.learning_rate(0.5, trainer.config.optim.lr, trainer.config.optim.warmup),
        schedules.learning_rate(0.5, trainer.config.optim.log_variance_lr, trainer.config.optim.warmup),
    )
    one_step(trainer)
    for parameter, before, rate in zip(
        (posterior.means, posterior.log_variances), reference, (lr, lr_log), strict=True
    ):
        before.grad = parameter.grad.clone()
        torch.optim.AdamW([before], lr=rate, weight_decay=0.0).step()
        torch.testing.assert_close(parameter.detach(), before.detach())


def test_byol_is_byov_with_nothing_random(tmp_path) -> None:
    byol = tiny.trainer(tmp_path, tiny.config("byol", precision="64-true"))
    assert byol.learner.posterior.means.numel() == 0 and byol.learner.prior is None
    silent = Posterior(init_log_variance=-80.0, temperature=0.0)
    byov = tiny.trainer(
        tmp_path, tiny.config(precision="64-true", posterior=silent, optim=replace(byol.config.optim, weight_decay=0.0))
    )
    byol = tiny.trainer(
        tmp_path, tiny.config("byol", precision="64-true", optim=replace(byol.config.optim, weight_decay=0.0))
    )
    for step in range(3):
        a, b = one_step(byol, step), one_step(byov, step)
        assert a.nll == pytest.approx(b.nll, rel=1e-9)
    named = dict(byol.learner.posterior.module.named_parameters())
    for name, mean in byov.learner.posterior.segments.named(byov.learner.posterior.means).items():
        torch.testing.assert_close(mean.detach(), named[name].detach(), rtol=1e-6, atol=1e-9)


def test_weight_decay_spares_biases_and_norms(tmp_path) -> None:
    for method in ("byol", "byov"):
        optim = Optim(epochs=2, batch_size=8, weight_decay=0.5, lr=0.1, clip=None)
        with_decay = tiny.trainer(tmp_path, tiny.config(method, precision="64-true", optim=optim))
        without = tiny.trainer(
            tmp_path, tiny.config(method, precision="64-true", optim=replace(optim, weight_decay=0.0))
        )
        start = with_decay.learner.posterior.unwrapped().state_dict()
        for trainer in (with_decay, without):
            one_step(trainer)
        lr = schedules.learning_rate(0.5, 0.1, optim.warmup)
        a, b = (t.learner.posterior.unwrapped().state_dict() for t in (with_decay, without))
        weight, bias = "encoder.backbone.blocks.0.mlp.0.weight", "encoder.backbone.blocks.0.mlp.0.bias"
        assert torch.equal(a[bias], b[bias])
        change = start[weight] if method == "byol" else b[weight]  # torch decays before its step, ours after
        torch.testing.assert_close(a[weight], b[weight] - lr * 0.5 * change)


def test_accumulated_micro_batches_equal_one_batch_without_batch_statistics(tmp_path) -> None:
    model = replace(tiny.MODEL, head_norm="layer")
    results = []
    for accumulate in (1, 4):
        settings = tiny.config(
            model=model, precision="64-true", optim=Optim(epochs=2, batch_size=8, accumulate=accumulate)
        )
        trainer = tiny.trainer(tmp_path, settings)
        assert len(trainer.batches(0)) == accumulate
        one_step(trainer)
        results.append(trainer.learner.posterior)
    torch.testing.assert_close(results[0].means.detach(), results[1].means.detach())
    torch.testing.assert_close(results[0].log_variances.grad, results[1].log_variances.grad)


@pytest.mark.parametrize("draw", ["step", "view", "flipout"])
def test_draws_are_shared_or_not_between_views(tmp_path, draw: str) -> None:
    trainer = tiny.trainer(tmp_path, tiny.config(posterior=Posterior(draw=draw, init_log_variance=-2.0)))
    seen = []
    weight = trainer.learner.posterior.module.encoder.backbone.norm
    weight.register_forward_hook(lambda module, inputs, output: seen.append(module.weight.detach().clone()))
    one_step(trainer)
    assert len(seen) == 2 and torch.equal(*seen) == (draw != "view")


def test_noise_is_fresh_every_step_and_process(tmp_path) -> None:
    settings = tiny.trainer(tmp_path, tiny.config()).config
    keys = {noise_key(settings, step, rank) for step in range(5) for rank in range(3)}
    assert len(keys) == 15
    shared = replace(settings, posterior=replace(settings.posterior, shared_noise=True))
    assert len({noise_key(shared, 3, rank) for rank in range(3)}) == 1


def test_clipping_bounds_the_gradient_of_the_means(tmp_path) -> None:
    trainer = tiny.trainer(tmp_path, tiny.config(optim=Optim(epochs=2, batch_size=8, clip=1e-3)))
    report = one_step(trainer)
    assert report.grad_norm > 1e-3
    assert float(trainer.learner.posterior.means.grad.norm()) == pytest.approx(1e-3, rel=1e-3)


def test_a_step_that_is_not_finite_changes_no_weight_and_names_the_layer(tmp_path) -> None:
    trainer = tiny.trainer(tmp_path, tiny.config("byol"))
    layer = trainer.learner.posterior.module.predictor[0].weight
    layer.register_hook(lambda gradient: gradient * float("nan"))  # only here, and only in the backward pass
    before = {k: v.clone() for k, v in trainer.tensors().items() if "running" not in k and "num_batches" not in k}
    assert one_step(trainer) is None
    assert all(torch.equal(v, trainer.tensors()[k]) for k, v in before.items())
    assert first_bad_parameter(trainer.learner.posterior) == "predictor.0.weight"


def test_bfloat16_keeps_the_kl_and_posterior_in_float32(tmp_path) -> None:
    trainer = tiny.trainer(tmp_path, tiny.config())
    twin = tiny.trainer(tmp_path, tiny.config())
    reports = [
        training_step(t.learner, t.optimizer, t.batches(0), t.config, 3, 10, autocast=cast)
        for t, cast in ((trainer, torch.autocast("cpu", torch.bfloat16)), (twin, None))
    ]
    assert reports[0].kl == reports[1].kl and reports[0].nll != reports[1].nll
    assert reports[0].nll == pytest.approx(reports[1].nll, rel=0.05)
    assert trainer.learner.posterior.means.dtype == torch.float32


def test_every_parameter_is_in_the_optimizer_once(tmp_path) -> None:
    choices = (("linear", "byov"), ("no_conv", "byov"), (None, "byol"), (None, "supervised-bbb"))
    for (where, method), name in product(choices, ("adamw", "lars")):
        optim = Optim(epochs=2, batch_size=8, optimizer=name, lr=0.1)
        trainer = tiny.trainer(tmp_path, tiny.config(method, posterior=Posterior(where=where), optim=optim))
        optimizer = build_optimizer(trainer.learner.posterior, trainer.config.optim)
        listed = [p for group in optimizer.param_groups for p in group["params"]]
        expected = [p for p in trainer.learner.posterior.parameters() if p.numel()]
        assert {id(p) for p in listed} == {id(p) for p in expected} and len(listed) == len(expected)
