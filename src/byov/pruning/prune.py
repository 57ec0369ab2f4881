"""`byov prune`: a run with fewer weights, and what they cost.

The curve is the paper's: at each sparsity the weights are taken out of the encoder at its means, nothing is trained,
and the images go through the probe of the unpruned encoder (and through one fitted anew). The pruned run is a run like
any other; its checkpoint holds the masks, and training it (rounds here, `--extend` later) keeps them. A round starts
the recipe's schedules anew: at the learning rate where they ended, nothing would move. What is stopped between or in
its rounds goes on in the next call with the same settings.
"""

from __future__ import annotations

import copy
import json
import shutil
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from byov._core.callbacks import Progress, Say, say_on_stderr
from byov._core.errors import BadInput
from byov._core.files import folder_written_whole, without_prefix, write_json, write_text
from byov.config import Config, same_source, to_dict, to_yaml
from byov.data.images import ImageSet
from byov.data.sources import open_source
from byov.data.transforms import resized
from byov.evaluation.probe import Probe, fit_probe
from byov.inference.features import features_of
from byov.inference.inputs import in_channels
from byov.inference.load import Run, load
from byov.metrics import ece, top_k_accuracy
from byov.pruning.criteria import Masks, Pruning, choose_masks, prunable_weights, sparsity_of
from byov.pruning.structured import compact
from byov.runs import checkpoints
from byov.runs.folder import RunFolder
from byov.training.distributed.processes import started
from byov.training.loop import Trainer, subset
from byov.training.masks import pruned
from byov.training.prepare import prepare

PARTIAL = Path("results") / "pruning.partial.json"  # while it works: settings, the round begun, and those that are done
CURVE = (0.25, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98)
UNLABELLED = 2000  # images that stand for all where there are no labels
BATCH, REPEATS = 256, 7  # of the speed


def prune(
    run: Run,
    out: Path,
    how: Pruning,
    data: str | None = None,
    curve: Sequence[float] = CURVE,
    progress: Progress = lambda what, done, total: None,
    say: Say = say_on_stderr,
    train: Callable[[Trainer], object] = lambda trainer: trainer.run(),
) -> dict[str, Any]:
    """Writes the pruned run to `out`, with `results/pruning.json`, which it returns. `data`: what it is measured on."""
    data = data or run.config.data
    kept = _kept(out, {"from": str(run.folder), "step": run.step, "data": data, **asdict(how)})
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
    judge = Judge(run, data, 1 + len(points) + how.rounds * (how.epochs > 0), progress, say)
    unpruned = encoder_of(run)
    rows = [{"sparsity": start} | judge.measures(unpruned)]
    for point in points:
        at = choose_masks(run.learner.posterior, how, point, before)
        rows.append({"sparsity": sparsity_of(at, prunable)} | judge.measures(without(unpruned, at)))

    config = _retraining(run.config, how.epochs) if how.epochs else run.config
    if not kept["begun"]:
        _write_run(run.folder, out, config, pruned(tensors, masks), _restarted(state, config) if how.epochs else state)
        kept["begun"] = 1
    rounds = kept["rounds"]
    for number in range(len(rounds) + 1, how.rounds + 1) if how.epochs else ():
        if number > kept["begun"]:
            _prune_on(_opened(run, out), how, how.sparsity_after(number, start))
            kept["begun"] = number
        write_json(out / PARTIAL, kept)
        device, threads = run.encoder.means.device.type, torch.get_num_threads()
        here = replace(config, device=device, threads=threads)
        train(prepare(here, out, resume=True, progress=progress, say=say))
        measures = judge.measures(encoder_of(_opened(run, out)))
        rounds.append({"sparsity": sparsity_of(_masks(out), prunable), "epochs": how.epochs} | measures)
        write_json(out / PARTIAL, kept)
    results: dict[str, Any] = dict(rounds[-1] if rounds else rows[1 + points.index(how.sparsity)])  # as the run is now
    results |= {"curve": rows, "rounds": rounds}
    results |= _costs(
        unpruned, encoder_of(_opened(run, out)), _masks(out), prunable, resized(judge.tested[:BATCH], judge.side)
    )
    measured = {"images": len(judge.tested), "prunable": "weights of Linear layers and convolutions"}
    results["settings"] = kept["settings"] | measured
    write_json(RunFolder(out).results / "pruning.json", results)
    (out / PARTIAL).unlink(missing_ok=True)
    _tell_spread(_opened(run, out))
    return results


