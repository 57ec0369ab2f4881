"""A run small enough to be trained in a test."""

from dataclasses import replace
from pathlib import Path

import torch

from byov.config import Config, Model, Monitor, Optim
from byov.data.images import ImageSet
from byov.training.learners import build_learner
from byov.training.loop import Trainer, classes_of
from byov.training.resolve import resolve

MODEL = Model(width=16, depth=1, heads=2, patch=4, head_hidden=16, head_output=8)


def config(method: str = "byov", **changes: object) -> Config:
    base = Config(
        method=method,
        model=MODEL,
        threads=1,
        device="cpu",
        calibration=0,
        optim=Optim(epochs=2, batch_size=8, log_variance_lr=0.02),
        monitor=Monitor(log_every=1, tensorboard=False, checkpoint_seconds=1e9),
    )
    return replace(base, **changes)


def images(count: int = 24, channels: int = 1, seed: int = 0) -> ImageSet:
    g = torch.Generator().manual_seed(seed)
    pixels = torch.randint(0, 256, (count, channels, 8, 8), generator=g, dtype=torch.uint8)
    return ImageSet(pixels, torch.arange(count) % 3, None)


def trainer(folder: Path, settings: Config, data: ImageSet | None = None, **kwargs: object) -> Trainer:
    data = data if data is not None else images()
    shape = tuple(data.images.shape[1:])
    settings = resolve(settings, shape, len(data), flips=True)
    return Trainer(settings, folder, build_learner(settings, shape, classes_of(data)), data, **kwargs)
