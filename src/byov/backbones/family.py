"""The interface of a family of backbones (such as vit.py, resnet.py, timm.py), and its error messages."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NamedTuple, Protocol

from torch import Tensor, nn

from byov._core.errors import BadInput
from byov.config import Model

Stem = Literal["patch", "conv", "imagenet", "cifar"]

# The settings of a backbone; each family uses some of them.
KEYS = ("width", "depth", "heads", "patch", "stem", "norm", "positions", "pool")

Uses = Mapping[str, tuple[Stem, ...]]
"""The settings that a family uses, with the accepted choices if these are fewer than the config's."""


class Stage(NamedTuple):
    """A part of a backbone's forward pass."""

    name: str
    last: str
    """Name of the module that ends it: parameters are registered in the order of the forward pass."""
    run: Callable[[Tensor], Tensor]


class Staged(nn.Module):
    """A backbone whose forward pass is a chain of stages, so that it can be split between two of them."""

    def stages(self) -> Sequence[Stage]:
        raise NotImplementedError

    def forward(self, images: Tensor) -> Tensor:
        for stage in self.stages():
            images = stage.run(images)
        return images

    def until(self, name: str, images: Tensor) -> Tensor:
        """Compute the activations after a stage."""
        for stage in self.stages():
            images = stage.run(images)
            if stage.name == name:
                break
        return images

    def after(self, name: str, activations: Tensor) -> Tensor:
        """Compute the features from the activations after a stage."""
        stages = self.stages()
        first = 1 + next(i for i, stage in enumerate(stages) if stage.name == name)
        for stage in stages[first:]:
            activations = stage.run(activations)
        return activations


class Family(Protocol):
    """A module with these functions: a new family is one file and one line in `FAMILIES`."""

    @property
    def USES(self) -> Uses: ...

    def names(self) -> list[str]:
        """List the backbones, as a user writes them."""
        ...

    def knows(self, backbone: str) -> bool:
        """Whether this backbone is one of the family's."""
        ...

    def complete(self, config: Model, side: int) -> Model:
        """Complete the config for images of this side; refuse what cannot work."""
        ...

    def build(self, config: Model, image_shape: tuple[int, int, int]) -> tuple[nn.Module, int]:
        """Build the backbone of a complete config, images (B, C, H, W) to features (B, F), and return it with F."""
        ...


def unfit(config: Model, uses: Uses) -> list[str]:
    """List the settings that are given but not accepted by the family, at all or with this value."""
    given = {key: getattr(config, key) for key in KEYS if getattr(config, key) is not None}
    return [key for key, value in given.items() if key not in uses or (uses[key] and value not in uses[key])]


def only(config: Model, uses: Uses) -> None:
    """Refuse a setting that is given but not accepted by the family."""
    given = [key for key in unfit(config, uses) if key not in uses]
    if given:
        what = " and ".join([", ".join(f"model.{key}" for key in given[:-1]), f"model.{given[-1]}"][len(given) == 1 :])
        flags = " ".join(f"--model.{key} None" for key in given)
        raise BadInput(
            f"{what} {'do' if given[1:] else 'does'} not apply to {config.backbone}: leave that out, or, if the recipe "
            f"sets it, add {flags}."
        )


def stem_of(config: Model, uses: Uses, default: Stem) -> Stem:
    """Return the stem: one of this family's, or its default."""
    if "stem" in unfit(config, uses):
        raise BadInput(
            f"model.stem {config.stem} does not apply to {config.backbone}: use {' or '.join(uses['stem'])}, or give "
            "--model.stem None."
        )
    return config.stem or default
