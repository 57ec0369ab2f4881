"""`byov evaluate`: all that is measured of a run on a source with labels, section by section, as flat keys in one JSON.

Each section is a file of this package: feature_quality, per_image_uncertainty (draws), output_variance,
shift_robustness, ood, finetune, baseline.
What each key means stands in docs/reference/evaluation-keys.md.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from byov import __version__
from byov._core.callbacks import Progress, Say, say_on_stderr
from byov._core.errors import BadInput
from byov._core.files import without_prefix, write_json
from byov.config import absolute_source, same_source
from byov.data.images import ImageSet
from byov.data.shifts import SEVERITIES
from byov.evaluation.agreement import DRAWS, align
from byov.evaluation.baseline import differences, intervals, without_draws
from byov.evaluation.feature_quality import (
    HELD_OUT,
    KNN_K,
    KNN_TEMPERATURE,
    label_lists,
    probe_measures,
    semi_measures,
    uncertainty_section,
)
from byov.evaluation.finetune import finetune_measures, finetuning
from byov.evaluation.labelled import Labelled, Subject, load_labelled
from byov.evaluation.named_metrics import (
    Measures,
    below,
    bins_of,
    errors_of,
    predictive_measures,
    predictive_scores,
    selective_measures,
    strict,
)
from byov.evaluation.ood import OOD_IMAGES, check_sources, of_source, outside_images, outside_measures, plain_name
from byov.evaluation.output_variance import level_measures
from byov.evaluation.partial_results import Kept, Section, digest, read_section, write_section
from byov.evaluation.per_image_uncertainty import pass_draws
from byov.evaluation.predictive import ClassPredictions
from byov.evaluation.shift_robustness import shift_measures, shift_names, shift_settings
from byov.inference.load import Run, load
from byov.inference.reference import ReferenceSet
from byov.metrics import retrieval_hits
from byov.metrics.resampling import image_rows
from byov.runs.folder import RunFolder
from byov.scoring.scorer import is_deterministic

PIXELS = 32  # side of the raw pixels that are probed at most: 12,288 numbers an image at 64 would take minutes to fit


@dataclass(frozen=True)
class Wanted:
    """What is measured besides the probe at the means."""

    draws: int = 0
    """Weight draws of the posterior predictive."""
    shifts: bool = False
    ood: tuple[str, ...] = ()
    """Sources of images of another kind."""
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
    """Measures the run on a source with labels (its own by default) and writes `results/evaluation.json`.

    Beside it, `evaluation.safetensors` has what was found of each test image. What is stopped goes on in the next call
    with the same settings. `supervised`: one or two supervised-bbb runs of the same data to align with (`align`).
    """
    wanted = Wanted(draws, shifts, tuple(ood), semi, finetune, teacher)
    other = None if baseline is None else _other_run(run, baseline)
    if other is not None and teacher:
        other.teacher_encoder()  # says no where there is none: asked first
    return _evaluate(run, absolute_source(data or run.config.data), wanted, other, progress, say, supervised)


def _evaluate(
    run: Run,
    data: str,
    wanted: Wanted,
    other: Run | None,
    progress: Progress,
    say: Say,
    supervised: Sequence[Run] = (),
) -> Measures:
    wanted = _possible(run, wanted, say)
    check_sources(wanted.ood, run.image_shape[-1])
    labelled = load_labelled(run, data, progress, say)
    evaluation = _Evaluation(run, labelled, wanted, progress, say)
    results, rows = evaluation.all()
    if supervised:
        results |= evaluation.aligned_with(supervised)
    images = Section({"images": fingerprint(labelled.test)}, rows)
    if other is not None:
        results |= _beside(other, data, wanted, results, images, progress, say)
    results = strict(results)
    path = results_path(run, data, wanted.teacher)
    keep_previous(path, results)
    write_section(path.with_suffix(".safetensors"), images)
    write_json(path, results)
    evaluation.kept.clear()
    return results


def previous_path(path: Path) -> Path:
    return path.with_suffix(".previous.json")


def lost(before: Measures, results: Measures) -> set[str]:
    """The first words of the keys that earlier results have and these have not; `draws` also where these have fewer."""
    fewer = results["settings"]["draws"] < before.get("settings", {}).get("draws", 0)
    return {key.split(".")[0] for key in before.keys() - results.keys()} | ({"draws"} if fewer else set())


def keep_previous(path: Path, results: Measures) -> None:
    """Keeps results that are about to be replaced by others that have less, unless a larger one is kept already."""
    before, kept = _read(path), previous_path(path)
    if before and lost(before, results) and not before.keys() < _read(kept).keys():
        write_json(kept, before)


def fingerprint(data: ImageSet) -> str:
    """Tells whether these are the same images with the same labels."""
    assert data.labels is not None
    return digest(data.labels) + data.fingerprint()[:16]


def results_path(run: Run, data: str, teacher: bool) -> Path:
    """`evaluation.json` is the student on the run's own data; anything else has a name of its own."""
    return RunFolder(run.folder).results / f"evaluation{of_source(run, data)}{'-teacher' if teacher else ''}.json"


