"""Optimizer, EMA and KL: on byov's flat buffers, and on the same numbers held tensor by tensor."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from conductor import Turn, Variant, interleave, ratios, steps_of, summary
from models import TASKS, classifier

FLAT, EACH, AUTOGRAD = "flat", "per tensor", "per tensor, KL by autograd"


def measure(quick: bool) -> dict[str, Any]:
    return {task: _measure(task, 4 if quick else 10) for task in TASKS}


def _measure(task: str, rounds: int) -> dict[str, Any]:
    variants = [
        Variant(FLAT, "updates", "flat", {"task": task}),
        Variant(EACH, "updates", "per_tensor", {"task": task, "autograd": False}),
        Variant(AUTOGRAD, "updates", "per_tensor", {"task": task, "autograd": True}),
    ]
    times = interleave(variants, rounds, steps=4)
    return {
        "rounds": rounds,
        "milliseconds": {name: 1e3 * summary(t).median for name, t in times.items()},
        "speedup": {name: ratios(times, name, FLAT) for name in (EACH, AUTOGRAD)},
    }


def flat(task: str) -> Turn:
    from byov import Posterior, priors

    posterior, prior = Posterior(classifier(task)), priors.Standard()
    teacher = posterior.means.detach().clone()
    pair = [posterior.means, posterior.log_variances]
    optimizer = torch.optim.AdamW(pair, lr=1e-3, weight_decay=0.0, fused=True)
    for parameter in pair:
        parameter.grad = torch.zeros_like(parameter)

    def step(_: int) -> None:
        priors.add_kl(posterior, prior, 1e-6)
        optimizer.step()
        with torch.no_grad():
            teacher.lerp_(posterior.means, 0.01)

    return steps_of(step)


def per_tensor(task: str, autograd: bool) -> Turn:
    """AdamW and EMA by torch's fastest calls for lists of tensors; the KL by formula or by autograd."""
    from byov import priors

    means = list(classifier(task).parameters())
    log_variances = [nn.Parameter(torch.full_like(mean, -10.0)) for mean in means]
    teacher = [mean.detach().clone() for mean in means]
    both = means + log_variances
    optimizer = torch.optim.AdamW(both, lr=1e-3, weight_decay=0.0, fused=True)
    for parameter in both:
        parameter.grad = torch.zeros_like(parameter)
    prior = priors.Standard()
    pairs = list(zip(means, log_variances, strict=True))

    def by_autograd() -> None:
        kl = [0.5 * (v.exp() + m.square() - 1 - v).sum() for m, v in pairs]
        (1e-6 * torch.stack(kl).sum()).backward()

    def by_formula() -> None:
        for m, v in pairs:
            gradients = m.grad.view(-1), v.grad.view(-1)
            prior.evaluate(m.detach().view(-1), v.detach().view(-1), gradients, 1e-6)

    def step(_: int) -> None:
        by_autograd() if autograd else by_formula()
        optimizer.step()
        with torch.no_grad():
            torch._foreach_lerp_(teacher, means, 0.01)

    return steps_of(step)
