"""Backbones, and the encoder that a run trains: pixels in [0, 1] to features."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from byov.backbones import resnet, timm, vit
from byov.backbones.family import Family, unfit
from byov.config import Model
from byov.errors import BadInput

FAMILIES: tuple[Family, ...] = (vit, resnet, timm)


class Encoder(nn.Module):
    """Normalises pixels with its own data's mean and standard deviation, then the backbone."""

    pixel_mean: Tensor
    pixel_std: Tensor

    def __init__(self, backbone: nn.Module, features: int, image_shape: tuple[int, int, int]) -> None:
        super().__init__()
        self.backbone = backbone
        self.features = features
        self.image_shape = image_shape  # what it was built for
        channels = image_shape[0]
        self.register_buffer("pixel_mean", torch.full((channels, 1, 1), 0.5))
        self.register_buffer("pixel_std", torch.full((channels, 1, 1), 0.25))

    def set_pixel_statistics(self, mean: Tensor, std: Tensor) -> None:
        self.pixel_mean.copy_(mean.view(-1, 1, 1))
        self.pixel_std.copy_(std.view(-1, 1, 1))

    def forward(self, images: Tensor) -> Tensor:
        """Features of images: float in [0, 1] or uint8."""
        if images.shape[1] != len(self.pixel_mean):
            raise BadInput(
                f"the images have {images.shape[1]} channels, but this encoder was made for {len(self.pixel_mean)}: "
                "convert them first."
            )
        if images.dtype == torch.uint8:
            images = images.to(self.pixel_mean.dtype) / 255
        elif not images.is_floating_point():
            raise BadInput(f"images are uint8, or floats from 0 to 1, not {images.dtype}: convert them first.")
        images = images.to(self.pixel_mean.dtype)
        return self.backbone((images - self.pixel_mean) / self.pixel_std)  # type: ignore[no-any-return]


def family_of(backbone: str) -> Family:
    """The family that has this backbone."""
    for family in FAMILIES:
        if family.knows(backbone):
            return family
    known = ", ".join(name for family in FAMILIES for name in family.names())
    raise BadInput(f"there is no backbone {backbone!r}; use one of: {known}.")


def with_backbone(config: Model, backbone: str) -> Model:
    """A config with another backbone: the size of the one before is dropped, and what does not apply to this one."""
    if backbone == config.backbone:
        return config
    moved = replace(config, backbone=backbone, width=None, depth=None, heads=None)
    dropped: dict[str, Any] = dict.fromkeys(unfit(moved, family_of(backbone).USES))
    return replace(moved, **dropped)


def complete_model(config: Model, side: int) -> Model:
    """A config with nothing left open that its backbone has a use for (the rest is None), for images of this side."""
    return family_of(config.backbone).complete(config, side)


def build_encoder(config: Model, image_shape: Sequence[int]) -> Encoder:
    """The encoder of a config, for images of shape (channels, height, width)."""
    channels, height, width = image_shape
    shape = channels, height, width
    backbone, features = family_of(config.backbone).build(complete_model(config, min(height, width)), shape)
    return Encoder(backbone, features, shape)
