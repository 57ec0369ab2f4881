"""Where studies find their runs: trained once, named by a hash of their config, shared by all studies of a scale.

What is there is not made again, and what was stopped goes on: a study can be ended at any time and repeated.
"""

from __future__ import annotations

import hashlib
import json
import shlex
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from byov._core.errors import BadInput, TrainingFailed
from byov._core.files import write_json, write_text
from byov.config import BAYESIAN, NOT_IDENTITY, Config, flatten, merge, read_recipe, to_dict, to_yaml
from byov.data import fetch
from byov.data.sources import open_source
from byov.evaluation.named_metrics import strict
from byov.evaluation.ood import plain_name
from byov.inference.load import Run, load
from byov.runs.folder import RunFolder
from byov.studies.framework.workers import Order, share, side_by_side
from byov.studies.measurements.predictions import Outcomes, outcomes, read_outcomes, write_outcomes
from byov.training.resolve import cores

Say = Callable[[str], None]


@dataclass(frozen=True)
class Scale:
    """How large a study is made."""

    recipe: str
    data: str
    images: int | None
    """Training images; unset: all."""
    seeds: int
    draws: int
    """Weight draws of an evaluation."""
    time: str
    """What to expect, for the user."""
    epochs: int | None = None
    """Passes over the training images; unset: the recipe's."""


SCALES = {
    "micro": Scale("digits", "digits", None, 1, 20, "minutes on 2 cores"),
    "fashion": Scale("fashion", "fashion_mnist", 10_000, 3, 20, "hours on 2 cores"),
    "mini": Scale("small-images", "cifar10", 10_000, 3, 20, "hours on 2 cores", epochs=10),
    "paper": Scale("imagenet-vit-b16-byov", "folder:imagenet", None, 3, 50, "weeks on a cluster"),
}


# Settings that came after the first studies: at their defaults they are no part of a name, so that runs keep theirs.
YOUNGER = {k: v for k, v in flatten(to_dict(Config())).items() if k == "posterior.scale" or k.startswith("objective.")}


def decisive(config: Config) -> dict[str, Any]:
    """All settings that decide what a run learns, by dotted key: without random weights, none of the posterior."""
    flat = {k: v for k, v in flatten(to_dict(config)).items() if k.split(".")[0] not in NOT_IDENTITY}
    if config.method not in BAYESIAN:
        flat = {k: v for k, v in flat.items() if not k.startswith(("posterior.", "optim.log_variance_lr"))}
    return {k: v for k, v in flat.items() if k not in YOUNGER or v != YOUNGER[k]}


def identity(config: Config) -> str:
    """A hash of all that decides what a run learns."""
    return hashlib.sha256(json.dumps(decisive(config), sort_keys=True).encode()).hexdigest()[:12]


