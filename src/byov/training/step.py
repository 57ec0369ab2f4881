"""One training step: draw, forward, backward, KL, optimizer, teacher. The arithmetic of the method is all here."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor

from byov import schedules
from byov._core.randomness import RandomStream, fold
from byov.config import Config
from byov.posterior import NewtonVariances
from byov.posterior.priors import add_kl
from byov.training.balance import pulls_of
from byov.training.distributed.processes import Processes
from byov.training.learners import Batch, Learner, Loss
from byov.training.optimizers.build import clip_gradients, decay_means, encoder_slowed, set_learning_rates
from byov.training.optimizers.parametrization import optimized_scale


class StepReport(NamedTuple):
    loss: float  # nll + beta * temperature * kl / images
    nll: float  # the objective's own loss
    kl: float | None
    beta: float
    tau: float | None
    lr: float
    log_variance_lr: float
    grad_norm: float
    pulls: Tensor | None  # per segment, for the balance
    last: Loss  # of the last micro-batch, for the monitors


def noise_key(config: Config, step: int, rank: int) -> tuple[int, ...]:
    """Return the key of a step's draw: new for every step, and for every process unless they share noise."""
    return (RandomStream.NOISE, config.seed, step, 0 if config.posterior.shared_noise else rank)


def training_step(
    learner: Learner,
    optimizer: torch.optim.Optimizer,
    micro_batches: list[Batch],
    config: Config,
    step: int,
    total: int,
    processes: Processes = Processes(),  # noqa: B008
    autocast: AbstractContextManager[object] | None = None,
    variances: NewtonVariances | None = None,
) -> StepReport | None:
    """Make step `step` of `total`. Return None, with nothing changed, if loss or gradient are not finite."""
    progress = step / total
    posterior = learner.posterior
    lr, log_variance_lr = set_learning_rates(optimizer, config.optim, progress)
    beta = schedules.beta(progress, config.posterior.beta_start, config.posterior.beta_end)
    # Dropout uses torch's global generator: seeded per step, so that it carries no state.
    torch.manual_seed(fold(RandomStream.DROPOUT, config.seed, step, processes.rank))

    posterior.reuse_gradients()
    nll = torch.zeros((), device=posterior.means.device, dtype=posterior.means.dtype)
    for batch in micro_batches:
        with autocast or nullcontext():
            loss = learner.loss(batch, noise_key(config, step, processes.rank))
        (loss.nll / len(micro_batches)).backward()  # type: ignore[no-untyped-call]
        nll += loss.nll.detach() / len(micro_batches)
    gradients = [p.grad for p in posterior.parameters() if p.grad is not None]
    processes.average_([nll, *gradients])

    pulls = pulls_of(posterior)
    if variances is not None:
        variances.observe()
    scale = beta * (config.posterior.temperature or 0.0) / (config.images or 1)
    measured = [nll] if learner.prior is None else [nll, add_kl(posterior, learner.prior, scale)]
    measured.append(clip_gradients(posterior, config.optim.clip))
    nll_value, *kl_value, grad_norm = torch.stack([value.double() for value in measured]).cpu().tolist()
    kl = kl_value[0] if kl_value else None
    total_loss = nll_value + scale * (kl or 0.0)
    if not (math.isfinite(total_loss) and math.isfinite(grad_norm)):
        return None

    with encoder_slowed(posterior, config.optim.encoder_lr):
        with optimized_scale(posterior, config.posterior.scale):
            optimizer.step()
        if variances is not None:
            variances.step()
        if config.optim.optimizer == "adamw":
            decay_means(posterior, lr * (config.optim.weight_decay or 0.0))
    tau = None
    if learner.teacher is not None:
        tau = schedules.tau(progress, config.optim.tau)
        learner.teacher.update(posterior, tau)
    return StepReport(total_loss, nll_value, kl, beta, tau, lr, log_variance_lr, grad_norm, pulls, loss)
