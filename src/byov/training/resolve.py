"""Resolve a config: fill in what it leaves open, from the images and the method, and refuse what cannot work."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TypeVar

import torch

from byov._core.errors import BadInput
from byov.backbones import backbone_of_weights, complete_model
from byov.config import BAYESIAN, SUPERVISED, Config, Optim, View
from byov.data.views import with_blur_sigma
from byov.runs.split import set_aside
from byov.schedules import log_variance_rate

T = TypeVar("T")

BLUR_FROM = 64  # pixels: at 32 a blurred image shows nothing
LEAST_STEPS = 1500  # of a run whose length byov chooses: the maps of docs/concepts/sigma.md have 1,560
MOST_EPOCHS = 500  # that are chosen for it: a hundred images are learned by heart before
TEMPERATURE = 0.01  # with Adam
TEMPERATURE_NEWTON = 0.003  # per image and random weight: docs/concepts/sigma.md
SELF_SUPERVISED = ("byov", "byol")
WEIGHT_DECAY = {"adamw": 0.05, "lars": 1e-6}  # if nothing is random


def resolve(
    config: Config,
    image_shape: tuple[int, int, int],
    images: int,
    flips: bool,
    world: int = 1,
    local: int = 1,
    least_steps: int = 0,
) -> Config:
    """Return a config with nothing left open, for `images` training images that are stored in this shape.

    `world` processes train together, `local` of them on this machine. Epochs are added until there are `least_steps`
    (or MOST_EPOCHS).
    """
    _, height, width = image_shape
    if height != width:
        raise BadInput(f"the images of {config.data} are {width} x {height}: make them square first.")
    if images < 2:
        raise BadInput(f"{config.data} has {images} training image{'s' * (images != 1)}: at least 2 are needed.")
    if config.images is not None and not 2 <= config.images <= images:
        raise BadInput(f"images={config.images} is not between 2 and the {images} that {config.data} has.")
    calibration = _first(config.calibration, set_aside(images))
    if not 0 <= calibration <= images - 2:
        raise BadInput(
            f"calibration={calibration} is not between 0 and {images - 2}: {config.data} has {images} images, "
            "and at least 2 must be left to train on."
        )
    used = min(config.images or images, images - calibration)
    side = config.image_size or height
    adam = config.optim.variances == "adam" or config.method not in BAYESIAN
    device = resolve_device(config.device)
    resolved = replace(
        config,
        image_size=side,
        images=used,
        calibration=calibration,
        device=device,
        threads=config.threads if config.threads is not None else max(1, cores() // local),
        init=None if config.init == "none" else config.init,
        model=replace(
            complete_model(config.model, side),
            frozen_statistics=_first(
                config.model.frozen_statistics,
                backbone_of_weights(config.init) is not None or config.model.frozen_until is not None,
            ),
        ),
        posterior=replace(
            config.posterior,
            where=config.posterior.where or ("all" if config.method in BAYESIAN else "none"),
            temperature=_first(config.posterior.temperature, TEMPERATURE if adam else None),
        ),
        optim=_optim(config, used, world, least_steps),
        views=replace(
            config.views,
            first=_view(config.views.first, side, flips, blur=1.0),
            second=_view(config.views.second, side, flips, blur=0.1),
            cached=0 if config.method == "posthoc" else config.views.cached,  # it trains nothing
        ),
    )
    _check(resolved, world)
    return resolved


def cores() -> int:
    """Return the number of cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def resolve_device(device: str) -> str:
    """Return the device a name stands for; an unavailable one is a BadInput."""
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


