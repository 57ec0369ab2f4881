"""A run from its command: opens the images, resolves the config, prepares the folder, starts or resumes the trainer."""

from __future__ import annotations

import os
import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from byov.config import SUPERVISED, Config, differences, read_config, to_yaml
from byov.data.sources import open_source
from byov.errors import BadInput
from byov.files import write_text
from byov.training import checkpoints
from byov.training.initial import initialiser
from byov.training.learners import build_learner
from byov.training.loop import Trainer, classes_of, subset
from byov.training.networks import Classifier, Student
from byov.training.resolve import resolve
from byov.training.step import Processes


def prepare(config: Config, out: Path, *, resume: bool = False, extend: int | None = None) -> Trainer:
    """A trainer for a new run, or for one that goes on where it stopped. Nothing is written unless all is well."""
    goes_on = resume or extend is not None
    source = open_source(config.data)
    data = source.load("train")
    if config.method in SUPERVISED and data.labels is None:
        raise BadInput(f"{config.method} needs labels, but {config.data} has none: use byov or byol.")
    shape = (data.images.shape[1], data.images.shape[2], data.images.shape[3])
    config = resolve(config, shape, len(data), source.flips)
    if config.posterior.prior == "pretrained" and config.init is None:
        raise BadInput("the prior `pretrained` needs weights to stand around: give them with --init.")
    if goes_on:
        config = _continued(config, out, extend)
    elif out.resolve() == Path.cwd():
        raise BadInput("a run wants a folder of its own: give --out a name.")
    elif out.exists() and any(out.iterdir() if out.is_dir() else [out]):
        raise BadInput(f"{out} exists already: choose another --out, or go on with --resume.")
    assert config.threads is not None and config.images is not None
    torch.set_num_threads(config.threads)
    fabric = _launch(config)
    data = subset(data, config.images)
    statistics, put_weights = pixel_statistics(data.images), initialiser(None if goes_on else config.init)

    def initialise(network: Student | Classifier) -> None:
        network.encoder.set_pixel_statistics(*statistics)
        put_weights(network)

    learner = build_learner(config, shape, classes_of(data), fabric.device, initialise)
    mixed = config.precision == "bf16-mixed"
    trainer = Trainer(
        config, out, learner, data, Processes(fabric.global_rank, fabric.world_size), fabric.autocast if mixed else None
    )
    if goes_on:
        _go_on(trainer)
    elif fabric.global_rank == 0:
        _begin(trainer)
    return trainer


def _begin(trainer: Trainer) -> None:
    """Writes the folder of a new run beside its place, then moves it there: a run is there whole or not at all."""
    out = trainer.folder
    trainer.folder = out.with_name(f".{out.name}.{os.getpid()}.tmp")
    try:
        write_text(trainer.folder / "config.yaml", to_yaml(trainer.config))
        trainer.save()  # a run can be resumed from its first moment on
        trainer.folder.rename(out)
    finally:
        shutil.rmtree(trainer.folder, ignore_errors=True)
    trainer.folder = out


def _go_on(trainer: Trainer) -> None:
    """Back to the last checkpoint."""
    if trainer.processes.rank == 0:
        for stale in trainer.folder.rglob(".*.tmp"):  # kill -9 came while it was being written
            stale.unlink(missing_ok=True)
    trainer.restore()
    if trainer.processes.rank == 0:
        write_text(trainer.folder / "config.yaml", to_yaml(trainer.config))  # --extend lengthens it


def pixel_statistics(images: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of each channel in [0, 1], from the counts of the 256 values: no float copy."""
    means, stds = [], []
    values = torch.arange(256, dtype=torch.float64) / 255
    for channel in range(images.shape[1]):
        counts = torch.bincount(images[:, channel].reshape(-1), minlength=256).double()
        mean = (counts * values).sum() / counts.sum()
        means.append(mean)
        stds.append(((counts * (values - mean) ** 2).sum() / counts.sum()).sqrt().clamp(min=1e-3))
    return torch.stack(means).float(), torch.stack(stds).float()


def _launch(config: Config) -> Any:
    from lightning_fabric import Fabric  # slow to import: only where it is needed

    fabric = Fabric(accelerator=config.device, devices=1, precision=config.precision)
    fabric.launch()
    return fabric


def _continued(config: Config, out: Path, extend: int | None) -> Config:
    """The config to go on with; it must be the run's own, apart from the speed and the log."""
    if not (out / "config.yaml").is_file():
        raise BadInput(f"{out} holds no run to resume: check --out, or leave out --resume to start one.")
    saved = read_config(out / "config.yaml")
    different = differences(saved, config)
    if different:
        key, (old, new) = next(iter(different.items()))
        more = f" (and {len(different) - 1} more)" if len(different) > 1 else ""
        raise BadInput(
            f"{out} was trained with {key}={old}, not {new}{more}: resume with the same settings (or with none), "
            "or start a new run."
        )
    if extend is None:
        return config
    if extend < 1:
        raise BadInput(f"a run can only be lengthened: give --extend at least 1 epoch, not {extend}.")
    _, state = checkpoints.load(out / "checkpoints" / "last.safetensors")
    if state["step"] < state["total"]:
        raise BadInput(f"{out} is not finished (step {state['step']} of {state['total']}): use --resume first.")
    return replace(config, optim=replace(config.optim, epochs=config.optim.epochs + extend))


def estimate_seconds(trainer: Trainer, steps: int = 2) -> float:
    """How long the whole run will take here: a few losses and gradients, timed; nothing is changed by them."""
    posterior = trainer.learner.posterior
    buffers = {k: v.clone() for k, v in trainer.tensors().items()}
    batch = trainer.batches(0)[0]
    took = []
    for _ in range(steps + 1):  # the first one also pays for start-up
        begun = time.perf_counter()
        trainer.learner.loss(batch, (0,)).nll.backward()  # type: ignore[no-untyped-call]
        took.append(time.perf_counter() - begun)
    for parameter in posterior.parameters():
        parameter.grad = None
    own = trainer.tensors()
    for name, value in buffers.items():  # batch statistics have moved
        own[name].copy_(value)
    return min(took[1:]) * trainer.config.optim.accumulate * (trainer.total - trainer.step)


def describe(trainer: Trainer, origin: str) -> str:
    """What will be trained, in three lines."""
    config, posterior = trainer.config, trainer.learner.posterior
    model, optim = config.model, config.optim
    weights = sum(p.numel() for p in posterior.module.parameters()) + posterior.means.numel()
    lines = [
        f"{config.method} on {config.data}: {config.images:,} images, {optim.epochs} epochs of "
        f"{trainer.steps_per_epoch} steps, recipe {origin}",
        f"{model.backbone}: width {model.width}, depth {model.depth}, patch {model.patch}; {weights:,} weights, "
        f"{posterior.means.numel():,} of them random; batch {optim.batch_size}, lr {optim.lr:g}",
        f"writing to {trainer.folder} (config.yaml holds every setting)",
    ]
    if trainer.step:
        lines.append(f"going on after step {trainer.step} of {trainer.total}")
    return "\n".join(lines)
