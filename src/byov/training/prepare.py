"""A run from its command: opens the images, resolves the config, prepares the folder, starts or resumes the trainer."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from byov._core.callbacks import Progress, Say, say_on_stderr
from byov._core.errors import BadInput
from byov._core.files import folder_written_whole, write_text
from byov.backbones import build_encoder
from byov.config import SUPERVISED, Config, absolute_source, differences, read_config, to_yaml
from byov.data.images import ImageSet, Outline
from byov.data.sources import Source, open_source
from byov.runs import checkpoints
from byov.runs.folder import RunFolder
from byov.runs.split import Division, divide, write_pixels, write_reference
from byov.training import view_cache
from byov.training.distributed.processes import Processes, meet, started
from byov.training.distributed.sync_batchnorm import share_batch_norms
from byov.training.initial_weights import initialiser
from byov.training.learners import Network, build_learner
from byov.training.loop import Trainer, classes_of
from byov.training.networks import encoder_of
from byov.training.resolve import LEAST_STEPS, cores, resolve, resolve_device

STATISTICS_IMAGES = 100_000
FEW_STEPS = 200  # below which a run is worth a warning


def prepare(
    config: Config,
    out: Path,
    *,
    resume: bool = False,
    extend: int | None = None,
    least_steps: int = 0,
    progress: Progress = lambda what, done, total: None,
    say: Say = say_on_stderr,
) -> Trainer:
    """A trainer for a new run, or for one that goes on where it stopped. Nothing is written unless all is well.

    A source that must be decoded first tells `progress` how it goes, and `say` which files it skipped. Epochs are added
    to the config's until there are `least_steps`.
    """
    local, nodes = started()
    fabric = meet(resolve_device(config.device), local, nodes, config.precision) if local * nodes > 1 else None
    processes = Processes() if fabric is None else Processes(fabric.global_rank, fabric.world_size)
    goes_on = resume or extend is not None
    config = replace(config, data=absolute_source(config.data))
    with processes.one_voice():
        if not goes_on and processes.main:
            _check_free(out)
        source = open_source(config.data, config.image_size)
        torch.set_num_threads(config.threads if config.threads and config.threads > 0 else cores())
        put_weights = initialiser(None if goes_on or config.init == "none" else config.init)
        if not goes_on and processes.main:
            _check_outline(config, source, processes, local, progress)
    data = _first_then_others(lambda: source.load("train", progress, say), processes)
    with processes.one_voice():
        if goes_on:
            _check_same_images(data, config, out)
            if config.threads is not None:  # it was set for the processes of that time
                config = replace(config, threads=min(config.threads, max(1, cores() // local)))
        config = _resolved(config, source, data.outline, processes, local, least_steps)
        if goes_on:
            config = _continued(config, out, extend)
    assert config.threads is not None and config.images is not None and config.image_size is not None
    assert config.calibration is not None
    torch.set_num_threads(config.threads)
    fabric = fabric or meet(resolve_device(config.device), local, nodes, config.precision)
    fingerprint = data.fingerprint()
    division = divide(len(data), config.images, config.calibration)
    trained = division.trained if len(division.trained) < len(data) else None
    statistics = pixel_statistics(data.images, trained)

    def initialise(network: Network) -> None:
        network.encoder.set_pixel_statistics(*statistics)
        put_weights(network)
        if processes.world > 1:
            share_batch_norms(network, say)

    shape = (data.images.shape[1], config.image_size, config.image_size)  # what the network sees; views are made in it
    with processes.one_voice():
        learner = build_learner(config, shape, classes_of(data, trained), fabric.device, initialise)
        mixed = config.precision == "bf16-mixed"
        autocast = fabric.autocast if mixed else None
        trainer = Trainer(config, out, learner, data, processes, autocast, fingerprint, trained)
        if goes_on:
            _go_on(trainer)
        elif processes.main:
            view_cache.check(config, encoder_of(learner.posterior.module), out)
            _begin(trainer, division)
    if config.views.cached and trainer.step < trainer.total:
        cache_views(trainer, progress, say)
    return trainer


def cache_views(
    trainer: Trainer, progress: Progress = lambda what, done, total: None, say: Say = say_on_stderr
) -> None:
    """Opens the cache of views; the first process makes it where there is none."""
    processes, encoder = trainer.processes, encoder_of(trainer.learner.posterior.module)
    assert trainer.fingerprint is not None
    told = view_cache.describe(trainer.config, encoder, trainer.fingerprint, trainer.trained)
    with processes.one_voice():
        if processes.main:
            try:
                view_cache.make(trainer.folder, trainer.config, encoder, told, trainer.pixels, progress)
            except KeyboardInterrupt:
                say("interrupted while views were cached: go on with --resume.")
                raise
    with processes.one_voice():
        trainer.view_cache = view_cache.open_cache(trainer.folder, told)


def _first_then_others(load: Callable[[], ImageSet], processes: Processes) -> ImageSet:
    """What every process loads; the first alone at first, over all cores: it decodes what the others then find."""
    data: list[ImageSet] = []
    for turn in (True, False):
        with processes.one_voice():
            if processes.main is turn:
                data.append(load())
    return data[0]


def _check_outline(config: Config, source: Source, processes: Processes, local: int, progress: Progress) -> None:
    """Says no to settings before images are decoded, which may take a while."""
    outline = source.outline("train", progress)
    if outline is not None:
        config = _resolved(config, source, outline, processes, local)
        assert config.image_size is not None
        with torch.random.fork_rng(devices=[]):
            encoder = build_encoder(config.model, (outline.shape[0], config.image_size, config.image_size))
        view_cache.check(config, encoder)


def _resolved(
    config: Config, source: Source, data: Outline, processes: Processes, local: int, least_steps: int = 0
) -> Config:
    """The config, resolved for the training images."""
    if config.method in SUPERVISED and not data.labelled:
        raise BadInput(f"{config.method} needs labels, but {config.data} has none: use byov or byol.")
    config = replace(config, image_size=config.image_size or source.image_size)
    config = resolve(config, data.shape, data.images, source.flips, processes.world, local, least_steps)
    if config.method == "posthoc" and config.init is None:
        raise BadInput(
            "posthoc puts noise around given weights: give them with --init (lite0, timm:NAME, a run, a file)."
        )
    if config.posterior.prior == "pretrained" and config.init is None:
        raise BadInput("the prior `pretrained` needs weights to stand around: give them with --init.")
    return config


def _check_same_images(data: ImageSet, config: Config, out: Path) -> None:
    """A run goes on with the images it began with: their numbers are the keys of order, views and labels."""
    path = RunFolder(out).checkpoint
    began = checkpoints.state(path)["fingerprint"] if path.is_file() else None  # `_continued` misses it
    if began is not None and began != data.fingerprint():
        raise BadInput(
            f"the images of {config.data} are not those that {out} began with: put them back, or start a new run from "
            f"its weights with --init {out}."
        )


def _check_free(out: Path) -> None:
    """A new run needs a place of its own; asked first, for decoding a folder may take a while."""
    if out.resolve() == Path.cwd():
        raise BadInput("a run wants a folder of its own: give --out a name.")
    if out.exists() and any(out.iterdir() if out.is_dir() else [out]):
        raise BadInput(f"{out} exists already: choose another --out, or go on with --resume.")


def _begin(trainer: Trainer, division: Division) -> None:
    """Write the folder of a new run, whole or not at all."""
    out = trainer.folder
    with folder_written_whole(out) as trainer.folder:
        write_text(RunFolder(trainer.folder).config, to_yaml(trainer.config))
        write_reference(trainer.folder, trainer.config, len(trainer.data), trainer.fingerprint, division)
        write_pixels(trainer.folder, trainer.data.images, division, trainer.learner.image_size)
        trainer.save()  # a run can be resumed from its first moment on
    trainer.folder = out


def _go_on(trainer: Trainer) -> None:
    """Back to the last checkpoint."""
    if trainer.processes.main:
        for stale in trainer.folder.rglob(".*.tmp"):  # kill -9 came while it was being written
            stale.unlink(missing_ok=True)
    trainer.restore()
    if trainer.processes.main:
        write_text(RunFolder(trainer.folder).config, to_yaml(trainer.config))  # --extend lengthens it


def pixel_statistics(images: Tensor, chosen: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of each channel in [0, 1], from the counts of the 256 values: no float copy.

    Of all images or the chosen; of very many, every k-th: they may lie on a disk.
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


def _continued(config: Config, out: Path, extend: int | None) -> Config:
    """The config to go on with; it must be the run's own, apart from the speed and the log."""
    if not RunFolder(out).config.is_file():
        raise BadInput(f"{out} holds no run to resume: check --out, or leave out --resume to start one.")
    saved = read_config(RunFolder(out).config)
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
    state = checkpoints.state(RunFolder(out).checkpoint)
    if state["step"] < state["total"]:
        raise BadInput(f"{out} is not finished (step {state['step']} of {state['total']}): use --resume first.")
    return replace(config, optim=replace(config.optim, epochs=config.optim.epochs + extend))


