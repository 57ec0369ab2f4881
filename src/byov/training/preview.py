"""What to report before a run starts: a description, a time estimate, and a warning if it is too short."""

from __future__ import annotations

import time

from byov.training.loop import Trainer
from byov.training.resolve import LEAST_STEPS

FEW_STEPS = 200  # below which a run is worth a warning


def estimate_seconds(trainer: Trainer, steps: int = 2) -> float:
    """Estimate how long the rest of the run takes here, from a few timed losses and gradients; no state changes."""
    learner = trainer.learner
    networks = [network.module for network in (learner.posterior, learner.teacher) if network is not None]
    statistics = [(buffer, buffer.clone()) for network in networks for buffer in network.buffers()]
    batch = trainer.batches(0)[0]
    took = []
    for _ in range(steps + 1):  # the first one includes start-up costs
        begun = time.perf_counter()
        learner.loss(batch, (0,)).nll.backward()  # type: ignore[no-untyped-call]
        took.append(time.perf_counter() - begun)
    for parameter in learner.posterior.parameters():
        parameter.grad = None
    for buffer, before in statistics:  # of BatchNorm: the passes changed them
        buffer.copy_(before)
    return min(took[1:]) * trainer.config.optim.accumulate * (trainer.total - trainer.step)


def too_short(trainer: Trainer) -> str | None:
    """Return a warning if a new run has too few steps to learn anything."""
    steps = trainer.total
    if trainer.step or steps >= FEW_STEPS or trainer.config.method == "posthoc":
        return None
    return (
        f"warning: a run of {steps} step{'s' * (steps != 1)} learns little: give more --optim.epochs "
        f"({LEAST_STEPS:,} steps are what byov chooses where you do not)."
    )


def describe(trainer: Trainer, origin: str) -> str:
    """Describe what will be trained, in three lines."""
    config, posterior = trainer.config, trainer.learner.posterior
    model, optim, steps = config.model, config.optim, trainer.steps_per_epoch
    weights = sum(p.numel() for p in posterior.module.parameters()) + posterior.means.numel()
    given = {key: getattr(model, key) for key in ("width", "depth", "patch", "stem", "norm")}
    shape = "".join(f"{key} {value}, " for key, value in given.items() if value is not None)
    untrained = config.method == "posthoc"
    length = f"{optim.epochs} epoch{'s' * (optim.epochs != 1)} of {steps} step{'s' * (steps != 1)}"
    optimizer = f"batch {optim.batch_size}, {optim.optimizer}, lr {optim.lr:g}"
    start = "" if config.init is None else f", weights of {config.init}"
    lines = [
        f"{config.method} on {config.data}: {config.images:,} images ({config.calibration:,} more set aside), "
        f"{'nothing is trained' if untrained else length}, recipe {origin}",
        f"{model.backbone}{start}: {shape}{weights:,} weights, {posterior.means.numel():,} of them random; "
        f"{f'overlap {config.posterior.overlap:g}' if untrained else optimizer}",
        f"writing to {trainer.folder} (config.yaml holds every setting)",
    ]
    if trainer.step:
        lines.append(f"resuming after step {trainer.step} of {trainer.total}")
    return "\n".join(lines)