def _possible(run: Run, wanted: Wanted, say: Say) -> Wanted:
    """What can be had of this run. Nothing random: draws are left out, so that one command serves BYOV and BYOL."""
    if wanted.draws < 0:
        raise BadInput(f"draws={wanted.draws}: give at least 1, or 0 for none.")
    if wanted.teacher and (wanted.draws or wanted.finetune):
        raise BadInput("the teacher has no posterior to draw from, and is not trained on: leave out --teacher.")
    if wanted.draws and is_deterministic(run):
        say(f"{run.folder} has nothing random: its results are those at the means, without draws.")
        return replace(wanted, draws=0)
    return wanted


# ------------------------------------------------------------------------------------------------------------- sections


class _Evaluation:
    """One evaluation: whom it looks at, and what it has kept."""

    def __init__(self, run: Run, data: Labelled, wanted: Wanted, progress: Progress, say: Say) -> None:
        self.run, self.data, self.wanted = run, data, wanted
        self.progress, self.say = progress, say
        encoder: nn.Module = run.teacher_encoder() if wanted.teacher else run.encoder
        self.own = self._subject(encoder, run.image_shape[-1], str(run.folder), self._bank())
        known = None if self.own.bank is None else self.own.bank.folder.name  # a digest of it
        seen = [data.name, fingerprint(data.train), fingerprint(data.test)]
        identity = [__version__, _weights(run), run.step, wanted.teacher, known, *seen]
        self.kept = Kept(RunFolder(run.folder).results / "partial", identity)
        self.predictions: ClassPredictions | None = None  # over draws, where they were made in this call

    def all(self) -> tuple[Measures, dict[str, Tensor]]:
        """Every section that is wanted: the measures with their settings, and the rows of the test images."""
        own, wanted = self.own, self.wanted
        results, rows = self._at_means()
        if wanted.draws:
            found = self.kept("draws", wanted.draws, self._draws)
            results |= found.measures
            rows |= found.images
            results |= self._measures("levels", wanted.draws, partial(level_measures, own, wanted.draws))
        for spec in wanted.ood:
            results |= self._outside(spec, rows)
        if wanted.shifts:
            results |= self._shifts()
        if wanted.finetune:
            results |= self._finetuned("", own) | self._finetuned("untrained.", self.untrained)
        return results | {"settings": self._settings()}, rows

    def _at_means(self) -> tuple[Measures, dict[str, Tensor]]:
        """The run; beside it the untrained encoder and raw pixels."""
        run, side = self.run, self.own.side
        subjects = {
            "means": self.own,
            "untrained": self.untrained,
            "pixels": self._subject(nn.Flatten(), min(side, PIXELS), "raw pixels"),
        }
        results: Measures = {}
        rows: dict[str, Tensor] = {}
        for name, subject in subjects.items():
            measures = self._measures(f"{name}-probe", None, partial(probe_measures, subject))
            if subject is self.own:
                found = self.kept("uncertainty", None, partial(uncertainty_section, subject))
                measures |= found.measures
                rows |= found.images
            if self.wanted.semi:
                measures |= self._measures(f"{name}-semi", None, partial(semi_measures, subject))
            results |= measures if subject is self.own else below(f"{name}.", measures)
        sigma = run.learner.posterior.sigma  # of all random weights, heads too
        sigma = sigma[sigma > 0]  # a pruned weight has none
        return results | {"median_sigma": float(sigma.median()) if sigma.numel() else None}, rows

    def _draws(self) -> Section:
        """`draws.*`, `draws_unaligned.*`, and what the label-free scores over draws are worth."""
        own, labels = self.own, self.data.test_labels
        drawn = pass_draws(own, own.test_images, self.wanted.draws, "draws")
        self.predictions = ClassPredictions(drawn.aligned, drawn.unaligned)
        errors = errors_of(own.probe.logits(own.test_features), labels)
        hits = retrieval_hits(own.test_features, labels) if len(labels) > 1 else None
        found = selective_measures(drawn.label_free_scores(), errors, hits)
        rows = below("score.", drawn.scores())
        for prefix, predictive in (("draws.", drawn.aligned), ("draws_unaligned.", drawn.unaligned)):
            measures = predictive_measures(predictive, labels) | {"bins": bins_of(predictive.mean, labels)}
            measures |= selective_measures(predictive_scores(predictive), errors_of(predictive.mean, labels), hits)
            found |= below(prefix, measures)
            rows |= below(prefix, image_rows(predictive.mean, labels))
        return Section(found, rows)

    def aligned_with(self, supervised: Sequence[Run]) -> Measures:
        """`align.*`: the numbers of `alignment.json`, which has also what its figure shows."""
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

    def _outside(self, spec: str, rows: dict[str, Tensor]) -> Measures:
        """`ood.NAME.*`; the test images' scores are known."""
        images = outside_images(self.own, spec, self.say)
        inside = without_prefix(rows, "score.")
        draws = self.wanted.draws
        make = partial(outside_measures, self.own, spec, images, draws, inside)
        return self._measures(f"ood-{plain_name(spec)}", [draws, spec, digest(images)], make)

    def _shifts(self) -> Measures:
        """`shifts.*`, a section a shift."""
        names, draws = shift_names(self.own), self.wanted.draws
        results: Measures = {}

        def advance(name: str, severity: int) -> None:
            done = names.index(name) * len(SEVERITIES) + severity
            self.progress(f"{len(names)} shifts, {len(SEVERITIES)} severities", done, len(names) * len(SEVERITIES))

        for name in names:
            make = partial(shift_measures, self.own, name, draws, partial(advance, name))
            results |= self._measures(f"shift-{name}", shift_settings(self.own, draws), make)
        return results

    def _finetuned(self, prefix: str, subject: Subject) -> Measures:
        name, settings = f"{prefix}finetune", finetuning(len(self.data.train))
        place = self.kept.place(name, settings)
        return below(prefix, self._measures(name, settings, partial(finetune_measures, subject, place, self.say)))

    def _measures(self, name: str, settings: Any, make: Callable[[], Measures]) -> Measures:
        """A section without rows of images."""
        return self.kept(name, settings, lambda: Section(make())).measures

    # ------------------------------------------------------------------------------------------------------- settings

    def _settings(self) -> dict[str, Any]:
        run, data, wanted = self.run, self.data, self.wanted
        settings: dict[str, Any] = {
            "byov": __version__,
            "run": str(run.folder),
            "step": run.step,
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
        """The images whose labels are known, as indices into the source's training images."""
        data = self.data
        lists = label_lists(data.train_labels).items()
        path = results_path(self.run, data.name, self.wanted.teacher)
        path = path.with_name(f"{path.stem}-labels.json")
        chosen = {f"{percent}%": data.train_ids[images].tolist() for percent, images in lists}
        write_json(path, {"source": data.name, "split": "train", **chosen})
        return path

    @cached_property
    def untrained(self) -> Subject:
        """The same encoder with the random weights it began with."""
        return self._subject(self.run.untrained_encoder(), self.own.side, "untrained encoder")

    def _subject(self, encoder: nn.Module, side: int, name: str, bank: ReferenceSet | None = None) -> Subject:
        def progress(what: str, done: int, total: int) -> None:
            self.progress(f"{name}: {what}", done, total)

        return Subject(self.run, encoder, self.data, side, progress, bank)

    def _bank(self) -> ReferenceSet | None:
        """The reference bank of the student; only draws cannot do without it."""
        if self.wanted.teacher:
            return None
        try:
            bank = ReferenceSet(self.run)
            bank.means  # noqa: B018 (the run's source may be gone)
        except BadInput as error:
            if self.wanted.draws:
                raise
            self.say(f"no label-free scores: {error}")
            return None
        return bank


def _weights(run: Run) -> str:
    """A digest of all weights."""
    networks = [run.learner.posterior, *([run.learner.teacher] if run.learner.teacher is not None else [])]
    return digest(*(tensor for network in networks for tensor in network.tensors().values()))


# ------------------------------------------------------------------------------------------------------------- baseline


def _other_run(run: Run, folder: Path) -> Run:
    if folder.resolve() == run.folder.resolve():
        raise BadInput(f"--baseline {folder} is the run itself: give another run.")
    return load(folder, str(run.encoder.means.device), run.processes)


def _beside(
    other: Run, data: str, wanted: Wanted, results: Measures, images: Section, progress: Progress, say: Say
) -> Measures:
    """The differences to another run, whose evaluation is read, or made where there is none of its last step."""
    path = results_path(other, data, wanted.teacher)
    theirs = _read(path)
    settings = theirs.get("settings", {})
    made = settings.get("step") != other.step or not same_source(settings.get("data", ""), data)
    if made:
        say(f"{path} is not there, or of another step: it is made now, in the same way.")
        theirs = _evaluate(other, data, wanted, None, progress, say)
    results["settings"]["baseline"] = {"run": str(other.folder), "step": other.step, "made_now": made}
    still, drawn = is_deterministic(other), theirs["settings"].get("draws")
    their_images = read_section(path.with_suffix(".safetensors"))
    their_rows = their_images.images if their_images is not None and their_images.measures == images.measures else {}
    if wanted.draws and not still and drawn != wanted.draws:
        say(f"{path} is of {drawn} draws, not {wanted.draws}: what hangs on draws is not compared.")
        theirs, their_rows = without_draws(theirs), without_draws(their_rows)
    found = differences(strict(results), theirs, still) | intervals(images.images, their_rows, still)
    if lacking := [flag for flag in ("ood", "shifts", "semi", "finetune") if _lacks(flag, results, theirs)]:
        say(f"{path} has no {' and no '.join(lacking)}: evaluate {other.folder} with the same flags to compare these.")
    return found


def _lacks(flag: str, own: Measures, theirs: Measures) -> bool:
    return any(key.startswith(f"{flag}.") for key in own) and not any(key.startswith(f"{flag}.") for key in theirs)


def _read(path: Path) -> dict[str, Any]:
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return tree if isinstance(tree, dict) and isinstance(tree.get("settings"), dict) else {}
