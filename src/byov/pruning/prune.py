"""`byov prune`: a run with fewer weights, and what they cost.

The curve is the paper's: at each sparsity, weights of the encoder at its means are set to 0, nothing is trained, and
the images are classified by the probe of the unpruned encoder, and by a refitted one. The pruned run is a run like any
other. Its checkpoint holds the masks, and training it (rounds here, `--extend` later) keeps them. Each round restarts
the recipe's schedules: at the learning rate where they ended, nothing would move. A stopped call resumes with the same
settings.
"""

from __future__ import annotations

import copy
import shutil
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from byov._core.cache import Entry, read_entry, write_entry
from byov._core.callbacks import Progress, Say, say_on_stderr
from byov._core.errors import BadInput
from byov._core.files import (
    folder_written_whole,
    leftovers,
    read_json,
    remove_abandoned,
    without_prefix,
    write_json,
    write_text,
)
from byov._core.lock import Lock, put
from byov.config import Config, to_dict, to_yaml
from byov.data.sources import open_source
from byov.data.transforms import resized
from byov.evaluation.probe import Labelled, Subject, as_labelled
from byov.inference.inputs import in_channels
from byov.inference.run import Run, features_of, load
from byov.metrics import ece, top_k_accuracy
from byov.pruning.criteria import Masks, Pruning, choose_masks, prunable_weights, sparsity_of
from byov.pruning.structured import compact
from byov.runs import checkpoints
from byov.runs.folder import RunFolder
from byov.training.distributed.processes import started
from byov.training.loop import Trainer
from byov.training.masks import pruned
from byov.training.prepare import prepare

PARTIAL = "pruning.partial.safetensors"  # in results/, until it is done: settings, the round begun, the finished rounds
CURVE = (0.25, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98)
UNLABELLED = 2000  # images at most, if there are no labels
BATCH, REPEATS = 256, 7  # for the speed