def estimate_seconds(trainer: Trainer, steps: int = 2) -> float:
    """How long the whole run will take here: a few losses and gradients, timed; nothing is changed by them."""
    learner = trainer.learner
    networks = [network.module for network in (learner.posterior, learner.teacher) if network is not None]
    statistics = [(buffer, buffer.clone()) for network in networks for buffer in network.buffers()]
    batch = trainer.batches(0)[0]
    took = []
    for _ in range(steps + 1):  # the first one also pays for start-up
        begun = time.perf_counter()
        learner.loss(batch, (0,)).nll.backward()  # type: ignore[no-untyped-call]
        took.append(time.perf_counter() - begun)
    for parameter in learner.posterior.parameters():
        parameter.grad = None
    for buffer, before in statistics:  # of BatchNorm: they have moved
        buffer.copy_(before)
    return min(took[1:]) * trainer.config.optim.accumulate * (trainer.total - trainer.step)


def too_short(trainer: Trainer) -> str | None:
    """A warning, where a new run can hardly learn anything."""
    steps = trainer.total
    if trainer.step or steps >= FEW_STEPS or trainer.config.method == "posthoc":
        return None
    return (
        f"warning: a run of {steps} step{'s' * (steps != 1)} learns little: give more --optim.epochs "
        f"({LEAST_STEPS:,} steps are what byov aims at where it chooses)."
    )


