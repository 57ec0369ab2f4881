"""Make a study: train the runs it names, measure them, write rows as JSON and CSV, and the figure.

Runs are trained once, named by a hash of their config, and shared by all studies of a scale. What exists is not made
again, and interrupted training resumes: a study can be stopped at any time and repeated.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import pkgutil
import shlex
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from matplotlib.figure import Figure

import byov.studies.beyond
import byov.studies.paper
from byov._core.callbacks import Say
from byov._core.errors import BadInput, TrainingFailed
from byov._core.files import read_json, write_atomically, write_json, write_text
from byov._core.lock import Lock
from byov.config import BAYESIAN, NOT_IDENTITY, Config, flatten, merge, read_recipe, to_dict, to_yaml
from byov.data import fetch
from byov.data.sources import open_source
from byov.evaluation.measures import strict
from byov.evaluation.probe import plain_name
from byov.inference.run import Run, load, shared_trunks
from byov.runs.folder import RunFolder
from byov.studies.framework.claims import Row, Rows
from byov.studies.framework.replicates import REPLICATES
from byov.studies.framework.workers import Task, cores_each, run_in_parallel
from byov.studies.measurements.learned import METHODS, SETTINGS, compare_with_rivals
from byov.training.prepare import plan
from byov.training.resolve import cores


@dataclass(frozen=True)
class Scale:
    """The size at which a study is made."""

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
    folder_recipe: str | None = None
    """The recipe for a folder of photos, all of which are trained on; unset: as for other sources."""


SCALES = {
    "micro": Scale("digits", "digits", None, 1, 20, "minutes on 2 cores"),
    "fashion": Scale("fashion", "fashion_mnist", 10_000, 3, 20, "hours on 2 cores"),
    "mini": Scale("small-images", "cifar10", 10_000, 3, 20, "hours on 2 cores", epochs=10),
    "adapted": Scale(
        "adapt-small", "cifar10", 10_000, 3, 20, "hours on 2 cores: docs/studies.md", folder_recipe="adapt-photos"
    ),
    "paper": Scale("imagenet-vit-b16-byov", "folder:imagenet", None, 3, 50, "weeks on a cluster"),
}
VIEWS, TRUNKS = "views", "trunks"  # folders of what runs with the same frozen stages share; both may be deleted
OOD_SOURCES = {  # out of distribution for what is trained on; all work offline once fetched
    "digits": ("fashion_mnist", "cifar10"),
    "cifar10": ("fashion_mnist", "mnist", "digits"),
    "fashion_mnist": ("mnist", "digits", "cifar10"),
}

# Settings added after the first studies: at their defaults they do not enter the hash, so older runs keep their names.
ADDED_LATER = {
    k: v
    for k, v in flatten(to_dict(Config())).items()
    if k in ("posterior.scale", "model.weight_init", "optim.variances") or k.startswith("objective.")
}


def decisive(config: Config) -> dict[str, Any]:
    """Return the settings that decide what a run learns, by dotted key (deterministic runs: none of the posterior)."""
    flat = {k: v for k, v in flatten(to_dict(config)).items() if k.split(".")[0] not in NOT_IDENTITY}
    if config.method not in BAYESIAN:
        flat = {
            k: v
            for k, v in flat.items()
            if not k.startswith(("posterior.", "optim.log_variance_lr", "optim.variances"))
        }
    return {k: v for k, v in flat.items() if k not in ADDED_LATER or v != ADDED_LATER[k]}


def identity(config: Config) -> str:
    """Hash all settings that decide what a run learns."""
    return hashlib.sha256(json.dumps(decisive(config), sort_keys=True).encode()).hexdigest()[:12]


class Lab:
    """The runs of one scale, in a folder.

    Args:
        folder: Holds all studies; runs are in `folder/runs/HASH`.
        scale: A name of SCALES.
        seeds: Unset: the scale's.
        data: Another source than the scale's, with images of the same side or for the same recipe.
        jobs: Runs trained at the same time, each on its share of the cores. Unset: one per core, up to 4; one on a GPU.
            (2 cores, recipe of small images: 380 images/s with two runs of one thread, 241 with one run of two.)
        launch: The command that starts a run, before `train ...`; unset: this Python, `-m byov`.
        say: Receives progress messages.
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
            if data.startswith("folder:") and self.scale.folder_recipe is not None:
                self.scale = replace(self.scale, recipe=self.scale.folder_recipe, images=None)
        if "train" not in open_source(self.scale.data).splits:
            raise BadInput(f"{self.scale.data} has no images to train on: give a --data that has.")
        fetch.check([self.scale.data])
        self.seeds = seeds or self.scale.seeds

    def command(self, study: str) -> list[str]:
        """Return the command that makes one study with the same settings."""
        scale, data = self._given
        options = ["--scale", scale, "--seeds", str(self.seeds), "--jobs", str(self.jobs), "--out", str(self.folder)]
        options += [] if data is None else ["--data", data]
        options += ["--launch", shlex.join(self.launch)]
        return [sys.executable, "-m", "byov", "study", study, *options]

    # --------------------------------------------------------------------------------------------- configs and sources

    def config(self, method: str, seed: int = 0, changes: dict[str, Any] | None = None) -> Config:
        """Return the scale's recipe for a method, with changes by dotted key."""
        config = replace(
            read_recipe(self.scale.recipe, method), data=self.scale.data, images=self.scale.images, seed=seed
        )
        tree: dict[str, Any] = {}
        epochs = {} if self.scale.epochs is None else {"optim.epochs": self.scale.epochs}
        for key, value in (epochs | (changes or {})).items():
            *sections, last = key.split(".")
            branch = tree
            for section in sections:
                branch = branch.setdefault(section, {})
            branch[last] = value
        return merge(config, tree, "the study")

    def configs(self, *methods: str) -> list[Config]:
        """Return the scale's recipe for each method, for every seed."""
        return [self.config(method, seed) for seed in range(self.seeds) for method in methods]

    def available(self, sources: Iterable[str]) -> list[str]:
        """Return the sources that work without a network; the others are skipped with a message."""
        here = []
        for name in sources:
            if name in fetch.PUBLISHED and not fetch.is_there(name):
                self.say(f"{name} is skipped: it is not on this machine; `byov data get {name}` fetches it.")
            else:
                here.append(name)
        return here

    def ood_sources(self) -> list[str]:
        """Return the available sources that are out of distribution for this scale's data."""
        return self.available(OOD_SOURCES.get(self.scale.data, ()))

    def path(self, config: Config) -> Path:
        return self.folder / "runs" / identity(config)

    def place(self, study: str) -> Path:
        """Return the folder of a study's results."""
        return self.folder / study / self.name

    # -------------------------------------------------------------------------------------------------------- training

    def is_trained(self, config: Config) -> bool:
        return RunFolder(self.path(config)).summary.is_file()

    def train(self, configs: Iterable[Config]) -> None:
        """Train what is missing, `jobs` at a time."""
        missing = [config for config in {identity(c): c for c in configs}.values() if not self.is_trained(config)]
        if not missing:
            return
        self.say(f"{len(missing)} runs to train, {self.jobs} at a time; they are saved in {self.folder / 'runs'}")
        begun = time.monotonic()
        failed = []
        tasks = [self._training(config) for config in missing]
        for done, (_, worker) in enumerate(run_in_parallel(tasks, self.jobs), 1):
            if worker.code:
                failed.append(f"a run of the study failed ({worker.last_line}); see {worker.log}.")
                self.say(f"  {failed[-1]}")
            left = (time.monotonic() - begun) / done * (len(missing) - done) / 60
            self.say(f"  {done - len(failed)} of {len(missing)} runs are trained; about {left:.0f} minutes remain")
        if failed:  # after the others have finished
            raise TrainingFailed(failed[0])

    def _training(self, config: Config) -> Task:
        """One `byov train`, from its start or resumed."""
        out = self.path(config)
        recipe = out.with_suffix(".yaml")
        write_text(recipe, to_yaml(replace(config, threads=None)))
        what = ["--resume"] if RunFolder(out).config.is_file() else [str(recipe)]
        command = [*self.launch, "train", *what, "--out", str(out), "--threads", str(cores_each(self.jobs))]
        if config.views.cached:  # runs of a seed differ in what they learn, not in their views
            command += ["--view-caches", str(self.folder / VIEWS)]
        return Task(command, out.with_suffix(".log"))

    def run(self, config: Config) -> Run:
        """Load a run, trained if need be."""
        if not self.is_trained(config):
            self.train([config])
        return load(self.path(config))

    # ------------------------------------------------------------------------------------------------------- measuring

    def measured(
        self, what: str, config: Config, measure: Callable[[Run], dict[str, Any]], settings: dict[str, Any]
    ) -> dict[str, Any]:
        """Return what `measure` finds for a run (None where not finite), cached in its folder as `results/WHAT.json`.

        `settings` hold everything but the run that decides the numbers; with other settings they are measured again.
        """
        path = RunFolder(self.path(config)).results / f"{what}.json"
        try:
            cached = read_json(path)
        except (OSError, ValueError):  # missing or damaged
            cached = {}
        if cached.get("settings") == json.loads(json.dumps(settings)):
            return cached
        found = strict({**measure(self.run(config)), "settings": settings})
        write_json(path, found)
        return found

    def measured_rows(
        self,
        what: str,
        config: Config,
        measure: Callable[..., Iterable[Row]],
        settings: dict[str, Any],
        baseline: Config | None = None,
    ) -> Rows:
        """Do the same for rows, each with the run's seed; `measure` also takes the baseline's run, if one is given."""
        known = settings if baseline is None else settings | {"baseline": identity(baseline)}

        def rows(run: Run) -> dict[str, Any]:
            return {"rows": list(measure(run) if baseline is None else measure(run, self.run(baseline)))}

        return [{"seed": config.seed, **row} for row in self.measured(what, config, rows, known)["rows"]]

    def learned(self, configs: Sequence[Config]) -> Rows:
        """Return rows that show whether the first arm of BYOV and of BYOL has learned, for every seed."""
        first = {(c.method, c.seed): c for c in reversed(configs) if c.method in METHODS}
        found = []
        for (method, seed), config in sorted(first.items(), key=lambda item: item[0]):
            row = self.measured("learned", config, partial(compare_with_rivals, say=self.say), SETTINGS)
            found.append({"method": method, "seed": seed, **{key: row[key] for key in row if key != "settings"}})
        return found