class Lab:
    """The runs of one scale, below a folder.

    Args:
        folder: of all studies; runs are in `folder/runs/HASH`.
        scale: a name of SCALES.
        seeds: unset: the scale's.
        data: another source than the scale's, of images of the same side or for the same recipe.
        jobs: runs trained at the same time, each on its share of the cores; unset: one a core, up to 4 (2 cores and
            the recipe of small images: 380 images/s with two of one thread each, 241 with one of two); on a GPU one.
        launch: how a run is started, before `train ...`; unset: this Python, `-m byov`.
        say: told what is being done.
    """

    def __init__(
        self,
        folder: Path,
        scale: str,
        seeds: int | None = None,
        data: str | None = None,
        jobs: int | None = None,
        launch: Sequence[str] = (),
        say: Say = print,
    ) -> None:
        if scale not in SCALES:
            raise BadInput(f"there is no scale {scale!r}: use one of {', '.join(SCALES)}.")
        if any(count is not None and count < 1 for count in (jobs, seeds)):
            raise BadInput("--jobs and --seeds must be at least 1.")
        self.folder, self.name, self.scale, self.say = folder, scale, SCALES[scale], say
        self._given = (scale, data)
        self.jobs = jobs or (1 if torch.cuda.is_available() else min(4, cores()))
        self.launch = launch or (sys.executable, "-m", "byov")
        if data is not None and data != self.scale.data:
            self.name, self.scale = f"{scale}-{plain_name(data)}", replace(self.scale, data=data)
        if "train" not in open_source(self.scale.data).splits:
            raise BadInput(f"{self.scale.data} has no images to train on: give a --data that has.")
        fetch.check([self.scale.data])
        self.seeds = seeds or self.scale.seeds

    def command(self, study: str) -> list[str]:
        """The command that makes one study in such a lab."""
        scale, data = self._given
        options = ["--scale", scale, "--seeds", str(self.seeds), "--jobs", str(self.jobs), "--out", str(self.folder)]
        options += [] if data is None else ["--data", data]
        options += ["--launch", shlex.join(self.launch)]
        return [sys.executable, "-m", "byov", "study", study, *options]

    # --------------------------------------------------------------------------------------------------------- configs

    def config(self, method: str, seed: int = 0, changes: dict[str, Any] | None = None) -> Config:
        """The scale's recipe for a method, with changes by dotted key."""
        config = replace(
            read_recipe(self.scale.recipe, method), data=self.scale.data, images=self.scale.images, seed=seed
        )
        tree: dict[str, Any] = {}
        longer = {} if self.scale.epochs is None else {"optim.epochs": self.scale.epochs}
        for key, value in (longer | (changes or {})).items():
            *sections, last = key.split(".")
            branch = tree
            for section in sections:
                branch = branch.setdefault(section, {})
            branch[last] = value
        return merge(config, tree, "the study")

    def configs(self, *methods: str) -> list[Config]:
        """The scale's recipe for each method, of every seed."""
        return [self.config(method, seed) for seed in range(self.seeds) for method in methods]

    def path(self, config: Config) -> Path:
        return self.folder / "runs" / identity(config)

    def place(self, study: str) -> Path:
        """Where a study's results go."""
        return self.folder / study / self.name

    # -------------------------------------------------------------------------------------------------------- training

    def is_trained(self, config: Config) -> bool:
        return RunFolder(self.path(config)).summary.is_file()

    def train(self, configs: Iterable[Config]) -> None:
        """Trains what is missing, `jobs` at a time."""
        missing = [config for config in {identity(c): c for c in configs}.values() if not self.is_trained(config)]
        if not missing:
            return
        self.say(f"{len(missing)} runs to train, {self.jobs} at a time; they are kept in {self.folder / 'runs'}")
        begun = time.monotonic()
        orders = [self._order(config) for config in missing]
        failed = []
        for done, (_, child) in enumerate(side_by_side(orders, self.jobs), 1):
            if child.code:
                failed.append(f"a run of the study failed ({child.last_words}); {child.log} tells more.")
                self.say(f"  {failed[-1]}")
            left = (time.monotonic() - begun) / done * (len(missing) - done) / 60
            trained = f"{done - len(failed)} of {len(missing)} runs are trained"
            self.say(f"  {trained}; about {left:.0f} minutes for the others")
        if failed:  # the others are there now
            raise TrainingFailed(failed[0])

    def _order(self, config: Config) -> Order:
        """One `byov train`, from its start or from where it was stopped."""
        out = self.path(config)
        recipe = out.with_suffix(".yaml")
        write_text(recipe, to_yaml(replace(config, threads=None)))
        what = ["--resume"] if RunFolder(out).config.is_file() else [str(recipe)]
        command = [*self.launch, "train", *what, "--out", str(out), "--threads", str(share(self.jobs))]
        return Order(command, out.with_suffix(".log"))

    def run(self, config: Config) -> Run:
        """A finished run, opened."""
        if not self.is_trained(config):
            self.train([config])
        return load(self.path(config))

    # ------------------------------------------------------------------------------------------------------- measuring

    def measured(
        self, what: str, config: Config, measure: Callable[[Run], dict[str, Any]], settings: dict[str, Any]
    ) -> dict[str, Any]:
        """What `measure` finds for a run (None where it is not finite), kept in its folder as `what` with its settings.

        `settings`: all that decides the numbers beside the run; under others they are measured anew.
        """
        path = RunFolder(self.path(config)).results / f"{what}.json"
        if path.is_file():
            kept: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            if kept["settings"] == json.loads(json.dumps(settings)):
                return kept
        found = strict({**measure(self.run(config)), "settings": settings})
        write_json(path, found)
        return found

    def outcomes(self, config: Config) -> Outcomes:
        """What a run says of every test image over the scale's draws."""
        draws = self.scale.draws
        return self.kept_outcomes("outcomes", config, lambda run: outcomes(run, draws), {"draws": draws})

    def kept_outcomes(
        self, what: str, config: Config, make: Callable[[Run], Outcomes], settings: dict[str, Any]
    ) -> Outcomes:
        """As `measured`, for what a run says of each of some images."""
        path = RunFolder(self.path(config)).results / f"{what}.safetensors"
        found = read_outcomes(path, settings)
        if found is None:
            found = make(self.run(config))
            write_outcomes(path, found, settings)
        return found