def describe(trainer: Trainer, origin: str) -> str:
    """What will be trained, in three lines."""
    config, posterior = trainer.config, trainer.learner.posterior
    model, optim, steps = config.model, config.optim, trainer.steps_per_epoch
    weights = sum(p.numel() for p in posterior.module.parameters()) + posterior.means.numel()
    given = {key: getattr(model, key) for key in ("width", "depth", "patch", "stem", "norm")}
    shape = "".join(f"{key} {value}, " for key, value in given.items() if value is not None)
    untrained = config.method == "posthoc"
    length = f"{optim.epochs} epoch{'s' * (optim.epochs != 1)} of {steps} step{'s' * (steps != 1)}"
    optimizer = f"batch {optim.batch_size}, {optim.optimizer}, lr {optim.lr:g}"
    start = "" if config.init is None else f", weights of {config.init}"
    lines = [
        f"{config.method} on {config.data}: {config.images:,} images ({config.calibration:,} more set aside), "
        f"{'nothing is trained' if untrained else length}, recipe {origin}",
        f"{model.backbone}{start}: {shape}{weights:,} weights, {posterior.means.numel():,} of them random; "
        f"{f'overlap {config.posterior.overlap:g}' if untrained else optimizer}",
        f"writing to {trainer.folder} (config.yaml holds every setting)",
    ]
    if trainer.step:
        lines.append(f"going on after step {trainer.step} of {trainer.total}")
    return "\n".join(lines)
