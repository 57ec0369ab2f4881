"""Backbones, and the encoder that a run trains: pixels in [0, 1] to features."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from byov.backbones.vit import SIZES, Size, ViT
from byov.config import Model
from byov.errors import BadInput


class Encoder(nn.Module):
    """Normalises pixels with its own data's mean and standard deviation, then the backbone."""

    pixel_mean: Tensor
    pixel_std: Tensor

    def __init__(self, backbone: ViT, channels: int) -> None:
        super().__init__()
        self.backbone = backbone
        self.features = backbone.features
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


def backbone_size(config: Model) -> Size:
    """Width, depth and heads of a config: those of the named size unless given."""
    family, _, name = config.backbone.partition("-")
    if family != "vit" or name not in SIZES:
        known = ", ".join(f"vit-{name}" for name in SIZES)
        raise BadInput(f"there is no backbone {config.backbone!r}; use one of: {known}.")
    named = SIZES[name]
    given = (config.width, config.depth, config.heads)
    size = Size(*(own if value is None else value for value, own in zip(given, named, strict=True)))
    if min(size) < 1:
        raise BadInput(f"model.width, model.depth and model.heads must be at least 1, not {tuple(size)}.")
    return size


def build_encoder(config: Model, image_shape: Sequence[int]) -> Encoder:
    """The encoder of a resolved config, for images of shape (channels, height, width)."""
    channels, height, width = image_shape
    assert config.patch is not None, "resolve the config first"
    size = backbone_size(config)
    vit = ViT((height, width), config.patch, channels, size, config.stem, config.positions, config.pool)
    return Encoder(vit, channels)
