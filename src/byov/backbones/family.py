"""What a family of backbones offers (vit.py, resnet.py and timm.py are one each), and how it says no."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NamedTuple, Protocol

from torch import Tensor, nn

from byov._core.errors import BadInput
from byov.config import Model

Stem = Literal["patch", "conv", "imagenet", "cifar"]

# The settings that shape a backbone; no family has a use for all of them.
KEYS = ("width", "depth", "heads", "patch", "stem", "norm", "positions", "pool")

Uses = Mapping[str, tuple[Stem, ...]]
"""The settings that a family has a use for, with the choices where these are fewer than the config's."""


class Stage(NamedTuple):
    """A part of a backbone's forward pass."""

    name: str
    last: str
    """Name of the module that ends it: parameters are registered in the order of the forward pass."""
    run: Callable[[Tensor], Tensor]


class Staged(nn.Module):
    """A backbone whose forward pass is a chain of stages, so that it can be cut between two of them."""

    def stages(self) -> Sequence[Stage]:
        raise NotImplementedError

    def forward(self, images: Tensor) -> Tensor:
        for stage in self.stages():
            images = stage.run(images)
        return images

    def until(self, name: str, images: Tensor) -> Tensor:
        """The activations after a stage."""
        for stage in self.stages():
            images = stage.run(images)
            if stage.name == name:
                break
        return images

    def after(self, name: str, activations: Tensor) -> Tensor:
        """The features, from the activations after a stage."""
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
        """The backbones there are, as a user writes them."""
        ...

    def knows(self, backbone: str) -> bool:
        """Whether this backbone is one of the family's."""
        ...

    def complete(self, config: Model, side: int) -> Model:
        """The config for images of this side, with nothing left open; what cannot work is bad input."""
        ...

    def build(self, config: Model, image_shape: tuple[int, int, int]) -> tuple[nn.Module, int]:
        """The backbone of a complete config, images (B, C, H, W) to features (B, F), and F."""
        ...


def unfit(config: Model, uses: Uses) -> list[str]:
    """The settings that are given, but do not apply: to none of the family's backbones, or not with this value."""
    given = {key: getattr(config, key) for key in KEYS if getattr(config, key) is not None}
    return [key for key, value in given.items() if key not in uses or (uses[key] and value not in uses[key])]


def only(config: Model, uses: Uses) -> None:
    """Refuses a setting that is given, but that the family has no use for."""
    given = [key for key in unfit(config, uses) if key not in uses]
    if given:
        what = " and ".join([", ".join(f"model.{key}" for key in given[:-1]), f"model.{given[-1]}"][len(given) == 1 :])
        flags = " ".join(f"--model.{key} None" for key in given)
        raise BadInput(
            f"{what} {'do' if given[1:] else 'does'} not apply to {config.backbone}: leave that out, or, if the recipe "
            f"sets it, add {flags}."
        )


def stem_of(config: Model, uses: Uses, default: Stem) -> Stem:
    """The stem: one of this family's, or its default."""
    if "stem" in unfit(config, uses):
        raise BadInput(
            f"model.stem {config.stem} does not apply to {config.backbone}: use {' or '.join(uses['stem'])}, or give "
            "--model.stem None."
        )
    return config.stem or default
