"""`byov evaluate`: measure a run on a source with labels, section by section, as flat keys in one JSON.

`_Evaluation` has one method per section, in the order of the results; measures.py has what each computes.
docs/reference/evaluation-keys.md explains the keys.

Under torchrun or srun every process runs this code. They share the draws (predictive.py); everything else each computes
for itself, except fine-tuning. Only the first writes files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from byov import __version__
from byov._core.cache import Cache, Entry, digest, read_entry, write_entry
from byov._core.callbacks import Progress, Say, say_on_stderr
from byov._core.errors import BadInput
from byov._core.files import read_json, remove_abandoned, without_prefix, write_json
from byov._core.lock import Lock, beside
from byov.config import absolute_source, same_source
from byov.data.images import ImageSet
from byov.data.shifts import SEVERITIES
from byov.evaluation.agreement import DRAWS, align
from byov.evaluation.baseline import differences, intervals, without_draws
from byov.evaluation.finetune import finetune_measures, finetuning
from byov.evaluation.measures import (
    HELD_OUT,
    KNN_K,
    KNN_TEMPERATURE,
    OOD_IMAGES,
    Measures,
    Section,
    check_sources,
    draws_section,
    label_lists,
    level_measures,
    ood_images,
    ood_source_measures,
    probe_measures,
    semi_measures,
    shift_measures,
    shift_names,
    shift_settings,
    strict,
    uncertainty_section,
)
from byov.evaluation.predictive import Drawn, below, pass_draws
from byov.evaluation.probe import Labelled, Subject, load_labelled, of_source, plain_name
from byov.inference.run import ReferenceSet, Run, load
from byov.runs import checkpoints
from byov.runs.folder import RunFolder

PIXELS = (
    32  # side of the raw pixels that are probed, at most: at 64, 12,288 numbers per image would take minutes to fit
)


@dataclass(frozen=True)
class Wanted:
    """What is measured in addition to the probe at the means."""

    draws: int = 0
    """Weight draws of the posterior predictive."""
    shifts: bool = False
    ood: tuple[str, ...] = ()
    """Sources of out-of-distribution images."""
    semi: bool = False
    finetune: bool = False
    teacher: bool = False
    """The teacher's encoder instead of the student's."""


def evaluate(
    run: Run,
    data: str | None = None,
    *,
    draws: int = 0,
    shifts: bool = False,
    ood: Sequence[str] = (),
    semi: bool = False,
    finetune: bool = False,
    teacher: bool = False,
    baseline: Path | None = None,
    supervised: Sequence[Run] = (),
    progress: Progress = lambda what, done, total: None,
    say: Say = say_on_stderr,
) -> Measures:
    """Measure a run on a source with labels (its own by default) and write `results/evaluation.json`.

    `evaluation.safetensors` next to it has the rows of each test image. Stopped work resumes in the next call with the
    same settings. `supervised`: one or two supervised-bbb runs on the same data to compare with (`align`).
    """
    wanted = Wanted(draws, shifts, tuple(ood), semi, finetune, teacher)
    data = absolute_source(data or run.config.data)
    with run.processes.one_voice():
        lock = _locked(results_path(run, data, teacher)) if run.processes.main else None
        other = None if baseline is None else _other_run(run, baseline)
        if other is not None and teacher:
            other.teacher_encoder()  # raises if there is none: before the work
    try:
        return _evaluate(run, data, wanted, other, progress, say, supervised)
    finally:
        if lock is not None:
            lock.release()


def _locked(results: Path) -> Lock:
    """Lock an evaluation's results, and remove what a killed one left next to them."""
    lock = Lock(beside(results), results)
    remove_abandoned(results.parent.rglob(".*.tmp"))
    return lock


def _evaluate(
    run: Run,
    data: str,
    wanted: Wanted,
    other: Run | None,
    progress: Progress,
    say: Say,
    supervised: Sequence[Run] = (),
) -> Measures:
    processes = run.processes
    with processes.one_voice():
        wanted = _possible(run, wanted, say)
        check_sources(wanted.ood, run.image_shape[-1])
    labelled = processes.first_then_others(lambda: load_labelled(run, data, progress, say))
    reference = processes.first_then_others(lambda: _reference(run, wanted, say))
    evaluation = _Evaluation(run, labelled, reference, wanted, progress, say)
    results, rows = evaluation.all()
    if supervised:
        results |= evaluation.aligned_with(supervised)
    images = Entry(rows, {"images": fingerprint(labelled.test)})
    if other is not None:
        results |= _compared(other, data, wanted, results, images, progress, say)
    results = strict(results)
    if processes.main:
        path = results_path(run, data, wanted.teacher)
        keep_previous(path, results)
        write_entry(path.with_suffix(".safetensors"), images)
        write_json(path, results)
        evaluation.cache.clear()
    return results