def _kept(out: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """What a call with the same settings has done before it was stopped; anything else in the place is bad input."""
    if (out / PARTIAL).is_file():
        kept: dict[str, Any] = json.loads((out / PARTIAL).read_text(encoding="utf-8"))
        if kept["settings"] == settings:
            return kept
        raise BadInput(f"{out} holds a pruning of other settings that was stopped: choose another --out, or remove it.")
    if out.exists() and any(out.iterdir() if out.is_dir() else [out]):
        raise BadInput(f"{out} exists already: choose another --out.")
    return {"settings": settings, "begun": 0, "rounds": []}


def _tell_spread(run: Run) -> None:
    """Puts the weights that are left into `summary.json`, which is the unpruned run's where nothing was retrained."""
    path, sigma = RunFolder(run.folder).summary, run.learner.posterior.sigma
    if path.is_file() and len(left := sigma[sigma > 0]):
        summary = json.loads(path.read_text(encoding="utf-8"))
        write_json(path, summary | {"random_weights": len(left), "median_sigma": float(left.median())})


def _opened(run: Run, out: Path) -> Run:
    return load(out, run.encoder.means.device.type)


def encoder_of(run: Run) -> nn.Module:
    """The encoder at its means, as a plain module."""
    return run.encoder.unwrapped().eval()


@torch.no_grad()
def without(encoder: nn.Module, masks: Masks) -> nn.Module:
    """A copy of an encoder with what the masks (of the whole network) drop set to 0."""
    twin = copy.deepcopy(encoder)
    own = encoder_masks(masks)
    for name, parameter in twin.named_parameters():
        if name in own:
            parameter.mul_(own[name].to(parameter.device))
    return twin


def encoder_masks(masks: Masks) -> dict[str, Tensor]:
    """The masks under the names that the encoder has for its parameters."""
    return without_prefix(masks, "encoder.")


def _retraining(config: Config, epochs: int) -> Config:
    """The settings of a round: the recipe's schedules over these epochs. The posterior is there already: beta stays."""
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
    origin: Path, out: Path, config: Config, tensors: Mapping[str, Tensor], state: Mapping[str, Any]
) -> None:
    """Write the folder of a run, whole or not at all."""
    old = RunFolder(origin)
    with folder_written_whole(out) as place:
        write_text(RunFolder(place).config, to_yaml(config))
        for file in (old.metrics, old.posterior, old.summary, old.reference_images, old.reference_pixels):
            if file.is_file():
                copy_of = place / file.relative_to(origin)
                copy_of.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(file, copy_of)
        checkpoints.save(RunFolder(place).checkpoint, tensors, state)


def _prune_on(run: Run, how: Pruning, sparsity: float) -> None:
    """Prunes a run in its place, before another round."""
    masks = choose_masks(run.learner.posterior, how, sparsity, _masks(run.folder))
    tensors, state = checkpoints.load(RunFolder(run.folder).checkpoint)
    checkpoints.save(RunFolder(run.folder).checkpoint, pruned(tensors, masks), _restarted(state, run.config))


def _masks(folder: Path) -> dict[str, Tensor]:
    """The masks of a run that is pruned."""
    return without_prefix(checkpoints.load(RunFolder(folder).checkpoint)[0], "mask.")


# -------------------------------------------------------------------------------------------------------- what it costs


