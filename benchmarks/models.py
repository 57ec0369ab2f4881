"""The networks and settings that all variants share."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from byov.backbones.vit import Size, ViT
from byov.config import Config, Model, Optim, View, Views
from byov.training.resolve import resolve

SIDE, CLASSES = 32, 10

# The whole step: width 128, depth 4, 16 tokens; heads 512 -> 128.
STUDENT = Model(width=128, depth=4, heads=4, patch=8, head_hidden=512, head_output=128)
BATCH = 128


class Task(NamedTuple):
    """A supervised step: the size of its ViT and its batch."""

    size: Size
    batch: int


TASKS = {
    "2.7M": Task(Size(192, 6, 3), 64),
    "0.8M": Task(Size(128, 4, 4), 256),
    "21M": Task(Size(384, 12, 6), 16),
}


def classifier(task: str) -> nn.Module:
    """A ViT with 16 tokens and a linear layer: what every library is given."""
    vit = ViT((SIDE, SIDE), patch=SIDE // 4, size=TASKS[task].size)
    return nn.Sequential(vit, nn.Linear(vit.features, CLASSES))


def labelled_batch(task: str) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    batch = TASKS[task].batch
    return torch.randn(batch, 3, SIDE, SIDE, generator=g), torch.randint(0, CLASSES, (batch,), generator=g)


def images(count: int, side: int = SIDE) -> Tensor:
    """uint8 images; smooth ones, as photographs are (a filter's time does not depend on it, a JPEG's would)."""
    g = torch.Generator().manual_seed(0)
    coarse = torch.randint(0, 256, (count, 3, side // 8, side // 8), generator=g, dtype=torch.uint8)
    return coarse.repeat_interleave(8, 2).repeat_interleave(8, 3).contiguous()


def byol_views(side: int) -> Views:
    """BYOL's recipe: crops from .08 on, blur from 64 pixels on (at 32 it would leave nothing to see)."""
    blurs = (1.0, 0.1) if side >= 64 else (0.0, 0.0)
    view = View(crop_area=(0.08, 1.0), flip=0.5, blur_sigma=(0.1, 2.0))  # the peers' default at any side
    return Views(first=replace(view, blur=blurs[0]), second=replace(view, blur=blurs[1], solarise=0.2))


def config(method: str, count: int, model: Model = STUDENT, batch: int = BATCH, side: int = SIDE) -> Config:
    """A resolved config of the whole step, on `count` images, long enough never to end."""
    optim = Optim(epochs=1_000_000, batch_size=batch)
    base = Config(method=method, calibration=0, model=model, optim=optim, views=byol_views(side))  # type: ignore[arg-type]
    return resolve(base, (3, side, side), count, flips=True)
