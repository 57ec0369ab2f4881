"""Probe accuracy after ten minutes of training on CIFAR-10: byov's BYOL and BYOV, and lightly's BYOL, the same ViT.

    make bench-accuracy            (or: accuracy.py --minutes 10 --seeds 3 [--only byov-0] [--busy])

The ten minutes are converted to steps first, so that the result does not depend on other work on the machine. All three
are timed interleaved; each then trains as many steps as it makes in that time, with schedules of that length. A
finished run is a file in benchmarks/accuracy/ and is not repeated, unless the recipe has changed. The command resumes
if repeated.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn

from byol_step import LightlyBYOL
from byov import schedules
from byov.config import Config, read_recipe
from byov.data.images import ImageSet
from byov.data.sources import open_source
from byov.evaluation.probe import fit_probe
from byov.inference.run import features_of
from byov.metrics import ece, top_k_accuracy
from byov.studies.framework.lab import decisive
from byov.training.learners import build_learner
from byov.training.loop import Trainer, classes_of
from byov.training.prepare import pixel_statistics
from byov.training.resolve import resolve
from byov.training.step import training_step
from conductor import THREADS, Turn, Variant, interleave, steps_of, summary
from run import BUSY, machine
from views import Loader, Transformed, as_pil, lightly_transform

RECIPE, SIDE = "small-images", 32
METHODS = ("byov", "byol", "lightly")
WORKERS = (0, 1, 2)
ENDLESS = 1_000_000  # steps, where only their time is asked for
FOLDER = Path(__file__).parent / "accuracy"


class Training:
    """A method on CIFAR-10: its encoder, and its steps."""

    encoder: nn.Module
    step: Callable[[int, int], None]
    batch: int


def settings(method: str, seed: int, data: ImageSet, steps: int) -> Config:
    """The recipe for a run of this many steps, which end it instead of its epochs."""
    config = replace(read_recipe(RECIPE, "byov" if method == "byov" else "byol"), data="cifar10", seed=seed)
    optim = replace(config.optim, log_variance_lr=schedules.log_variance_rate(steps))
    return resolve(replace(config, calibration=0, optim=optim), (3, SIDE, SIDE), len(data), flips=True)


class Ours(Training):
    def __init__(self, method: str, seed: int, workers: int, steps: int) -> None:
        data = open_source("cifar10").load("train")
        config = settings(method, seed, data, steps)
        statistics = pixel_statistics(data.images)
        put = lambda network: network.encoder.set_pixel_statistics(*statistics)  # noqa: E731
        learner = build_learner(config, (3, SIDE, SIDE), classes_of(data), initialise=put)
        trainer = Trainer(config, Path(), learner, data)
        learner.posterior.train()
        self.batch = config.optim.batch_size

        def step(k: int, total: int) -> None:
            report = training_step(learner, trainer.optimizer, trainer.batches(k), config, k, total)
            assert report is not None, "the loss is not finite"

        self.step = step
        self.posterior = learner.posterior

    @property
    def encoder(self) -> nn.Module:  # type: ignore[override]
        return self.posterior.unwrapped().get_submodule("encoder")


class Lightly(Training):
    """lightly's documented loop, with byov's encoder, learning rates and weight decay."""

    def __init__(self, method: str, seed: int, workers: int, steps: int) -> None:
        data = open_source("cifar10").load("train")
        config = settings("byol", seed, data, steps)
        self.optim, self.batch = config.optim, config.optim.batch_size
        torch.manual_seed(seed)
        self.byol = LightlyBYOL(config.model)
        self.encoder = self.byol.encoder
        for encoder in (self.encoder, self.byol.teacher_encoder):
            encoder.set_pixel_statistics(*pixel_statistics(data.images))
        matrices = [p for p in self.byol.trained() if p.ndim > 1]
        others = [p for p in self.byol.trained() if p.ndim <= 1]
        groups = [{"params": matrices, "weight_decay": self.optim.weight_decay}, {"params": others, "weight_decay": 0}]
        self.optimizer = torch.optim.AdamW(groups, lr=0.0, betas=self.optim.betas, fused=True)
        self.images, self.transform = as_pil(data.images), lightly_transform(config.views, SIDE)
        self.loader = _loader(self.images, self.transform, self.batch, workers, seed)

    def step(self, k: int, total: int) -> None:  # type: ignore[override]
        self.train_on(next(self.loader), k, total)

    def train_on(self, views: list[Tensor], k: int, total: int) -> None:
        from lightly.utils.scheduler import cosine_schedule

        for group in self.optimizer.param_groups:
            group["lr"] = schedules.learning_rate(k / total, self.optim.lr, self.optim.warmup)
        self.byol.step(views, self.optimizer, cosine_schedule(k, total, self.optim.tau, 1))


def _loader(images: list[Image.Image], transform: Any, batch: int, workers: int, seed: int) -> Iterator[list[Tensor]]:
    """Endless batches, epoch after epoch, by torch's DataLoader."""
    from torch.utils.data import DataLoader

    more = {"persistent_workers": True, "multiprocessing_context": "fork"} if workers else {}
    order = torch.Generator().manual_seed(seed)
    data = Transformed(images, transform)
    loader = DataLoader(data, batch, shuffle=True, drop_last=True, num_workers=workers, generator=order, **more)
    while True:
        yield from loader