def prune(
    run: Run,
    out: Path,
    how: Pruning,
    data: str | None = None,
    curve: Sequence[float] = CURVE,
    progress: Progress = lambda what, done, total: None,
    say: Say = say_on_stderr,
    train: Callable[[Trainer], object] = lambda trainer: trainer.run(),
    draw: Callable[[dict[str, Any]], object] = lambda results: None,
) -> dict[str, Any]:
    """Prune a run, write the pruned run to a new folder, and measure it.

    A call that was stopped anywhere can be repeated: it resumes.

    Args:
        run: The run to prune; it does not change.
        out: Folder of the pruned run.
        how: The score, the sparsity, and how many epochs to train between rounds.
        data: The source to measure on; None: the run's own.
        curve: Further sparsities at which the probe is measured, without training.
        progress: Called with the current stage, what is done, and the total.
        say: Called with messages for the user.
        train: Runs a trainer, if `how` asks for training.
        draw: Called with the results before the work counts as done.

    Returns:
        What is written to `results/pruning.json`: sparsity, accuracy and calibration before and after, costs.

    Raises:
        BadInput: If the settings do not fit the run, or `out` is in use.

    Example:
        >>> how = byov.Pruning("snr", sparsity=0.5)
        >>> results = byov.prune(byov.load("runs/mine"), Path("runs/pruned"), how, curve=(0.25,))
        >>> round(results["sparsity"], 2)
        0.5
    """
    data = data or run.config.data
    done = _resumed(out, {"from": str(run.folder), "step": run.step, "data": data, **asdict(how)})
    if not all(0 <= point < 1 for point in curve):
        raise BadInput("--curve takes sparsities from 0 to below 1.")
    if how.epochs and started() != (1, 1):
        raise BadInput("byov prune trains in one process: start it without torchrun or srun.")
    tensors, state = checkpoints.load(RunFolder(run.folder).checkpoint)
    before = _masks(run.folder)
    prunable = prunable_weights(run.learner.posterior, how.part)
    start = sparsity_of(before, prunable)
    if how.sparsity <= start:
        raise BadInput(f"{run.folder} has {start:.0%} of these weights pruned already: give a larger --sparsity.")
    masks = choose_masks(run.learner.posterior, how, how.sparsity_after(1, start), before)

    points = sorted({s for s in curve if s > start} | {how.sparsity})
    cost = PruningCost(run, data, progress, say)
    unpruned = cost.encoder
    rows = [{"sparsity": start} | cost.measures(unpruned)]
    for point in points:
        at = choose_masks(run.learner.posterior, how, point, before)
        rows.append({"sparsity": sparsity_of(at, prunable)} | cost.measures(without(unpruned, at)))

    config = _retraining(run.config, how.epochs) if how.epochs else run.config
    if not done["begun"]:
        done["begun"] = 1
        begin = _restarted(state, config) if how.epochs else state
        _write_run(run.folder, out, config, pruned(tensors, masks), begin, done)
    lock = Lock(RunFolder(out).lock, out)
    remove_abandoned([*leftovers(out), *out.rglob(".*.tmp")])
    partial, rounds = RunFolder(out).results / PARTIAL, done["rounds"]
    for number in range(len(rounds) + 1, how.rounds + 1) if how.epochs else ():
        if number > done["begun"]:
            _prune_on(_opened(run, out), how, how.sparsity_after(number, start))
            done["begun"] = number
        write_entry(partial, Entry({}, done))
        device, threads = run.encoder.means.device.type, torch.get_num_threads()
        here = replace(config, device=device, threads=threads)
        train(prepare(here, out, resume=True, progress=progress, say=say))
        measures = cost.measures(encoder_of(_opened(run, out)))
        rounds.append({"sparsity": sparsity_of(_masks(out), prunable), "epochs": how.epochs} | measures)
        write_entry(partial, Entry({}, done))
    results: dict[str, Any] = dict(rounds[-1] if rounds else rows[1 + points.index(how.sparsity)])  # as the run is now
    results |= {"curve": rows, "rounds": rounds}
    results |= _costs(
        unpruned, encoder_of(_opened(run, out)), _masks(out), prunable, resized(cost.tested[:BATCH], cost.side)
    )
    measured = {"images": len(cost.tested), "prunable": "weights of Linear layers and convolutions"}
    results["settings"] = done["settings"] | measured
    write_json(RunFolder(out).results / "pruning.json", results)
    _update_summary(_opened(run, out))
    draw(results)
    partial.unlink(missing_ok=True)
    lock.release()
    return results