# ------------------------------------------------------------------------------------------------------ making a study

PACKAGES = (byov.studies.paper, byov.studies.beyond)  # every module of theirs is a study


class Study(Protocol):
    """What a module must have to be a study."""

    TITLE: str

    def runs(self, lab: Lab) -> list[Config]: ...
    def results(self, lab: Lab) -> Rows: ...
    def draw(self, rows: Rows, scale: str) -> Figure: ...


def names() -> list[str]:
    """List all studies, by their files' names."""
    return sorted(_modules())


def find(name: str) -> Study:
    if name not in names():
        raise BadInput(f"there is no study {name!r}: use one of {', '.join(names())}, or all.")
    return cast(Study, import_module(_modules()[name]))


def _modules() -> dict[str, str]:
    """The module of every study, by the study's name."""
    return {
        module.name.replace("_", "-"): f"{package.__name__}.{module.name}"
        for package in PACKAGES
        for module in pkgutil.iter_modules(package.__path__)
    }


def make_all(lab: Lab) -> Iterator[tuple[str, str | None]]:
    """Make all studies, as many at a time as runs are trained; yield each one's name, and why it failed if it did.

    The runs of all studies are trained first, together, so that no core waits for the last run of a study. Studies that
    will train more (`TRAINS_MORE`) start first, since they take longest.
    """
    configs: list[Config] = []
    order: list[str] = []
    for name in sorted(names(), key=lambda name: not getattr(find(name), "TRAINS_MORE", False)):
        try:
            configs += find(name).runs(lab)
            order.append(name)
        except BadInput as error:
            yield name, str(error)
    with suppress(TrainingFailed):  # reported already; only the studies that need the run try it again and fail
        lab.train(configs)
    lab.say(f"{len(order)} studies to make, {lab.jobs} at a time; {lab.place('STUDY')}/log has their output")
    tasks = [Task(lab.command(name), lab.place(name) / "log") for name in order]
    for index, worker in run_in_parallel(tasks, lab.jobs):
        yield order[index], worker.last_line if worker.code else None


