"""What a family of backbones offers (vit.py, resnet.py and timm.py are one each), and how it says no."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol

from torch import nn

from byov.config import Model
from byov.errors import BadInput

Stem = Literal["patch", "conv", "imagenet", "cifar"]

# The settings that shape a backbone; no family has a use for all of them.
KEYS = ("width", "depth", "heads", "patch", "stem", "norm", "positions", "pool")


class Family(Protocol):
    """A module with these functions: a new family is one file and one line in `FAMILIES`."""

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


def only(config: Model, keys: Sequence[str]) -> None:
    """Refuses a setting that is given but is not among those the backbone has a use for."""
    given = [key for key in KEYS if key not in keys and getattr(config, key) is not None]
    if given:
        what = " and ".join([", ".join(f"model.{key}" for key in given[:-1]), f"model.{given[-1]}"][len(given) == 1 :])
        flags = " ".join(f"--model.{key} None" for key in given)
        raise BadInput(
            f"{what} {'do' if given[1:] else 'does'} not apply to {config.backbone}: leave that out, or, if the recipe "
            f"sets it, add {flags}."
        )


def stem_of(config: Model, options: Sequence[Stem], default: Stem) -> Stem:
    """The stem: one of this family's, or its default."""
    stem = config.stem or default
    if stem not in options:
        use = " or ".join(options)
        raise BadInput(f"model.stem {stem} does not apply to {config.backbone}: use {use}, or set it to None.")
    return stem