def _resumed(out: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """What a stopped call with the same settings has done; anything else at `out` is bad input."""
    entry = read_entry(RunFolder(out).results / PARTIAL)
    if entry is not None:
        done: dict[str, Any] = entry.header
        if done["settings"] == settings:
            return done
        raise BadInput(f"{out} holds a stopped pruning with other settings: choose another --out, or remove it.")
    if out.exists() and any(out.iterdir() if out.is_dir() else [out]):
        raise BadInput(f"{out} exists already: choose another --out.")
    return {"settings": settings, "begun": 0, "rounds": []}


def _update_summary(run: Run) -> None:
    """Write the weights that are left to `summary.json`; without retraining it is a copy of the unpruned run's."""
    path, sigma = RunFolder(run.folder).summary, run.learner.posterior.sigma
    if path.is_file() and len(left := sigma[sigma > 0]):
        try:
            summary = read_json(path)
        except ValueError:  # damaged: what it had is lost already
            summary = {}
        write_json(path, summary | {"random_weights": len(left), "median_sigma": float(left.median())})


def _opened(run: Run, out: Path) -> Run:
    return load(out, run.encoder.means.device.type)


def encoder_of(run: Run) -> nn.Module:
    """Return the encoder at its means, as a plain module."""
    return run.encoder.unwrapped().eval()


@torch.no_grad()
def without(encoder: nn.Module, masks: Masks) -> nn.Module:
    """Return a copy of an encoder with the weights that the masks (of the whole network) drop set to 0."""
    twin = copy.deepcopy(encoder)
    own = encoder_masks(masks)
    for name, parameter in twin.named_parameters():
        if name in own:
            parameter.mul_(own[name].to(parameter.device))
    return twin


def encoder_masks(masks: Masks) -> dict[str, Tensor]:
    """Return the encoder's masks, by the encoder's own parameter names."""
    return without_prefix(masks, "encoder.")


def _retraining(config: Config, epochs: int) -> Config:
    """The settings of a round: the recipe's schedules over these epochs. The posterior exists already: beta stays."""
    return replace(
        config,
        optim=replace(config.optim, epochs=epochs),
        posterior=replace(config.posterior, beta_start=config.posterior.beta_end),
    )


def _restarted(state: Mapping[str, Any], config: Config) -> dict[str, Any]:
    """A checkpoint's state at the start of a round."""
    total = config.optim.epochs * ((config.images or 0) // config.optim.batch_size)
    return {**state, "step": 0, "total": total, "seconds": 0.0, "config": to_dict(config)}


def _write_run(
    origin: Path,
    out: Path,
    config: Config,
    tensors: Mapping[str, Tensor],
    state: Mapping[str, Any],
    done: dict[str, Any],
) -> None:
    """Write the folder of a run, whole or not at all; with what is needed to resume from there."""
    old = RunFolder(origin)
    with folder_written_whole(out) as place:
        put(RunFolder(place).lock)
        write_entry(RunFolder(place).results / PARTIAL, Entry({}, done))
        write_text(RunFolder(place).config, to_yaml(config))
        for file in (old.metrics, old.posterior, old.summary, old.reference_images, old.reference_pixels):
            if file.is_file():
                copy_of = place / file.relative_to(origin)
                copy_of.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(file, copy_of)
        checkpoints.save(RunFolder(place).checkpoint, tensors, state)


def _prune_on(run: Run, how: Pruning, sparsity: float) -> None:
    """Prune a run in place, before another round."""
    masks = choose_masks(run.learner.posterior, how, sparsity, _masks(run.folder))
    tensors, state = checkpoints.load(RunFolder(run.folder).checkpoint)
    checkpoints.save(RunFolder(run.folder).checkpoint, pruned(tensors, masks), _restarted(state, run.config))


def _masks(folder: Path) -> dict[str, Tensor]:
    """The masks of a pruned run."""
    return without_prefix(checkpoints.load(RunFolder(folder).checkpoint)[0], "mask.")


# -------------------------------------------------------------------------------------------------------- what it costs


class PruningCost:
    """Measures encoders against a run's own: by its probe, by a refitted probe, and by the cosine of the features.

    Without labels, by the cosine alone.
    """

    def __init__(self, run: Run, data: str, progress: Progress, say: Say) -> None:
        self.side = run.image_shape[-1]
        self.tested, labelled = _images(run, data, progress, say)
        self.encoder = encoder_of(run)
        self.unpruned = None if labelled is None else Subject(run, self.encoder, labelled, self.side, progress)

    @cached_property
    def features(self) -> Tensor:
        """Of the test images, by the run's own encoder."""
        return self._tested(self.encoder) if self.unpruned is None else self.unpruned.test_features

    def measures(self, encoder: nn.Module) -> dict[str, float]:
        """Compare an encoder with the run's own."""
        if self.unpruned is None:
            return {"cosine": float(F.cosine_similarity(self._tested(encoder), self.features).mean())}
        own = encoder is self.encoder
        pruned = self.unpruned if own else replace(self.unpruned, encoder=encoder)
        found = {"cosine": float(F.cosine_similarity(pruned.test_features, self.features).mean())}
        labels = pruned.data.test_labels
        for prefix, probe in (("", self.unpruned.probe), ("refitted.", pruned.probe)):
            found |= top1_and_ece(probe.probabilities(pruned.test_features), labels, prefix)
        return found

    def _tested(self, encoder: nn.Module) -> Tensor:
        return features_of(encoder, self.tested, size=self.side)


def pruned_subject(subject: Subject, masks: Masks) -> Subject:
    """Return the subject without the weights that the masks drop; its probe is refitted when asked for."""
    return replace(subject, encoder=without(encoder_of(subject.run), masks))


def top1_and_ece(probabilities: Tensor, labels: Tensor, prefix: str = "") -> dict[str, float]:
    """Return accuracy and calibration error under a prefix."""
    return {f"{prefix}top1": top_k_accuracy(probabilities, labels, 1), f"{prefix}ece": ece(probabilities, labels)}


def _images(run: Run, data: str, progress: Progress, say: Say) -> tuple[Tensor, Labelled | None]:
    """Test images, and their source with labels; None if it has no labels to fit a probe on, or all are the same."""
    source = open_source(data, run.image_shape[-1])
    loaded = [source.load(split, progress, say) for split in source.splits]
    labels = loaded[0].labels
    if len(loaded) == 2 and labels is not None and len(torch.unique(labels)) > 1 and loaded[1].labels is not None:
        labelled = as_labelled(run, data, source, loaded[0], loaded[1], say)
        return labelled.test.images, labelled
    images, _ = in_channels(run, loaded[-1].images)
    run.check(images)
    return images[:UNLABELLED], None


def _costs(
    unpruned: nn.Module, masked: nn.Module, masks: Masks, prunable: Mapping[str, Tensor], batch: Tensor
) -> dict[str, Any]:
    """Sparsity per layer, bytes and speed of the encoder before and after."""
    smaller = compact(masked, encoder_masks(masks))
    removed = numbers(smaller) < numbers(masked)
    layers = []
    for name, weight in prunable.items():
        gone = int((~masks[name]).sum()) if name in masks else 0
        layers.append({"layer": name, "weights": weight.numel(), "pruned": gone, "sparsity": gone / weight.numel()})
    # If nothing is removed the arithmetic is the same, and two timings would differ by noise alone.
    speeds = images_per_second([unpruned, smaller] if removed else [unpruned], batch)
    return {
        "layers": layers,
        "weights": {"unpruned": numbers(unpruned), "pruned": numbers(smaller)},
        "bytes": {
            "unpruned": stored_bytes(unpruned),
            "pruned": stored_bytes(smaller),
            "unpruned_compressed": stored_bytes(unpruned, compressed=True),
            "pruned_compressed": stored_bytes(smaller, compressed=True),
        },
        "images_per_second": {"unpruned": speeds[0], "pruned": speeds[-1]},
        "note": (
            "whole units are removed: the encoder is a smaller dense network"
            if removed
            else "single weights are 0 inside dense tensors: smaller where it is compressed, but not faster"
        ),
    }


def numbers(module: nn.Module) -> int:
    """Count the numbers in a module's parameters."""
    return sum(parameter.numel() for parameter in module.parameters())


def stored_bytes(module: nn.Module, compressed: bool = False) -> int:
    """Count the bytes of a module's tensors, as they are or after zlib."""
    values = [tensor.detach().cpu().contiguous().reshape(-1) for tensor in module.state_dict().values()]
    if not compressed:
        return sum(value.numel() * value.element_size() for value in values)
    packer = zlib.compressobj()
    return sum(len(packer.compress(value.view(torch.uint8).numpy().data)) for value in values) + len(packer.flush())


@torch.inference_mode()
def images_per_second(encoders: list[nn.Module], images: Tensor) -> list[float]:
    """Measure images per second of each encoder: the best of several passes, in turns, so that all share conditions."""
    best = [float("inf")] * len(encoders)
    for _ in range(REPEATS + 1):  # the first one also pays for start-up
        for i, encoder in enumerate(encoders):
            batch = images.to(next(encoder.parameters()).device)
            begun = time.perf_counter()
            encoder(batch).cpu()
            best[i] = min(best[i], time.perf_counter() - begun)
    return [len(images) / seconds for seconds in best]