def build(method: str, seed: int, workers: int, steps: int) -> Training:
    return (Lightly if method == "lightly" else Ours)(method, seed, workers, steps)


# ------------------------------------------------------------------------------------------------- ten minutes of steps


def timed(method: str, workers: int = 0) -> Turn:
    """For the conductor. lightly's loader may work only in its own turn (see `views.Loader`)."""
    training = build(method, 0, workers, ENDLESS)
    if isinstance(training, Lightly):
        loader = Loader(training.images, training.transform, workers, training.batch)
        return loader.turn(lambda views: training.train_on(views, 0, ENDLESS))
    return steps_of(lambda k: training.step(k, ENDLESS))


def rates(rounds: int, steps: int) -> dict[str, Any]:
    """Seconds per step of every method, timed interleaved; lightly's with the best number of workers."""

    def variant(method: str, workers: int = 0) -> Variant:
        return Variant(method, "accuracy", "timed", {"method": method, "workers": workers})

    candidates = [variant("lightly", workers)._replace(name=f"{workers} workers") for workers in WORKERS]
    tried = {name: min(times) for name, times in interleave(candidates, 2, steps).items()}
    best = min(candidates, key=lambda candidate: tried[candidate.name])
    times = interleave([variant("byov"), variant("byol"), best._replace(name="lightly")], rounds, steps)
    return {
        "date": datetime.date.today().isoformat(),
        "threads": THREADS,
        "busy": BUSY.items() <= os.environ.items(),
        "versions": machine()["versions"],
        "seconds": {method: summary(times[method]).median for method in METHODS},
        "lightly_candidates": tried,
        "lightly_workers": best.arguments["workers"],
    }


# ------------------------------------------------------------------------------------------------------------- a result


def train(method: str, seed: int, steps: int, workers: int) -> dict[str, Any]:
    training = build(method, seed, workers, steps)
    begun = told = time.monotonic()
    for k in range(steps):
        training.step(k, steps)
        if time.monotonic() - told > 60:
            told = time.monotonic()
            print(f"{method}, seed {seed}: step {k + 1} of {steps}", flush=True)
    seconds = time.monotonic() - begun
    measured = probed(training.encoder)
    images = steps * training.batch
    return {"method": method, "seed": seed, "steps": steps, "images": images, "wall_seconds": seconds, **measured}


def probed(encoder: nn.Module) -> dict[str, float]:
    source = open_source("cifar10")
    train, test = source.load("train"), source.load("test")
    assert train.labels is not None and test.labels is not None
    probe = fit_probe(features_of(encoder, train.images), train.labels)
    probabilities = probe.probabilities(features_of(encoder, test.images))
    return {"top1": top_k_accuracy(probabilities, test.labels, 1), "ece": ece(probabilities, test.labels)}


def options_of(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", help="METHOD-SEED: this run alone")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--folder", type=Path, default=FOLDER)
    parser.add_argument("--busy", action="store_true", help="others use the machine too: waiting threads sleep")
    return parser.parse_args(arguments)


def main() -> None:
    options = options_of()
    if options.busy and not BUSY.items() <= os.environ.items():
        os.environ |= BUSY
        os.execv(sys.executable, sys.orig_argv)  # from the start: OpenMP reads it when torch is imported
    torch.set_num_threads(options.threads)
    options.folder.mkdir(parents=True, exist_ok=True)
    timing = options.folder / "rates.json"
    if not timing.exists():
        timing.write_text(json.dumps(rates(rounds=6, steps=8), indent=2) + "\n")
    measured, data = json.loads(timing.read_text()), open_source("cifar10").load("train")
    for seed in range(options.seeds):
        for method in METHODS:
            name = f"{method}-{seed}"
            path = options.folder / f"{name}.json"
            steps = round(60 * options.minutes / measured["seconds"][method])
            chosen = decisive(settings(method, seed, data, steps))
            old = json.loads(path.read_text()) if path.exists() else {}
            kept = old.get("settings") == chosen and old.get("steps") == steps
            if kept or options.only not in (None, name):
                continue
            result = train(method, seed, steps, measured["lightly_workers"])
            result |= {"minutes": options.minutes, "settings": chosen}
            path.write_text(json.dumps(result, indent=2) + "\n")
            print(result, flush=True)


if __name__ == "__main__":
    main()
