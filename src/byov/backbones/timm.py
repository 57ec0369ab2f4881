"""Any model of timm, by its name there: `timm:resnet18`, `timm:vit_tiny_patch16_224`. Needs the extra `timm`.

Names of parameters are timm's own, so that its weights load. Nothing is dropped at random unless a model insists.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from byov._core.errors import BadInput
from byov.backbones._torchvision import import_torchvision
from byov.backbones.family import Uses, only
from byov.config import Model

PREFIX = "timm:"
USES: Uses = {}  # the name says it all


def names() -> list[str]:
    return [f"{PREFIX}NAME"]


def knows(backbone: str) -> bool:
    return backbone.startswith(PREFIX) and backbone != PREFIX


def complete(config: Model, side: int) -> Model:
    only(config, USES)
    return config


def build(config: Model, image_shape: tuple[int, int, int]) -> tuple[nn.Module, int]:
    """timm's model without its classifier. One image is passed: not every model says how many features come out."""
    model = _create(config.backbone, image_shape, pretrained=False)
    try:
        with torch.no_grad():
            features = model.eval()(torch.zeros(1, *image_shape))
    except Exception as error:  # a thousand models fail in many ways
        raise BadInput(
            f"{config.backbone} cannot take images of {_size(image_shape)} ({_line(error)}): give another "
            "--image-size, or use another model."
        ) from error
    if not isinstance(features, Tensor) or features.dim() != 2:
        raise BadInput(f"{config.backbone} does not make one vector of an image: use another model of timm.")
    return model.train(), features.shape[1]


def pretrained(source: str, image_shape: tuple[int, int, int]) -> dict[str, Tensor]:
    """timm's weights for images of this shape, with the pixel statistics that they were trained with."""
    model = _create(source, image_shape, pretrained=True)
    weights: dict[str, Tensor] = dict(model.state_dict())
    for ours, theirs in (("pixel_mean", "mean"), ("pixel_std", "std")):
        value = torch.tensor(model.pretrained_cfg[theirs])  # type: ignore[index]
        channels = image_shape[0]
        weights[ours] = (value if len(value) == channels else value.mean().expand(channels)).reshape(-1, 1, 1)
    return weights


def _create(source: str, image_shape: tuple[int, int, int], pretrained: bool) -> nn.Module:
    name, (channels, *size) = source.removeprefix(PREFIX), image_shape
    create = _timm().create_model
    options: dict[str, Any] = {"pretrained": pretrained, "num_classes": 0, "in_chans": channels}
    try:
        with _quiet():
            try:
                model: nn.Module = create(name, img_size=tuple(size), **options)
            except TypeError:  # a convolutional network takes images of any size, and no such option
                model = create(name, **options)
    except OSError as error:
        raise BadInput(
            f"{source} needs files that are neither here nor to be had ({_line(error)}): check the connection, or give "
            "weights as a file."
        ) from error
    except Exception as error:  # a thousand models fail in many ways
        raise BadInput(
            f"timm cannot make {name!r} for images of {_size(image_shape)} ({_line(error)}): `timm.list_models()` "
            "lists the names."
        ) from error
    return model


def _timm() -> Any:
    try:
        import_torchvision()  # first: timm imports it too
        return importlib.import_module("timm")
    except ImportError as error:
        raise BadInput("timm is not installed: pip install 'byov-torch[timm]'.") from error


@contextmanager
def _quiet() -> Iterator[None]:
    """The hub's client tells of every retry; the one sentence comes at the end."""
    logger = logging.getLogger("huggingface_hub")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def _size(image_shape: tuple[int, int, int]) -> str:
    channels, height, width = image_shape
    return f"{width} x {height} pixels, {channels} channel{'s' * (channels != 1)}"


def _line(error: Exception) -> str:
    """The first line of an error, without its full stop."""
    return (str(error).splitlines() or [type(error).__name__])[0].split(". ")[0].rstrip(".")