def _possible(run: Run, wanted: Wanted, say: Say) -> Wanted:
    """What this run allows. Draws of a deterministic run are skipped, so that one command serves BYOV and BYOL."""
    if wanted.draws < 0:
        raise BadInput(f"draws={wanted.draws}: give at least 1, or 0 for none.")
    if wanted.teacher and (wanted.draws or wanted.finetune):
        raise BadInput("the teacher has no posterior to draw from, and is not fine-tuned: leave out --teacher.")
    if wanted.draws and run.deterministic:
        say(f"{run.folder} has nothing random: its results are those at the means, without draws.")
        return replace(wanted, draws=0)
    return wanted


def _reference(run: Run, wanted: Wanted, say: Say) -> ReferenceSet | None:
    """The student's reference set; None for the teacher, and where its images are gone and no draws are wanted."""
    if wanted.teacher:
        return None
    try:
        reference = ReferenceSet(run)
        reference.means  # noqa: B018 (both raise if the images are gone, and not cached)
        reference.own(torch.zeros(1, *run.image_shape, dtype=torch.uint8))
    except BadInput as error:
        if wanted.draws:
            raise
        say(f"no label-free scores: {error}")
        return None
    return reference


# ------------------------------------------------------------------------------------------------------------- sections


class _Evaluation:
    """One evaluation: a method per section. Finished sections are cached until the results are written."""

    def __init__(
        self, run: Run, data: Labelled, reference: ReferenceSet | None, wanted: Wanted, progress: Progress, say: Say
    ) -> None:
        self.run, self.data, self.wanted = run, data, wanted
        self.progress, self.say = progress, say
        encoder: nn.Module = run.teacher_encoder() if wanted.teacher else run.encoder
        self.own = self._subject(encoder, run.image_shape[-1], str(run.folder), reference)
        self.weights = weights_digest(run)
        known = None if reference is None else reference.folder.name  # a digest
        seen = [data.name, fingerprint(data.train), fingerprint(data.test)]
        identity = [__version__, self.weights, run.step, wanted.teacher, known, *seen]
        self.cache = Cache(RunFolder(run.folder).results / "partial", identity)
        self.predictions: Drawn | None = None  # over draws, if made in this call
        self.rows: dict[str, Tensor] = {}  # of the test images

    def all(self) -> tuple[Measures, dict[str, Tensor]]:
        """Every section that is wanted: the measures with their settings, and the rows of the test images."""
        wanted = self.wanted
        results = self._at_means()
        if wanted.draws:
            results |= self._draws() | self._levels()
        for spec in wanted.ood:
            results |= self._ood(spec)
        if wanted.shifts:
            results |= self._shifts()
        if wanted.finetune:
            results |= self._finetuned("", self.own) | self._finetuned("untrained.", self.untrained)
        return results | {"settings": self._settings()}, self.rows

    def _at_means(self) -> Measures:
        """The run at its means; `untrained.*` and `pixels.*`: the untrained encoder and raw pixels, to compare with."""
        pixels = self._subject(nn.Flatten(), min(self.own.side, PIXELS), "raw pixels")
        results: Measures = {}
        for name, subject in (("means", self.own), ("untrained", self.untrained), ("pixels", pixels)):
            found = self._section(f"{name}-probe", None, partial(probe_measures, subject))
            if subject is self.own:
                found |= self._section("uncertainty", None, partial(uncertainty_section, subject))
            if self.wanted.semi:
                found |= self._section(f"{name}-semi", None, partial(semi_measures, subject))
            results |= found if subject is self.own else below(f"{name}.", found)
        return results | {"median_sigma": median_sigma(self.run)}

    def _draws(self) -> Measures:
        """`draws.*`, `draws_unaligned.*`, and what the label-free scores over draws are worth."""

        def make() -> Section:
            self.predictions = pass_draws(self.own, self.own.test_images, self.wanted.draws, "draws")
            return draws_section(self.own, self.predictions)

        return self._section("draws", self.wanted.draws, make)

    def _levels(self) -> Measures:
        """`levels.*`: variance over draws after the encoder, the projector and the predictor."""
        draws = self.wanted.draws
        return self._section("levels", draws, partial(level_measures, self.own, draws))

    def _ood(self, spec: str) -> Measures:
        """`ood.NAME.*`: images of another source against the test images."""
        draws, images = self.wanted.draws, ood_images(self.own, spec, self.say)
        inside = without_prefix(self.rows, "score.")
        make = partial(ood_source_measures, self.own, spec, images, draws, inside)
        return self._section(f"ood-{plain_name(spec)}", [draws, spec, digest(images)], make)

    def _shifts(self) -> Measures:
        """`shifts.*`, one section per shift."""
        names, draws = shift_names(self.own), self.wanted.draws
        results: Measures = {}

        def advance(name: str, severity: int) -> None:
            done = names.index(name) * len(SEVERITIES) + severity
            self.progress(f"{len(names)} shifts, {len(SEVERITIES)} severities", done, len(names) * len(SEVERITIES))

        for name in names:
            make = partial(shift_measures, self.own, name, draws, partial(advance, name))
            results |= self._section(f"shift-{name}", shift_settings(self.own, draws), make)
        return results

    def _finetuned(self, prefix: str, subject: Subject) -> Measures:
        """`finetune.*`, by the first process alone: it trains, in a folder next to the cached section."""
        name, settings = f"{prefix}finetune", finetuning(len(self.data.train))
        folder = self.cache.path(name, settings).with_suffix("")

        def make() -> Measures:
            return self.run.processes.from_first(lambda: finetune_measures(subject, folder, self.say))

        return below(prefix, self._section(name, settings, make))

    def aligned_with(self, supervised: Sequence[Run]) -> Measures:
        """`align.*`: the numbers of `alignment.json`, which also has what its figure shows."""
        found = align(
            self.run,
            supervised[0],
            supervised[1] if len(supervised) > 1 else None,
            data=self.data.name,
            draws=self.wanted.draws or DRAWS,
            predictions=self.predictions,
            progress=self.progress,
            say=self.say,
        )
        return below(
            "align.", {k: v for k, v in found.items() if isinstance(v, int | float) or k.endswith("_interval")}
        )

    def _section(self, name: str, settings: Any, make: Callable[[], Section | Measures]) -> Measures:
        """A section's measures, cached or made; its rows are added to those of the test images.

        The first process decides whether it is cached: a section may need all of them.
        """
        processes = self.run.processes
        entry = processes.from_first(lambda: self.cache.read(name, settings))
        if entry is None:
            made = make()
            section = made if isinstance(made, Section) else Section(made)
            entry = Entry(
                {row: values.detach().cpu().double() for row, values in section.rows.items()}, section.measures
            )
            entry = entry._replace(header=strict(entry.header))
            if processes.main:
                self.cache.write(name, entry, settings)
        self.rows |= entry.tensors
        return dict(entry.header)

    # ------------------------------------------------------------------------------------------------------- settings

    def _settings(self) -> dict[str, Any]:
        """What the results were made with."""
        run, data, wanted = self.run, self.data, self.wanted
        settings: dict[str, Any] = {
            "byov": __version__,
            "run": str(run.folder),
            "step": run.step,
            "weights": self.weights,
            "data": data.name,
            "train_images": len(data.train),
            "test_images": len(data.test),
            "channels": data.converted or "as they are",
            "encoder": "teacher" if wanted.teacher else "student at its means",
            "probe": "multinomial logistic regression; L2 by NLL on a held-out fifth, one-standard-error rule",
            "knn": {"k": KNN_K, "temperature": KNN_TEMPERATURE},
            "temperature": f"fitted on one training image in {HELD_OUT} of each class, for a probe on the others",
            "draws": wanted.draws,
        }
        if wanted.ood:
            settings["ood"] = {"sources": list(wanted.ood), "images_at_most": OOD_IMAGES}
        if wanted.shifts:
            settings["shifts"] = shift_settings(self.own, wanted.draws)
        if wanted.semi:
            settings["semi"] = {"labels": self._write_lists().name}
        if wanted.finetune:
            settings["finetune"] = finetuning(len(data.train))
        return settings

    def _write_lists(self) -> Path:
        """Write the images whose labels are known, as indices into the source's training images."""
        data = self.data
        path = results_path(self.run, data.name, self.wanted.teacher)
        path = path.with_name(f"{path.stem}-labels.json")
        lists = label_lists(data.train_labels).items()
        chosen = {f"{percent}%": data.train_ids[images].tolist() for percent, images in lists}
        if self.run.processes.main:
            write_json(path, {"source": data.name, "split": "train", **chosen})
        return path

    @cached_property
    def untrained(self) -> Subject:
        """The same encoder with its initial random weights."""
        return self._subject(self.run.untrained_encoder(), self.own.side, "untrained encoder")

    def _subject(self, encoder: nn.Module, side: int, name: str, reference: ReferenceSet | None = None) -> Subject:
        def progress(what: str, done: int, total: int) -> None:
            self.progress(f"{name}: {what}", done, total)

        return Subject(self.run, encoder, self.data, side, progress, reference)


