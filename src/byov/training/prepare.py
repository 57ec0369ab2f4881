"""From a config to a trainer: load the images, resolve the config, build the networks, start or resume the run."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from byov._core.callbacks import Progress, Say, say_on_stderr
from byov._core.errors import BadInput
from byov._core.files import folder_written_whole, leftovers, remove_abandoned, write_text
from byov._core.lock import Lock, put
from byov.backbones import build_encoder
from byov.config import SUPERVISED, Config, absolute_source, check_ranges, differences, read_config, to_yaml
from byov.data.images import ImageSet, Outline
from byov.data.sources import Source, open_source
from byov.runs import checkpoints
from byov.runs.folder import RunFolder
from byov.runs.split import divide, write_pixels, write_reference
from byov.training import estimate, view_cache
from byov.training.distributed.processes import Processes, meet, started
from byov.training.distributed.sync_batchnorm import share_batch_norms
from byov.training.estimate import Estimate
from byov.training.initial_weights import initialiser
from byov.training.learners import Network, build_learner, encoder_of
from byov.training.loop import Trainer, classes_of
from byov.training.resolve import cores, resolve, resolve_device

STATISTICS_IMAGES = 100_000  # at most, for the pixel statistics


def prepare(
    config: Config,
    out: Path,
    *,
    resume: bool = False,
    extend: int | None = None,
    least_steps: int = 0,
    view_caches: Path | None = None,
    progress: Progress = lambda what, done, total: None,
    say: Say = say_on_stderr,
) -> Trainer:
    """Build the trainer of a new run, or of one that resumes. Nothing is written if any setting is wrong.

    Args:
        config: The settings; `resolve` fills in those left open.
        out: The run folder: new, or that of the run to resume.
        resume: Continue the run in `out` from its last checkpoint.
        extend: Continue the finished run in `out` for this many more epochs.
        least_steps: Epochs are added until the run has this many steps.
        view_caches: A folder of cached views that runs share; by default a run has its own, until it finishes.
        progress: Receives the progress of decoding images and caching views.
        say: Receives warnings, such as the names of skipped files.

    Raises:
        BadInput: If settings, images, weights or the folder do not fit.
    """
    check_ranges(config)
    resumes = resume or extend is not None
    config = replace(config, data=absolute_source(config.data))
    launch = _launch(config)
    together = launch.processes.one_voice

    with together():
        source, put_weights = _open(config, out, launch, resumes, progress)
    data = launch.processes.first_then_others(lambda: source.load("train", progress, say))  # decoded by the first

    with together():
        if resumes:
            _check_same_images(data, config, out)
            config = _resolve_resumed(config, source, data.outline, launch, out, extend, least_steps)
        else:
            config = _resolve(config, source, data.outline, launch, least_steps)

    with together():
        trainer = _build(config, out, data, put_weights, launch, say)

    with together():
        if resumes:
            _resume(trainer)
        elif launch.processes.main:
            _start(trainer, view_caches)
    if config.views.cached and trainer.step < trainer.total:
        cache_views(trainer, progress, say, view_caches)
    return trainer


# ------------------------------------------------------------------------------------------------------------- loading


class _Launch(NamedTuple):
    """How this process was started, and those it was started with."""

    local: int
    """Processes on this machine."""
    nodes: int
    processes: Processes
    fabric: Any
    """None for a single process, until its settings are known to be good: Lightning is slow to import."""


def _launch(config: Config) -> _Launch:
    local, nodes = started()
    if local * nodes == 1:
        return _Launch(local, nodes, Processes(), None)
    fabric = meet(resolve_device(config.device), local, nodes, config.precision)
    return _Launch(local, nodes, Processes(fabric.global_rank, fabric.world_size), fabric)


def _open(
    config: Config, out: Path, launch: _Launch, resumes: bool, progress: Progress
) -> tuple[Source, Callable[[nn.Module], None]]:
    """Open the source and the weights of --init, and refuse all that can be refused before images are decoded."""
    first = launch.processes.main and not resumes
    if first:
        _check_free(out)
    source = open_source(config.data, config.image_size)
    torch.set_num_threads(config.threads if config.threads and config.threads > 0 else cores())
    put_weights = initialiser(None if resumes or config.init == "none" else config.init)
    outline = source.outline("train", progress) if first else None
    if outline is not None:
        resolved = _resolve(config, source, outline, launch)
        assert resolved.image_size is not None
        with torch.random.fork_rng(devices=[]):
            encoder = build_encoder(resolved.model, (outline.shape[0], resolved.image_size, resolved.image_size))
        view_cache.check(resolved, encoder)
    return source, put_weights


def _check_free(out: Path) -> None:
    if out.resolve() == Path.cwd():
        raise BadInput("a run needs its own folder, not the current one: give --out a name.")
    if out.exists() and any(out.iterdir() if out.is_dir() else [out]):
        raise BadInput(f"{out} exists already: choose another --out, or continue that run with --resume.")


# ----------------------------------------------------------------------------------------------------------- resolving


def _resolve(config: Config, source: Source, data: Outline, launch: _Launch, least_steps: int = 0) -> Config:
    """Fill in what the config leaves open, and check that data, weights and method fit together."""
    if config.method in SUPERVISED and not data.labelled:
        raise BadInput(f"{config.method} needs labels, but {config.data} has none: use byov or byol.")
    config = replace(config, image_size=config.image_size or source.image_size)
    world = launch.processes.world
    config = resolve(config, data.shape, data.images, source.flips, world, launch.local, least_steps)
    if config.method == "posthoc" and config.init is None:
        raise BadInput(
            "posthoc puts noise around given weights: give them with --init (lite0, timm:NAME, a run, a file)."
        )
    if config.posterior.prior == "pretrained" and config.init is None:
        raise BadInput("the prior `pretrained` needs weights to be centred on: give them with --init.")
    if config.device == "cpu":  # most of it is on the GPU otherwise
        found = estimate.training(config, data.shape, data.images, source.image_size is None, world)
        advice = "use a smaller batch (--optim.batch-size, or more --optim.accumulate), image size or backbone"
        replace(found, memory=found.memory * launch.local).check(advice)
    return config


def plan(config: Config, least_steps: int = 0, progress: Progress = lambda what, done, total: None) -> Estimate:
    """Estimate what training takes; nothing is decoded or written."""
    check_ranges(config)
    launch, source = _launch(config), open_source(config.data, config.image_size)
    torch.set_num_threads(config.threads or cores())
    outline = source.outline("train", progress) or source.load("train", progress).outline
    config = _resolve(config, source, outline, launch, least_steps)
    assert config.image_size is not None
    mapped = source.image_size is not None
    found = estimate.training(config, outline.shape, outline.images, not mapped, launch.processes.world)
    seconds = estimate.training_seconds(config, (outline.shape[0], config.image_size, config.image_size))
    cached = outline.images * math.prod(outline.shape) if mapped else 0
    return replace(found, disk=found.disk + cached, seconds=seconds / launch.processes.world)


def _check_same_images(data: ImageSet, config: Config, out: Path) -> None:
    """Refuse other images than the run began with: their numbers are the keys of order, views and labels."""
    path = RunFolder(out).checkpoint
    if not path.is_file():
        return  # `_resolve_resumed` reports it
    began = checkpoints.run_state(checkpoints.state(path), path)["fingerprint"]
    if began is not None and began != data.fingerprint():
        raise BadInput(
            f"the images of {config.data} are not those that {out} began with: put them back, or start a new run from "
            f"its weights with --init {out}."
        )


def _resolve_resumed(
    config: Config, source: Source, data: Outline, launch: _Launch, out: Path, extend: int | None, least_steps: int
) -> Config:
    """Resolve the config of a run that resumes; only speed and logging may differ from the saved one."""
    if config.threads is not None:  # chosen for the number of processes at that time
        config = replace(config, threads=min(config.threads, max(1, cores() // launch.local)))
    config = _resolve(config, source, data, launch, least_steps)
    run = RunFolder(out)
    if not run.config.is_file():
        raise BadInput(f"{out} holds no run to resume: check --out, or leave out --resume to start one.")
    saved = read_config(run.config)
    if config.posterior.temperature is None:
        config = replace(config, posterior=replace(config.posterior, temperature=saved.posterior.temperature))
    different = differences(saved, config)
    if different:
        key, (old, new) = next(iter(different.items()))
        more = f" (and {len(different) - 1} more)" if len(different) > 1 else ""
        raise BadInput(
            f"{out} was trained with {key}={old}, not {new}{more}: resume with the same settings (or with none), "
            "or start a new run."
        )
    if extend is None:
        return config
    if extend < 1:
        raise BadInput(f"a run can only be lengthened: give --extend at least 1 epoch, not {extend}.")
    if config.method == "posthoc":
        raise BadInput(f"{out} was not trained (method posthoc), so --extend has nothing to lengthen: start a new run.")
    state = checkpoints.state(run.checkpoint)
    if state["step"] < state["total"]:
        raise BadInput(f"{out} is not finished (step {state['step']} of {state['total']}): use --resume first.")
    return replace(config, optim=replace(config.optim, epochs=config.optim.epochs + extend))


# ------------------------------------------------------------------------------------------------------------ building


def _build(
    config: Config, out: Path, data: ImageSet, put_weights: Callable[[nn.Module], None], launch: _Launch, say: Say
) -> Trainer:
    """Build networks, optimizer and trainer from a resolved config."""
    assert config.threads is not None and config.images is not None and config.image_size is not None
    assert config.calibration is not None
    torch.set_num_threads(config.threads)
    fabric = launch.fabric or meet(resolve_device(config.device), launch.local, launch.nodes, config.precision)
    split = divide(len(data), config.images, config.calibration)
    trained = split.trained if len(split.trained) < len(data) else None
    statistics = pixel_statistics(data.images, trained)

    def initialise(network: Network) -> None:
        network.encoder.set_pixel_statistics(*statistics)
        put_weights(network)
        if launch.processes.world > 1:
            share_batch_norms(network, say)

    shape = (data.images.shape[1], config.image_size, config.image_size)  # what the network sees, not the stored size
    learner = build_learner(config, shape, classes_of(data, trained), fabric.device, initialise)
    autocast = fabric.autocast if config.precision == "bf16-mixed" else None
    return Trainer(config, out, learner, data, launch.processes, autocast, data.fingerprint(), trained)


def pixel_statistics(images: Tensor, chosen: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Compute mean and standard deviation of each channel in [0, 1], of all images or the chosen ones.

    They come from the counts of the 256 values, without a float copy. Of very many images, which may be on disk, every
    k-th is used.
    """
    chosen = torch.arange(len(images)) if chosen is None else chosen
    means, stds = [], []
    values = torch.arange(256, dtype=torch.float64) / 255
    parts = (images[some] for some in torch.split(chosen[:: -(-len(chosen) // STATISTICS_IMAGES)], 1000))
    all_counts = torch.zeros(images.shape[1], 256, dtype=torch.float64)
    for part in parts:
        for channel, counts in zip(part.unbind(1), all_counts, strict=True):
            counts += torch.bincount(channel.reshape(-1), minlength=256)
    for counts in all_counts:
        mean = (counts * values).sum() / counts.sum()
        means.append(mean)
        stds.append(((counts * (values - mean) ** 2).sum() / counts.sum()).sqrt().clamp(min=1e-3))
    return torch.stack(means).float(), torch.stack(stds).float()


# ------------------------------------------------------------------------------------------------- starting or resuming


def _start(trainer: Trainer, view_caches: Path | None = None) -> None:
    """Write the folder of a new run, whole or not at all."""
    config, out = trainer.config, trainer.folder
    assert config.images is not None and config.calibration is not None
    view_cache.check(config, encoder_of(trainer.learner.posterior.module), out if view_caches is None else None)
    split = divide(len(trainer.data), config.images, config.calibration)
    remove_abandoned(leftovers(out))
    try:
        with folder_written_whole(out) as trainer.folder:
            put(RunFolder(trainer.folder).lock)
            write_text(RunFolder(trainer.folder).config, to_yaml(config))
            write_reference(trainer.folder, config, len(trainer.data), trainer.fingerprint, split)
            write_pixels(trainer.folder, trainer.data.images, split, trainer.learner.image_size)
            trainer.save()  # so that it can be resumed from the start
    except OSError:
        _check_free(out)  # another process may have made it since
        raise
    trainer.folder = out
    trainer.lock = Lock(RunFolder(out).lock, out)


def _resume(trainer: Trainer) -> None:
    """Return to the last checkpoint."""
    if trainer.processes.main:
        trainer.lock = Lock(RunFolder(trainer.folder).lock, trainer.folder)
        remove_abandoned([*leftovers(trainer.folder), *trainer.folder.rglob(".*.tmp")])
    trainer.restore()
    if trainer.processes.main:
        write_text(RunFolder(trainer.folder).config, to_yaml(trainer.config))  # --extend lengthens it


def cache_views(
    trainer: Trainer,
    progress: Progress = lambda what, done, total: None,
    say: Say = say_on_stderr,
    shared: Path | None = None,
) -> None:
    """Open the cache of views, in the folder that runs share if there is one; the main process makes it if need be."""
    processes, encoder = trainer.processes, encoder_of(trainer.learner.posterior.module)
    assert trainer.fingerprint is not None
    description = view_cache.describe(trainer.config, encoder, trainer.fingerprint, trainer.trained)
    with processes.one_voice():
        if processes.main:
            try:
                view_cache.make(trainer.folder, trainer.config, encoder, description, trainer.pixels, progress, shared)
            except KeyboardInterrupt:
                say("interrupted while views were cached: continue with --resume.")
                raise
    with processes.one_voice():
        trainer.view_cache = view_cache.open_cache(trainer.folder, description, shared)
