"""Optimizers over a posterior: the means, the log-variances with a separate rate, and what is not random."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from byov import schedules
from byov._core.errors import BadInput
from byov.config import Config, Optim
from byov.posterior import NewtonVariances, Posterior, Prior
from byov.posterior.priors import Gaussian
from byov.posterior.segments import kind_of
from byov.training.balance import effective_images
from byov.training.distributed.processes import Processes
from byov.training.learners import ENCODER
from byov.training.optimizers.lars import Lars
from byov.training.optimizers.sharded_adamw import ShardedAdamW


def build_optimizer(
    posterior: Posterior,
    config: Optim,
    processes: Processes = Processes(),  # noqa: B008
) -> torch.optim.Optimizer:
    """Build the optimizer of a config; the key `role` of its groups is mean or log_variance."""
    return Lars(posterior, config) if config.optimizer == "lars" else _adamw(posterior, config, processes)


def _adamw(posterior: Posterior, config: Optim, processes: Processes) -> torch.optim.AdamW:
    decayed: list[nn.Parameter] = []
    plain: list[nn.Parameter] = []
    for owner in posterior.module.modules():
        for name, parameter in owner.named_parameters(recurse=False):
            if parameter.requires_grad:
                (decayed if kind_of(owner, name) == "weight" else plain).append(parameter)
    random = posterior.segments.numel > 0
    adam = random and config.variances == "adam"
    groups: list[dict[str, Any]] = [
        {"role": "mean", "params": [*([posterior.means] if random else []), *plain], "weight_decay": 0.0},
        {"role": "mean", "params": decayed, "weight_decay": config.weight_decay or 0.0},
        {"role": "log_variance", "params": [posterior.log_variances] if adam else [], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    settings: dict[str, Any] = {"lr": 0.0, "betas": config.betas}
    settings["fused"] = posterior.means.device.type in ("cpu", "cuda")
    if config.shard and processes.world > 1:
        return ShardedAdamW(groups, processes, **settings)
    return torch.optim.AdamW(groups, **settings)


def build_variances(posterior: Posterior, prior: Prior | None, config: Config) -> NewtonVariances | None:
    """Build what sets the variances from the curvature; None if the optimizer moves them, or nothing is random."""
    if config.optim.variances == "adam" or not isinstance(prior, Gaussian):
        return None
    return NewtonVariances(posterior, prior, effective_images(config))


def set_learning_rates(optimizer: torch.optim.Optimizer, config: Optim, progress: float) -> tuple[float, float]:
    """Set the schedule's learning rates; return those of means and log-variances."""
    rates = {
        "mean": schedules.learning_rate(progress, config.lr, config.warmup),
        "log_variance": schedules.learning_rate(progress, config.log_variance_lr or 0.0, config.warmup),
    }
    for group in optimizer.param_groups:
        group["lr"] = rates[group["role"]]
    return rates["mean"], rates["log_variance"]


@contextmanager
def encoder_slowed(posterior: Posterior, factor: float) -> Iterator[None]:
    """Scale the encoder's update by `factor` within the block; log-variances are not affected.

    Updates of AdamW and LARS are linear in the learning rate, so this multiplies the learning rate by `factor`,
    whatever the optimizer's groups and however its state is sharded.
    """
    if factor == 1:
        yield
        return
    weights = _encoder_weights(posterior)
    before = [weight.clone() for weight in weights]
    yield
    torch._foreach_lerp_(weights, before, 1 - factor)


def _encoder_weights(posterior: Posterior) -> list[Tensor]:
    """Return the encoder's means, which come first, and its trained parameters that are not random."""
    segments = [segment for segment in posterior.segments if segment.name.startswith(ENCODER)]
    stop = segments[-1].stop if segments else 0
    assert stop == sum(segment.stop - segment.offset for segment in segments), "the encoder comes first"
    named = posterior.module.named_parameters()
    others = [p.detach() for name, p in named if name.startswith(ENCODER) and p.requires_grad]
    return [*([posterior.means.detach()[:stop]] if stop else []), *others]


@torch.no_grad()
def decay_means(posterior: Posterior, amount: float) -> None:
    """Apply decoupled weight decay to random weight matrices; off in the recipes, where the KL regularises.

    For AdamW, which sees the means as one tensor; LARS has its own weight decay.
    """
    if amount and len(posterior.segments):
        views = posterior.segments.views(posterior.means.detach())
        weights = [v for s, v in zip(posterior.segments, views, strict=True) if s.kind == "weight"]
        torch._foreach_mul_(weights, 1 - amount)


def clip_gradients(posterior: Posterior, largest: float | None) -> Tensor:
    """Clip the gradient of means and non-random parameters to a norm; return the norm before, without synchronising.

    If the norm is not finite, gradients stay as they are, so that the first NaN can be found.
    """
    own = [p for p in (posterior.means, *posterior.module.parameters()) if p.grad is not None]
    norm = nn.utils.get_total_norm([p.grad for p in own if p.grad is not None])
    if largest is not None:
        nn.utils.clip_grads_with_norm_(own, largest, torch.where(norm.isfinite(), norm, 0.0))  # 0 changes nothing
    return norm


# ------------------------------------------------------------------------------------------------- state in checkpoints


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return the optimizer's state, keyed by the parameter's index. If sharded, only the main process has it."""
    sharded = isinstance(optimizer, ShardedAdamW)  # then all processes must call this together
    state = optimizer.gathered_state() if sharded else optimizer.state_dict()["state"]  # type: ignore[attr-defined]
    return {f"{index}.{key}": value for index, entry in state.items() for key, value in entry.items()}


def load_optimizer_tensors(
    optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor], where: str = "the saved state"
) -> None:
    """Load what `optimizer_tensors` returned; state that does not fit the parameters is a BadInput."""
    sharded = isinstance(optimizer, ShardedAdamW)
    parameters: list[Tensor] = (
        optimizer.whole  # type: ignore[attr-defined]
        if sharded
        else [parameter for group in optimizer.param_groups for parameter in group["params"]]
    )
    entries: dict[int, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        index, _, key = name.partition(".")
        place = int(index) if index.isdecimal() else len(parameters)
        if place >= len(parameters) or (tensor.ndim and tensor.shape != parameters[place].shape):
            raise BadInput(f"{where} has optimizer state {name!r}, which does not fit: it belongs to another model.")
        entries.setdefault(place, {})[key] = tensor
    if sharded:
        optimizer.load_whole_state(entries)  # type: ignore[attr-defined]
    else:
        optimizer.load_state_dict({**optimizer.state_dict(), "state": entries})
