"""Fills in what a config leaves open, once, from the images and the method; and says no to what cannot work."""

from __future__ import annotations

import math
import os
from dataclasses import replace
from typing import TypeVar

import torch

from byov.backbones import backbone_size
from byov.config import BAYESIAN, SUPERVISED, Config, Model, Optim, View
from byov.errors import BadInput

T = TypeVar("T")

BLUR_FROM = 64  # pixels: METHOD says no blur at 32


def choose_recipe(side: int) -> str:
    """The recipe for images of this side, where the user names none."""
    return "digits" if side <= 16 else "small-images"


def resolve(config: Config, image_shape: tuple[int, int, int], images: int, flips: bool) -> Config:
    """A config with nothing left open, for `images` training images of this shape."""
    _, height, width = image_shape
    if height != width:
        raise BadInput(f"the images of {config.data} are {width} x {height}: make them square first.")
    if images < 2:
        raise BadInput(f"{config.data} has {images} training image{'s' * (images != 1)}: at least 2 are needed.")
    if config.images is not None and not 2 <= config.images <= images:
        raise BadInput(f"images={config.images} is not between 2 and the {images} that {config.data} has.")
    used = config.images or images
    device = resolve_device(config.device)
    resolved = replace(
        config,
        images=used,
        device=device,
        threads=config.threads if config.threads is not None else _cores(),
        model=_model(config.model, height),
        posterior=replace(
            config.posterior,
            where=config.posterior.where or ("all" if config.method in BAYESIAN else "none"),
            variance_floor=_first(config.posterior.variance_floor, math.exp(config.posterior.init_log_variance)),
        ),
        optim=_optim(config.optim, used, config.method in BAYESIAN),
        views=replace(
            config.views,
            first=_view(config.views.first, height, flips, blur=1.0),
            second=_view(config.views.second, height, flips, blur=0.1),
        ),
    )
    _check(resolved)
    return resolved


def _cores() -> int:
    """The cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def resolve_device(device: str) -> str:
    """The device a name stands for; one that is not there is bad input."""
    there = {"cpu": True, "cuda": torch.cuda.is_available()}
    if device == "auto":
        return "cuda" if there["cuda"] else "cpu"  # mps has no float64, which the KL is summed in
    if device not in there:
        raise BadInput(f"device {device!r} is not known: use auto, cpu or cuda.")
    if not there[device]:
        raise BadInput(f"device {device!r} is not available here: use --device auto.")
    return device


def _first(value: T | None, otherwise: T) -> T:
    return otherwise if value is None else value


def default_patch(side: int) -> int:
    """The divisor of an image's side nearest to a quarter of it (16 tokens) up to 64 pixels, to 16 pixels above."""
    wanted = side / 4 if side <= 64 else 16
    divisors = [d for d in range(2, side // 2 + 1) if side % d == 0]
    if not divisors:
        raise BadInput(f"no patch divides images of {side} x {side}: resize them to a side that 8 divides, say.")
    return min(divisors, key=lambda d: abs(math.log(d / wanted)))


def _model(model: Model, side: int) -> Model:
    size = backbone_size(model)
    patch = _first(model.patch, default_patch(side))
    if patch < 1 or side % patch:
        raise BadInput(f"patches of {patch} do not divide images of {side} x {side}: set model.patch to a divisor.")
    return replace(model, width=size.width, depth=size.depth, heads=size.heads, patch=patch)


def _optim(optim: Optim, images: int, bayesian: bool) -> Optim:
    decay = optim.weight_decay if optim.weight_decay is not None else (0.0 if bayesian else 0.05)
    return replace(optim, weight_decay=decay, batch_size=min(optim.batch_size, images))


def _view(view: View, side: int, flips: bool, blur: float) -> View:
    flip = view.flip if view.flip is not None else (0.5 if flips else 0.0)
    return replace(view, flip=flip, blur=view.blur if view.blur is not None else (blur if side >= BLUR_FROM else 0.0))


def _check(config: Config) -> None:
    """Ranges that no type can say."""
    optim, posterior, model = config.optim, config.posterior, config.model
    if config.method in BAYESIAN and posterior.where == "none":
        raise BadInput(f"method {config.method} with posterior.where none has nothing random: use byol or supervised.")
    if config.method not in BAYESIAN and posterior.where != "none":
        raise BadInput(f"method {config.method} has nothing random: leave posterior.where out, or use byov.")
    if config.method in SUPERVISED and posterior.prior.startswith("teacher"):
        raise BadInput(f"the prior {posterior.prior} needs a teacher, which {config.method} has not: use standard.")
    rules = [
        (optim.epochs >= 1, "optim.epochs must be at least 1"),
        (optim.batch_size >= 2, "optim.batch_size must be at least 2"),
        (1 <= optim.accumulate <= optim.batch_size // 2, "optim.accumulate must leave at least 2 images a micro-batch"),
        (optim.batch_size % max(optim.accumulate, 1) == 0, "optim.accumulate must divide optim.batch_size"),
        (all(0 <= b < 1 for b in optim.betas), "optim.betas must be from 0 to below 1"),
        (optim.weight_decay is not None and optim.weight_decay >= 0, "optim.weight_decay must not be negative"),
        (
            min(model.width or 0, model.depth or 0, model.heads or 0) >= 1,
            "model.width, depth and heads must be positive",
        ),
        (min(model.head_hidden, model.head_output) >= 1, "model.head_hidden and head_output must be positive"),
        (posterior.variance_floor is not None and posterior.variance_floor > 0, "variance_floor must be positive"),
        (
            config.monitor.checkpoint_steps is None or config.monitor.checkpoint_steps >= 1,
            "checkpoint_steps: at least 1",
        ),
        (optim.lr >= 0 and optim.log_variance_lr >= 0, "learning rates must not be negative"),
        (0 <= optim.warmup < 1, "optim.warmup is a part of the run, from 0 to below 1"),
        (0 <= optim.tau <= 1, "optim.tau must be between 0 and 1"),
        (optim.clip is None or optim.clip > 0, "optim.clip must be positive, or None"),
        (posterior.temperature >= 0, "posterior.temperature must not be negative"),
        (min(posterior.beta_start, posterior.beta_end) >= 0, "posterior.beta_start and beta_end must not be negative"),
        (posterior.prior_std > 0, "posterior.prior_std must be positive"),
        (min(model.projector_layers, model.predictor_layers) >= 1, "a head needs at least 1 layer"),
        (config.monitor.log_every >= 1, "monitor.log_every must be at least 1"),
        (config.threads is not None and config.threads >= 1, "threads must be at least 1"),
    ]
    for v in (config.views.first, config.views.second):
        chances = [v.flip, v.jitter, v.grey, v.blur, v.solarise]
        rules.append((all(c is not None and 0 <= c <= 1 for c in chances), "a view's chances must be between 0 and 1"))
        rules.append((0 < v.crop_area[0] <= v.crop_area[1] <= 1, "views.*.crop_area must rise within (0, 1]"))
        rules.append((0 < v.crop_ratio[0] <= v.crop_ratio[1], "views.*.crop_ratio must rise and be positive"))
        rules.append((0 <= v.hue <= 0.5, "views.*.hue must be between 0 and 0.5"))
        factors = (v.brightness, v.contrast, v.saturation)
        rules.append((all(0 <= f <= 1 for f in factors), "brightness, contrast and saturation must be from 0 to 1"))
        rules.append((0 < v.blur_sigma[0] <= v.blur_sigma[1], "views.*.blur_sigma must rise and be positive"))
    for holds, sentence in rules:
        if not holds:
            raise BadInput(f"{sentence}: change the recipe or the flag.")