def estimate_study(lab: Lab) -> str:
    """Estimate what a run of the scale's recipe takes; a study trains one per arm and seed, `jobs` at a time."""
    found = plan(lab.config("byov"))
    return f"per run (a study trains one per arm and seed, {lab.jobs} at a time): {found}"


def make(name: str, lab: Lab) -> Path:
    """Make one study and return its folder. Existing results are overwritten: they follow from runs, which are not."""
    study = find(name)
    lock = Lock(lab.place(name) / ".lock", lab.place(name))
    lab.say(f"{name}: {study.TITLE} ({lab.name}: {lab.scale.time})")
    configs = study.runs(lab)
    lab.train(configs)
    with shared_trunks(lab.folder / TRUNKS):
        rows, learned = study.results(lab), lab.learned(configs)
    folder = lab.place(name)
    settings = {
        "study": name,
        "scale": lab.name,
        "seeds": lab.seeds,
        "data": lab.scale.data,
        "images": lab.scale.images,
    }
    write_json(folder / f"{name}.json", {"settings": settings, "learned": learned, "rows": rows})
    write_text(folder / f"{name}.csv", _csv(rows))
    if table := getattr(study, "table", None):
        write_text(folder / f"{name}.md", table(rows))
    figure = study.draw(rows, lab.name)
    for suffix in ("png", "svg"):
        path = folder / f"{name}.{suffix}"
        write_atomically(path, lambda temporary, suffix=suffix: figure.savefig(temporary, format=suffix, dpi=200))  # type: ignore[misc]
    lock.release()
    return folder


def _csv(rows: Rows) -> str:
    columns = list(dict.fromkeys(key for row in rows for key in row if not key.endswith(REPLICATES)))
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n", extrasaction="ignore")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()