def median_sigma(run: Run) -> float | None:
    """The median sigma of all random weights, heads included; pruned weights have none."""
    sigma = run.learner.posterior.sigma
    sigma = sigma[sigma > 0]
    return float(sigma.median()) if sigma.numel() else None


# ------------------------------------------------------------------------------------------------- results on the disk


def results_path(run: Run, data: str, teacher: bool) -> Path:
    """`evaluation.json` is the student on the run's own data; anything else has a separate name."""
    return RunFolder(run.folder).results / f"evaluation{of_source(run, data)}{'-teacher' if teacher else ''}.json"


def previous_path(path: Path) -> Path:
    return path.with_suffix(".previous.json")


def lost(before: Measures, results: Measures) -> set[str]:
    """The first words of keys that only the earlier results have; `draws` also if the new ones are of fewer draws."""
    fewer = results["settings"]["draws"] < before.get("settings", {}).get("draws", 0)
    return {key.split(".")[0] for key in before.keys() - results.keys()} | ({"draws"} if fewer else set())


def keep_previous(path: Path, results: Measures) -> None:
    """Save the earlier results if the new ones have less, unless larger ones are saved already."""
    before, saved = _read(path), previous_path(path)
    if before and lost(before, results) and not before.keys() < _read(saved).keys():
        write_json(saved, before)