def _optim(config: Config, images: int, world: int, least_steps: int) -> Optim:
    optim = config.optim
    usual = 0.0 if config.method in BAYESIAN else WEIGHT_DECAY[optim.optimizer]
    size = optim.batch_size
    if size > images:  # all of them, but the same number for each process
        parts = max(optim.accumulate, 1) * world
        size = images // parts * parts or images
    steps_per_epoch = max(1, images // max(1, size))
    epochs = max(optim.epochs, min(MOST_EPOCHS, -(-least_steps // steps_per_epoch)))
    rate: float | None = None
    if optim.variances == "adam":
        rate = log_variance_rate(max(1, epochs * steps_per_epoch), config.posterior.scale == "softplus")
    return replace(
        optim,
        epochs=epochs,
        batch_size=size,
        weight_decay=_first(optim.weight_decay, usual),
        log_variance_lr=_first(optim.log_variance_lr, rate),
    )


def with_temperature(config: Config, random_weights: int) -> Config:
    """Fill in the temperature of a run with Newton's variances: the network must be known for it.

    The KL is then a few nats per random weight, so temperature x KL / N is about a hundredth, far below the loss.
    """
    if config.posterior.temperature is not None:
        return config
    temperature = TEMPERATURE_NEWTON * (config.images or 1) / max(1, random_weights)
    return replace(config, posterior=replace(config.posterior, temperature=temperature))


def _view(view: View, side: int, flips: bool, blur: float) -> View:
    return replace(
        with_blur_sigma(view, side),
        flip=_first(view.flip, 0.5 if flips else 0.0),
        blur=_first(view.blur, blur if side >= BLUR_FROM else 0.0),
    )


def check_method(config: Config) -> None:
    """Refuse methods, priors and random parameters that do not go together."""
    posterior = config.posterior
    if config.method in BAYESIAN and posterior.where == "none":
        raise BadInput(f"method {config.method} with posterior.where none has nothing random: use byol or supervised.")
    if config.method not in BAYESIAN and posterior.where != "none":
        raise BadInput(f"method {config.method} has nothing random: leave posterior.where out, or use byov.")
    if config.method in SUPERVISED and posterior.prior.startswith("teacher"):
        raise BadInput(
            f"the prior {posterior.prior} needs a teacher, which {config.method} does not have: use standard."
        )


def _check(config: Config, world: int) -> None:
    """Check ranges that types cannot express."""
    optim, posterior, model = config.optim, config.posterior, config.model
    check_method(config)
    if config.objective.name == "byol_negatives" and (config.method in SUPERVISED or world > 1):
        raise BadInput(
            "objective.name byol_negatives is for byov and byol in a single process: leave it out, or use one of these."
        )
    rules = [
        (optim.epochs >= 1, "optim.epochs must be at least 1"),
        (optim.batch_size >= 2, "optim.batch_size must be at least 2"),
        (
            1 <= optim.accumulate <= optim.batch_size // (2 * world),
            f"optim.accumulate must leave at least 2 images per micro-batch, for each of {world} processes",
        ),
        (
            optim.batch_size % (max(optim.accumulate, 1) * world) == 0,
            f"optim.accumulate times the number of processes, {optim.accumulate * world}, must divide optim.batch_size",
        ),
        (
            optim.optimizer != "lars" or optim.lr > Optim.lr,
            f"LARS learns nothing at AdamW's learning rate (optim.lr is {optim.lr:g}; BYOL's are 0.2 to 0.45 per "
            "256 images of a batch)",
        ),
        (not optim.shard or optim.optimizer == "adamw", "optim.shard needs optim.optimizer adamw"),
        (all(0 <= b < 1 for b in optim.betas), "optim.betas must be from 0 to below 1"),
        (0 <= optim.momentum < 1 and optim.trust > 0, "optim.momentum is from 0 to below 1, and optim.trust positive"),
        (optim.weight_decay is not None and optim.weight_decay >= 0, "optim.weight_decay must not be negative"),
        (min(model.head_hidden, model.head_output) >= 1, "model.head_hidden and head_output must be positive"),
        (posterior.variance_floor > 0, "variance_floor must be positive"),
        (
            config.monitor.checkpoint_steps is None or config.monitor.checkpoint_steps >= 1,
            "checkpoint_steps: at least 1",
        ),
        (min(optim.lr, optim.log_variance_lr or 0.0) >= 0, "learning rates must not be negative"),
        (optim.encoder_lr >= 0, "optim.encoder_lr must not be negative"),
        (
            config.views.cached >= 0 and config.views.cached % 2 == 0,
            "views.cached must be 0 or an even number, half of it for each of the two views",
        ),
        (0 <= optim.warmup < 1, "optim.warmup is a fraction of the run, from 0 to below 1"),
        (0 <= optim.tau <= 1, "optim.tau must be between 0 and 1"),
        (optim.clip is None or optim.clip > 0, "optim.clip must be positive, or None"),
        ((posterior.temperature or 0.0) >= 0, "posterior.temperature must not be negative"),
        (
            optim.variances == "adam" or posterior.scale == "exp",
            "optim.variances newton sets the log-variance itself: posterior.scale softplus needs adam",
        ),
        (
            optim.variances == "adam" or optim.log_variance_lr is None,
            "optim.variances newton has no optim.log_variance_lr: leave it out, or set optim.variances adam",
        ),
        (
            optim.variances == "adam" or (posterior.beta_end > 0 and posterior.temperature != 0),
            "optim.variances newton needs posterior.beta_end and temperature above 0: without a KL, sigma would be 0",
        ),
        (min(posterior.beta_start, posterior.beta_end) >= 0, "posterior.beta_start and beta_end must not be negative"),
        (config.objective.negatives_weight >= 0, "objective.negatives_weight must not be negative"),
        (config.objective.negatives_temperature > 0, "objective.negatives_temperature must be positive"),
        (posterior.prior_std > 0, "posterior.prior_std must be positive"),
        (0 < posterior.overlap < 1, "posterior.overlap must be between 0 and 1"),
        (min(model.projector_layers, model.predictor_layers) >= 1, "a head needs at least 1 layer"),
        (config.monitor.log_every >= 1, "monitor.log_every must be at least 1"),
        (config.threads is not None and config.threads >= 1, "threads must be at least 1"),
    ]
    for v in (config.views.first, config.views.second):
        chances = [v.flip, v.jitter, v.grey, v.blur, v.solarise]
        rules.append(
            (all(c is not None and 0 <= c <= 1 for c in chances), "a view's probabilities must be between 0 and 1")
        )
        rules.append((0 < v.crop_area[0] <= v.crop_area[1] <= 1, "views.*.crop_area must rise within (0, 1]"))
        rules.append((0 < v.crop_ratio[0] <= v.crop_ratio[1], "views.*.crop_ratio must rise and be positive"))
        rules.append((0 <= v.hue <= 0.5, "views.*.hue must be between 0 and 0.5"))
        factors = (v.brightness, v.contrast, v.saturation)
        rules.append((all(0 <= f <= 1 for f in factors), "brightness, contrast and saturation must be from 0 to 1"))
        assert v.blur_sigma is not None
        rules.append((0 < v.blur_sigma[0] <= v.blur_sigma[1], "views.*.blur_sigma must rise and be positive"))
    for holds, sentence in rules:
        if not holds:
            raise BadInput(f"{sentence}: change the recipe or the flag.")
