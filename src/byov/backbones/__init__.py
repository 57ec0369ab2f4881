"""Backbones, and the encoder that maps pixels in [0, 1] to features."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from byov._core.errors import BadInput
from byov.backbones import efficientnet_lite, resnet, timm, vit
from byov.backbones.family import Family, Staged, unfit
from byov.config import LITE, Model, near_keys

FAMILIES: tuple[Family, ...] = (vit, resnet, efficientnet_lite, timm)


class Encoder(nn.Module):
    """Normalise pixels with the mean and standard deviation of the training data, then apply the backbone.

    Args:
        backbone: Network from normalised images to features.
        features: Number of features.
        image_shape: Shape of the images, (channels, height, width).
        frozen_until: Last frozen stage. The frozen stages are the trunk, whose activations never change.
        frozen_statistics: Whether BatchNorm keeps its statistics in training mode too.

    Raises:
        BadInput: If there is no such stage to freeze.

    Example:
        >>> encoder = byov.build_encoder(byov.Model(backbone="resnet-18", width=8), (3, 32, 32))
        >>> isinstance(encoder, byov.Encoder), encoder(torch.zeros(2, 3, 32, 32)).shape == (2, encoder.features)
        (True, True)
    """

    pixel_mean: Tensor
    pixel_std: Tensor

    def __init__(
        self,
        backbone: nn.Module,
        features: int,
        image_shape: tuple[int, int, int],
        frozen_until: str | None = None,
        frozen_statistics: bool = False,
    ) -> None:
        super().__init__()
        self.backbone = backbone
        self.features = features
        self.image_shape = image_shape
        self.frozen_until = frozen_until
        self.frozen_statistics = frozen_statistics
        if frozen_until is not None:
            for parameter in _frozen_parameters(backbone, frozen_until):
                parameter.requires_grad_(False)
        channels = image_shape[0]
        self.register_buffer("pixel_mean", torch.full((channels, 1, 1), 0.5))
        self.register_buffer("pixel_std", torch.full((channels, 1, 1), 0.25))

    def set_pixel_statistics(self, mean: Tensor, std: Tensor) -> None:
        self.pixel_mean.copy_(mean.view(-1, 1, 1))
        self.pixel_std.copy_(std.view(-1, 1, 1))

    def train(self, mode: bool = True) -> Encoder:
        super().train(mode)
        if self.frozen_statistics:
            for module in self.backbone.modules():
                if isinstance(module, _BatchNorm):
                    module.eval()
        return self

    def forward(self, images: Tensor) -> Tensor:
        """Compute features of images, float in [0, 1] or uint8."""
        return self.backbone(self._normalised(images))  # type: ignore[no-any-return]

    # A frozen trunk gives the same activations at every draw: it runs once, and the rest once per draw.

    @property
    def has_trunk(self) -> bool:
        """Whether `trunk` and `after_trunk` can be called: stages are frozen, and the backbone can be split there."""
        return self.frozen_until is not None and isinstance(self.backbone, Staged)

    def trunk(self, images: Tensor) -> Tensor:
        """Compute the activations of images, float in [0, 1] or uint8, after the frozen stages."""
        assert isinstance(self.backbone, Staged) and self.frozen_until is not None
        return self.backbone.until(self.frozen_until, self._normalised(images))

    def after_trunk(self, activations: Tensor) -> Tensor:
        """Compute the features from the output of `trunk`."""
        assert isinstance(self.backbone, Staged) and self.frozen_until is not None
        return self.backbone.after(self.frozen_until, activations.to(self.pixel_mean.dtype))

    def _normalised(self, images: Tensor) -> Tensor:
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
        return (images - self.pixel_mean) / self.pixel_std


def _frozen_parameters(backbone: nn.Module, until: str) -> list[nn.Parameter]:
    """List the parameters up to the end of a stage; they are registered in the order of the forward pass."""
    stages = {stage.name: stage.last for stage in backbone.stages()} if isinstance(backbone, Staged) else {}
    last = stages.get(until, until if not stages else "")
    named = list(backbone.named_parameters())
    inside = [i for i, (name, _) in enumerate(named) if last and name.startswith(f"{last}.")]
    if not inside:
        known = stages or dict.fromkeys(name for name, _ in backbone.named_children())
        raise BadInput(f"there is no stage {until!r} to freeze until: use one of {', '.join(known)}.")
    if inside[-1] == len(named) - 1:
        raise BadInput(f"freezing until {until!r} leaves no weight of the encoder to train: name an earlier stage.")
    return [parameter for _, parameter in named[: inside[-1] + 1]]


def family_of(backbone: str) -> Family:
    """Find the family of a backbone."""
    for family in FAMILIES:
        if family.knows(backbone):
            return family
    known = [name for family in FAMILIES for name in family.names()]
    near = near_keys(backbone, known)
    hint = f"did you mean {' or '.join(near)}?" if near else f"use one of: {', '.join(known)}."
    raise BadInput(f"there is no backbone {backbone!r}; {hint}")


def backbone_of_weights(init: str | None) -> str | None:
    """Return the backbone that the weights of --init belong to; None if they do not determine it."""
    if init in LITE:
        return efficientnet_lite.PREFIX + init
    return init if init is not None and timm.knows(init) else None


def with_backbone(config: Model, backbone: str) -> Model:
    """Replace the backbone of a config; the previous size and settings that do not apply are dropped."""
    if backbone == config.backbone:
        return config
    same_stages = family_of(backbone) is family_of(config.backbone)  # other families name them differently
    kept = config.frozen_until if same_stages else None
    moved = replace(config, backbone=backbone, width=None, depth=None, heads=None, frozen_until=kept)
    dropped: dict[str, Any] = dict.fromkeys(unfit(moved, family_of(backbone).USES))
    return replace(moved, **dropped)


def complete_model(config: Model, side: int) -> Model:
    """Fill in every setting that the backbone uses, for images of this side; the others stay None."""
    return family_of(config.backbone).complete(config, side)


def build_encoder(config: Model, image_shape: Sequence[int]) -> Encoder:
    """Build the encoder of a config, with random weights, in training mode.

    Args:
        config: The backbone's name and sizes; what is None takes the backbone's default.
        image_shape: (channels, height, width) of the images that the encoder will see.

    Returns:
        The encoder; ``encoder.features`` is its output width.

    Raises:
        BadInput: If there is no such backbone, or the sizes do not fit the images.

    Example:
        >>> byov.build_encoder(byov.Model(width=16, depth=1, heads=2), (3, 32, 32))(torch.rand(2, 3, 32, 32)).shape
        torch.Size([2, 16])
    """
    channels, height, width = image_shape
    shape = channels, height, width
    backbone, features = family_of(config.backbone).build(complete_model(config, min(height, width)), shape)
    encoder = Encoder(backbone, features, shape, config.frozen_until, bool(config.frozen_statistics))
    return encoder.train()