class Judge:
    """Measures encoders against a run's own: through its probe, through one fitted anew, and by the features' cosine.

    Without labels, the cosine alone.
    """

    def __init__(self, run: Run, data: str, times: int, progress: Progress, say: Say) -> None:
        self.side = run.image_shape[-1]
        self.train, test = _images(run, data, progress, say)
        self.tested, self.labels = test.images, test.labels
        self.progress, self.what = progress, f"measuring on {data}"
        self.done, self.total = 0, times * (len(test) + (0 if self.train is None else len(self.train)))
        self.features: Tensor | None = None  # of the first encoder that is measured: the unpruned
        self.probe: Probe | None = None

    def measures(self, encoder: nn.Module) -> dict[str, float]:
        """The first encoder asked about is the one that all are compared with."""
        tested = self._features(encoder, self.tested)
        self.features = tested if self.features is None else self.features
        found = {"cosine": float(F.cosine_similarity(tested, self.features).mean())}
        if self.train is None or self.labels is None or self.train.labels is None:
            return found
        classes = 1 + int(max(self.train.labels.max(), self.labels.max()))
        refitted = fit_probe(self._features(encoder, self.train.images), self.train.labels, classes=classes)
        self.probe = self.probe or refitted
        for prefix, probe in (("", self.probe), ("refitted.", refitted)):
            probabilities = probe.probabilities(tested)
            found[f"{prefix}top1"] = top_k_accuracy(probabilities, self.labels, 1)
            found[f"{prefix}ece"] = ece(probabilities, self.labels)
        return found

    def _features(self, encoder: nn.Module, images: Tensor) -> Tensor:
        def advance(count: int) -> None:
            self.done += count
            self.progress(self.what, self.done, self.total)

        return features_of(encoder, images, advance=advance, size=self.side)


def _images(run: Run, data: str, progress: Progress, say: Say) -> tuple[ImageSet | None, ImageSet]:
    """Images to fit a probe on (None where there are no labels for it, or all are the same) and images to test on."""
    source = open_source(data, run.image_shape[-1])
    loaded = [source.load(split, progress, say) for split in source.splits]
    sets = [replace(one, images=in_channels(run, one.images)[0]) for one in loaded]
    for one in sets:
        run.check(one.images)
    labels = sets[0].labels
    if len(sets) == 2 and labels is not None and len(torch.unique(labels)) > 1 and sets[1].labels is not None:
        own = same_source(data, run.config.data) and run.config.images is not None
        return subset(sets[0], run.config.images or len(sets[0])) if own else sets[0], sets[1]
    return None, ImageSet(sets[-1].images[:UNLABELLED])


def _costs(
    unpruned: nn.Module, masked: nn.Module, masks: Masks, prunable: Mapping[str, Tensor], batch: Tensor
) -> dict[str, Any]:
    """Sparsity by layer, bytes and speed of the encoder before and after."""
    smaller = compact(masked, encoder_masks(masks))
    removed = numbers(smaller) < numbers(masked)
    layers = []
    for name, weight in prunable.items():
        gone = int((~masks[name]).sum()) if name in masks else 0
        layers.append({"layer": name, "weights": weight.numel(), "pruned": gone, "sparsity": gone / weight.numel()})
    # Where nothing is removed the arithmetic is the same: two timings would differ by the machine's noise alone.
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
    """How many numbers a module's parameters hold."""
    return sum(parameter.numel() for parameter in module.parameters())


def stored_bytes(module: nn.Module, compressed: bool = False) -> int:
    """Bytes of a module's tensors, as they are or after zlib."""
    values = [tensor.detach().cpu().contiguous().reshape(-1) for tensor in module.state_dict().values()]
    if not compressed:
        return sum(value.numel() * value.element_size() for value in values)
    packer = zlib.compressobj()
    return sum(len(packer.compress(value.view(torch.uint8).numpy().data)) for value in values) + len(packer.flush())


@torch.inference_mode()
def images_per_second(encoders: list[nn.Module], images: Tensor) -> list[float]:
    """Images a second of each encoder: the best of some passes, taken in turns so that all meet the same machine."""
    best = [float("inf")] * len(encoders)
    for _ in range(REPEATS + 1):  # the first one also pays for start-up
        for i, encoder in enumerate(encoders):
            batch = images.to(next(encoder.parameters()).device)
            begun = time.perf_counter()
            encoder(batch).cpu()
            best[i] = min(best[i], time.perf_counter() - begun)
    return [len(images) / seconds for seconds in best]
