"""Any model of timm, by its name: `timm:resnet18`, `timm:vit_tiny_patch16_224`. Requires the extra `timm`.

Parameters keep timm's names, so its weights load. Dropout is off, unless a model sets it by default.
"""

from __future__ import annotations

import difflib
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
USES: Uses = {}  # the name determines everything


def names() -> list[str]:
    return [f"{PREFIX}NAME"]


def knows(backbone: str) -> bool:
    return backbone.startswith(PREFIX) and backbone != PREFIX


def complete(config: Model, side: int) -> Model:
    only(config, USES)
    return config


def build(config: Model, image_shape: tuple[int, int, int]) -> tuple[nn.Module, int]:
    """Create timm's model without its classifier; one image is passed to count its features."""
    model = _create(config.backbone, image_shape, pretrained=False)
    try:
        with torch.no_grad():
            features = model.eval()(torch.zeros(1, *image_shape))
    except Exception as error:  # models fail in many ways
        raise BadInput(
            f"{config.backbone} cannot take images of {_size(image_shape)} ({_line(error)}): give another "
            "--image-size, or use another model."
        ) from error
    if not isinstance(features, Tensor) or features.dim() != 2:
        raise BadInput(f"{config.backbone} does not return one vector per image: use another model of timm.")
    return model.train(), features.shape[1]


def pretrained(source: str, image_shape: tuple[int, int, int]) -> dict[str, Tensor]:
    """Load timm's weights for images of this shape, with the pixel statistics they were trained with."""
    model = _create(source, image_shape, pretrained=True)
    weights: dict[str, Tensor] = dict(model.state_dict())
    for ours, theirs in (("pixel_mean", "mean"), ("pixel_std", "std")):
        value = torch.tensor(model.pretrained_cfg[theirs])  # type: ignore[index]
        channels = image_shape[0]
        weights[ours] = (value if len(value) == channels else value.mean().expand(channels)).reshape(-1, 1, 1)
    return weights


def _create(source: str, image_shape: tuple[int, int, int], pretrained: bool) -> nn.Module:
    name, (channels, *size) = source.removeprefix(PREFIX), image_shape
    timm = _timm()
    if "/" not in name and not timm.is_model(name):
        near = difflib.get_close_matches(name.split(".")[0], timm.list_models(), cutoff=0.6)
        hint = f"did you mean {' or '.join(PREFIX + other for other in near)}?" if near else "see timm.list_models()."
        raise BadInput(f"timm has no model {name!r}; {hint}")
    create = timm.create_model
    options: dict[str, Any] = {"pretrained": pretrained, "num_classes": 0, "in_chans": channels}
    try:
        with _quiet():
            try:
                model: nn.Module = create(name, img_size=tuple(size), **options)
            except TypeError:  # a convolutional network accepts any image size, and no such option
                model = create(name, **options)
    except OSError as error:
        raise BadInput(
            f"{source} needs files that cannot be downloaded ({_line(error)}): check the connection, or give weights "
            "as a file."
        ) from error
    except Exception as error:  # models fail in many ways
        raise BadInput(
            f"timm cannot create {name!r} for images of {_size(image_shape)} ({_line(error)}): give another "
            "--image-size, or use another model."
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
    """Silence the hub client's retries: one sentence is shown at the end."""
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
    """Return the first line of an error, without its full stop."""
    return (str(error).splitlines() or [type(error).__name__])[0].split(". ")[0].rstrip(".")