def is_current(results: Mapping[str, Any], folder: Path) -> bool:
    """Whether results belong to the weights that a run has now; False if it was trained on or pruned since.

    Results without a digest of the weights (from an older version) are compared by step. Without a checkpoint nothing
    can be compared, and the results count as current.
    """
    path, settings = RunFolder(folder).checkpoint, results.get("settings", {})
    if not path.is_file():
        return True
    if settings.get("step") != checkpoints.state(path)["step"]:
        return False
    return "weights" not in settings or settings["weights"] == _digest_of(checkpoints.load(path)[0])


def weights_digest(run: Run) -> str:
    """A digest of all weights, as `is_current` computes it from the checkpoint."""
    networks = {"student.": run.learner.posterior, "teacher.": run.learner.teacher}
    return _digest_of(
        {f"{part}{name}": t for part, n in networks.items() if n is not None for name, t in n.tensors().items()}
    )


def _digest_of(tensors: Mapping[str, Tensor]) -> str:
    return digest(*(tensors[name] for name in sorted(tensors) if name.startswith(("student.", "teacher."))))


def fingerprint(data: ImageSet) -> str:
    """Identifies images with their labels."""
    assert data.labels is not None
    return digest(data.labels) + data.fingerprint()[:16]


def _read(path: Path) -> dict[str, Any]:
    try:
        tree = read_json(path)
    except (OSError, ValueError):
        return {}
    return tree if isinstance(tree.get("settings"), dict) else {}


# ------------------------------------------------------------------------------------------------------------- baseline


def _other_run(run: Run, folder: Path) -> Run:
    if folder.resolve() == run.folder.resolve():
        raise BadInput(f"--baseline {folder} is the run itself: give another run.")
    return load(folder, str(run.encoder.means.device), run.processes)


def _compared(
    other: Run, data: str, wanted: Wanted, results: Measures, images: Entry, progress: Progress, say: Say
) -> Measures:
    """The differences to another run. Its evaluation is read; it is made if there is none, or an outdated one."""
    path = results_path(other, data, wanted.teacher)
    theirs = other.processes.from_first(lambda: _read(path))
    found = bool(theirs) and same_source(theirs["settings"].get("data", ""), data)
    current = found and other.processes.from_first(lambda: is_current(theirs, other.folder))
    if not current:
        step = theirs.get("settings", {}).get("step")
        state = (
            f"belongs to an earlier state of the run (step {step}, now {other.step})"
            if found
            else "is missing or damaged"
        )
        say(f"{path} {state}: {other.folder} is evaluated now, with the same flags.")
        theirs = _evaluate(other, data, wanted, None, progress, say)
    results["settings"]["baseline"] = {"run": str(other.folder), "step": other.step, "made_now": not current}
    still, drawn = other.deterministic, theirs["settings"].get("draws")
    entry = read_entry(path.with_suffix(".safetensors"))
    their_rows: Mapping[str, Tensor] = entry.tensors if entry is not None and entry.header == images.header else {}
    if wanted.draws and not still and drawn != wanted.draws:
        say(f"{path} is of {drawn} draws, not {wanted.draws}: what depends on draws is not compared.")
        theirs, their_rows = without_draws(theirs), without_draws(their_rows)
    differ = differences(strict(results), theirs, still) | intervals(images.tensors, their_rows, still)
    if lacking := [flag for flag in ("ood", "shifts", "semi", "finetune") if _lacks(flag, results, theirs)]:
        say(f"{path} has no {' and no '.join(lacking)}: evaluate {other.folder} with the same flags to compare these.")
    return differ


def _lacks(flag: str, own: Measures, theirs: Measures) -> bool:
    return any(key.startswith(f"{flag}.") for key in own) and not any(key.startswith(f"{flag}.") for key in theirs)
