"""Whole evaluations of small runs: every section, interrupted and resumed, compared with another run."""

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.metrics import accuracy_score, roc_auc_score

import byov
from byov._core.cache import read_entry
from byov._core.errors import BadInput
from byov.config import Config, Model, Monitor, Optim
from byov.data.shifts import shifted
from byov.data.sources import open_source
from byov.evaluation import evaluate as module
from byov.evaluation.evaluate import evaluate, is_current, previous_path, results_path
from byov.evaluation.predictive import predict_classes, predict_levels
from byov.evaluation.probe import fit_probe, load_labelled
from byov.inference.run import ReferenceSet, Run
from byov.pruning.criteria import Pruning
from byov.pruning.prune import prune
from byov.runs.folder import RunFolder
from byov.scoring.scores import CANDIDATES, ODDNESS
from byov.studies.beyond.working_point import point_measures
from byov.studies.framework.compare import weight_spread
from byov.training.prepare import prepare

SMALL = Config(
    threads=1,
    device="cpu",
    calibration=20,
    model=Model(width=16, depth=1, heads=2, head_hidden=16, head_output=8),
    optim=Optim(epochs=2, batch_size=16),
    monitor=Monitor(tensorboard=False, knn_every=0),
)
TRAIN, TEST = 120, 60
SOME_SHIFTS = ["shear", "blur"]  # all would take longer than the rest together


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three digits to train and probe on, images of another kind, and the same in colour."""
    folder = tmp_path_factory.mktemp("evaluate")
    digits = {split: open_source("digits").load(split) for split in ("train", "test")}
    few = {split: data.subset((data.labels < 3).nonzero()[:, 0]) for split, data in digits.items()}
    images = {split: few[split].images[:count, 0].numpy() for split, count in (("train", TRAIN), ("test", TEST))}
    labels = {f"y_{split}": few[split].labels[: len(images[split])].numpy() for split in images}
    np.savez(folder / "digits.npz", x_train=images["train"], x_test=images["test"], **labels)
    colour = {split: np.repeat(pixels[..., None], 3, axis=-1) for split, pixels in images.items()}
    np.savez(folder / "colour.npz", x_train=colour["train"], x_test=colour["test"], **labels)
    noise = np.random.default_rng(0).integers(0, 256, (40, 12, 12, 3), dtype=np.uint8)
    np.savez(folder / "noise.npz", images=noise)
    for method in ("byov", "byol"):
        config = replace(SMALL, data=f"npz:{folder / 'digits.npz'}", method=method)
        prepare(config, folder / method).run()
    return folder


@pytest.fixture
def run(folder: Path) -> Run:
    return byov.load(folder / "byov")


@pytest.fixture(scope="module")
def everything(folder: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor], list[str]]:
    """All sections of the BYOV run with BYOL as baseline: measures, rows of images, and what was said."""
    said: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "shift_names", lambda subject: SOME_SHIFTS)
        patch.setattr("byov.evaluation.finetune.STEPS", 1)
        made = evaluate(
            byov.load(folder / "byov"),
            draws=4,
            shifts=True,
            ood=[f"npz:{folder / 'noise.npz'}"],
            semi=True,
            finetune=True,
            baseline=folder / "byol",
            say=said.append,
        )
    rows = read_entry(folder / "byov" / "results" / "evaluation.safetensors")
    assert rows is not None
    return made, dict(rows.tensors), said


def test_every_section_is_there_as_strict_json(everything, folder: Path) -> None:
    made, rows, _ = everything

    def refuse(text: str) -> None:
        raise AssertionError(f"{text} is no JSON")

    text = (folder / "byov" / "results" / "evaluation.json").read_text()
    assert json.loads(text, parse_constant=refuse) == json.loads(json.dumps(made))
    keys = {"top1", "adaptive_ece", "aurc", "temperature", "scaled.ece", "recall_at_1", "knn", "bins", "median_sigma"}
    keys |= {"selective.energy.aurc", "selective.mahalanobis.r_auroc", "selective.label_free_neighbours.r_auroc"}
    keys |= {"draws.top1", "draws_unaligned.ece", "draws.mutual_information", "draws.selective.predictive_std.aurc"}
    keys |= {"levels.projector.aligned.variance", "semi.1.top1", "semi.10.ece", "untrained.semi.1.top1"}
    keys |= {"finetune.nll", "untrained.finetune.top1"}
    keys |= {"shifts.shear.3.top1", "shifts.blur.5.draws.mutual_information", "shifts.shear.1.at_means.brier"}
    keys |= {"baseline.top1", "baseline.top1_interval", "baseline.draws.nll_interval", "baseline.shifts.blur.1.ece"}
    keys |= {"baseline.shifts.blur.1.draws.brier", "baseline.finetune.top1"}
    assert keys <= set(made), keys - set(made)
    assert next(iter(made)) == "top1"
    assert all(row.shape == (TEST,) for row in rows.values()) and float(rows["means.top1"].mean()) == made["top1"]
    assert not (folder / "byov" / "results" / "partial").exists()


def test_the_documentation_tells_of_every_measure(everything) -> None:
    made, _, _ = everything
    text = (Path(__file__).parents[2] / "docs" / "reference" / "evaluation-keys.md").read_text(encoding="utf-8")
    names = {key.rsplit(".", 1)[-1].removesuffix("_interval") for key in made}
    assert not [name for name in names if not re.search(rf"\b{name}\b", text)]
    assert not [key for key in made if f"`{key.split('.')[0]}" not in text]


def test_settings_go_with_the_results(everything, folder: Path) -> None:
    made, _, _ = everything
    settings = made["settings"]
    assert settings["draws"] == 4 and settings["shifts"]["draws"] == 4 and settings["shifts"]["images"] == TEST
    assert settings["train_images"] == TRAIN - 20 and settings["finetune"]["epochs"] == 3
    lists = json.loads((folder / "byov" / "results" / settings["semi"]["labels"]).read_text())
    with np.load(folder / "digits.npz") as file:
        counts = np.bincount(file["y_train"][lists["10%"]])
    assert len(lists["1%"]) == 3 and counts.tolist() == [3, 3, 3]  # a tenth of 100 images


def test_draws_and_shifts_are_those_of_their_parts(everything, run: Run) -> None:
    made, rows, _ = everything
    source = open_source(run.config.data)
    train, test = source.load("train"), source.load("test")
    told = json.loads((run.folder / "reference" / "images.json").read_text())
    seen = torch.tensor(sorted(set(range(TRAIN)) - set(told["calibration"])))
    probe = fit_probe(run.features(train.images[seen]), train.labels[seen])
    assert made["top1"] == pytest.approx(accuracy_score(test.labels, probe.logits(run.features(test.images)).argmax(1)))
    over = predict_classes(ReferenceSet(run), probe, test.images, 4)
    for prefix, predictive in (("draws.", over.aligned), ("draws_unaligned.", over.unaligned)):
        assert made[f"{prefix}top1"] == pytest.approx(accuracy_score(test.labels, predictive.mean.argmax(1)))
        assert made[f"{prefix}mutual_information"] == pytest.approx(float(predictive.mutual_information.mean()))
    wrong = over.aligned.mean.argmax(1) != test.labels
    expected = roc_auc_score(wrong, over.aligned.predictive_std)
    assert made["draws.selective.predictive_std.error_auroc"] == pytest.approx(expected)
    assert torch.allclose(rows["score.draws_entropy"], over.aligned.entropy)
    level = predict_levels(ReferenceSet(run), test.images, 4)["projector"].aligned.variance.mean(1)
    assert made["levels.projector.aligned.variance"] == pytest.approx(float(level.mean()))
    wrong = probe.logits(run.features(test.images)).argmax(1) != test.labels
    assert made["levels.projector.aligned.error_auroc"] == pytest.approx(roc_auc_score(wrong, level))
    now = shifted(test.images, torch.arange(TEST), "shear", 4, 0)
    guesses = probe.probabilities(run.features(now)).argmax(1)
    assert made["shifts.shear.4.top1"] == pytest.approx(accuracy_score(test.labels, guesses))
    over = predict_classes(ReferenceSet(run), probe, now, 4)
    assert made["shifts.shear.4.draws.top1"] == pytest.approx(accuracy_score(test.labels, over.aligned.mean.argmax(1)))


def test_images_of_another_kind_are_converted_and_told_apart(everything, folder: Path) -> None:
    made, rows, said = everything
    name = next(key for key in made if key.startswith("ood.") and key.endswith(".images")).removesuffix(".images")
    assert made[f"{name}.images"] == 40 and any("RGB made grey" in text for text in said)
    scores = {key.removeprefix("score.") for key in rows if key.startswith("score.")}
    measures = ("auroc", "aupr_out", "aupr_in", "fpr95")
    assert {f"{name}.{score}.{m}" for score in scores for m in measures} <= set(made)
    assert {score for score in scores if score.startswith("label_free_")} == {f"label_free_{n}" for n in CANDIDATES}
    assert len(scores) == 5 + 15 + 6  # baselines, label-free scores, those of the draws
    for score in ("knn", ODDNESS):
        assert made[f"{name}.label_free_{score}.auroc"] > 0.9  # noise of another size is no digit


def test_the_baseline_is_made_where_there_is_none_then_read(everything, folder: Path, run: Run) -> None:
    made, _, said = everything
    theirs = json.loads((folder / "byol" / "results" / "evaluation.json").read_text())
    assert any("is evaluated now" in text for text in said) and any("nothing random" in text for text in said)
    assert made["settings"]["baseline"]["made_now"] and theirs["settings"]["draws"] == 0
    assert made["baseline.ece"] == made["ece"] - theirs["ece"]
    assert made["baseline.draws.ece"] == made["draws.ece"] - theirs["ece"]  # of BYOL every draw is the means
    low, high = made["baseline.brier_interval"]
    assert low < made["baseline.brier"] < high
    assert not any(key.startswith("draws") for key in theirs) and "selective.label_free_knn.aurc" in theirs
    told: list[str] = []
    path = folder / "byol" / "results" / "evaluation.json"
    path.write_text(json.dumps({key: value for key, value in theirs.items() if not key.startswith("semi.")}))
    again = evaluate(run, semi=True, baseline=folder / "byol", say=told.append)
    assert not again["settings"]["baseline"]["made_now"] and any("has no semi" in text for text in told)


def test_what_was_stopped_goes_on(run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = f"npz:{folder / 'colour.npz'}"  # converted, as images of another kind are
    monkeypatch.setattr(module, "shift_names", lambda subject: SOME_SHIFTS)
    whole: Callable[[], dict[str, Any]] = lambda: evaluate(run, data, draws=3, shifts=True, say=lambda text: None)  # noqa: E731
    expected = whole()
    assert expected["settings"]["channels"] == "RGB made grey" and expected["settings"]["train_images"] == TRAIN
    assert results_path(run, data, False).name.startswith("evaluation-npz-")

    def stop(subject: object, name: str, *more: Any) -> dict[str, Any]:
        if name == "blur":
            raise KeyboardInterrupt
        return {f"shifts.{name}": 0.0}

    with monkeypatch.context() as patch:
        patch.setattr(module, "shift_measures", stop)
        with pytest.raises(KeyboardInterrupt):
            whole()
    kept = {path.name.rsplit("-", 1)[0] for path in (run.folder / "results" / "partial").iterdir()}
    assert {"means-probe", "draws", "levels", "uncertainty", "shift-shear"} <= kept and "shift-blur" not in kept

    def fail(*arguments: Any) -> None:
        raise AssertionError("this was done already")

    with monkeypatch.context() as patch:
        for name in ("probe_measures", "uncertainty_section", "pass_draws", "level_measures"):
            patch.setattr(module, name, fail)
        found = whole()
    assert found["shifts.shear"] == 0.0  # as it was kept
    same = [key for key in expected if not key.startswith("shifts.shear")]
    assert {key: found[key] for key in same} == {key: expected[key] for key in same}
    assert not (run.folder / "results" / "partial").exists()


def test_what_cannot_be_had_is_refused_or_left_out(run: Run, folder: Path, tmp_path: Path) -> None:
    for wrong, words in (
        ({"draws": -1}, "at least 1"),
        ({"draws": 2, "teacher": True}, "leave out --teacher"),
        ({"ood": ["nothing"]}, "no source"),
        ({"ood": ["digits", "digits"]}, "give it once"),
        ({"baseline": folder / "byov"}, "the run itself"),
        ({"baseline": tmp_path}, "checkpoint"),
    ):
        with pytest.raises(BadInput, match=words):
            evaluate(run, **wrong)  # type: ignore[arg-type]
    made = evaluate(run, teacher=True)
    assert made["settings"]["encoder"] == "teacher" and not any("label_free" in key for key in made)


def test_a_run_whose_images_are_gone_is_evaluated_on_others(folder: Path, tmp_path: Path) -> None:
    np.savez(tmp_path / "own.npz", images=open_source("digits").load("test").images[:40, 0].numpy())
    prepare(replace(SMALL, data=f"npz:{tmp_path / 'own.npz'}"), tmp_path / "run").run()
    (tmp_path / "own.npz").unlink()
    said: list[str] = []
    made = evaluate(byov.load(tmp_path / "run"), f"npz:{folder / 'digits.npz'}", draws=2, say=said.append)
    assert "selective.label_free_neighbours.aurc" in made and not any("label-free" in text for text in said)
    shutil.rmtree(ReferenceSet(byov.load(tmp_path / "run")).folder)
    RunFolder(tmp_path / "run").reference_pixels.unlink()  # then only the source has the reference set
    made = evaluate(byov.load(tmp_path / "run"), f"npz:{folder / 'digits.npz'}", say=said.append)
    assert 0 <= made["top1"] <= 1 and any("no label-free scores" in text for text in said)
    with pytest.raises(BadInput, match=r"own\.npz"):
        evaluate(byov.load(tmp_path / "run"), f"npz:{folder / 'digits.npz'}", draws=2)


def test_a_baseline_whose_path_is_spelled_otherwise_is_not_evaluated_again(
    folder: Path, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare(replace(SMALL, data=run.config.data, seed=1), tmp_path / "other").run()
    evaluate(byov.load(tmp_path / "other"), semi=True)
    monkeypatch.chdir(folder)
    said: list[str] = []
    made = evaluate(run, "npz:digits.npz", baseline=tmp_path / "other", say=said.append)
    assert made["settings"]["baseline"]["made_now"] is False and "baseline.top1" in made


def test_smaller_results_do_not_replace_larger_ones_that_are_kept(run: Run) -> None:
    evaluate(run, draws=2, semi=True, ood=("digits",))
    path = results_path(run, run.config.data, False)
    largest = json.loads(path.read_text())
    for flags in ({"draws": 2}, {"semi": True}, {}):
        evaluate(run, **flags)
        assert json.loads(previous_path(path).read_text()) == largest
    previous_path(path).unlink()


def test_as_many_draws_are_compared_or_none(run: Run, folder: Path, tmp_path: Path) -> None:
    prepare(replace(SMALL, data=run.config.data, seed=1), tmp_path / "other").run()
    evaluate(byov.load(tmp_path / "other"), draws=1)
    said: list[str] = []
    made = evaluate(run, draws=2, baseline=tmp_path / "other", say=said.append)
    assert any("of 1 draws, not 2" in text for text in said) and "baseline.top1" in made
    assert not any("draws" in key for key in made if key.startswith("baseline."))
    made = evaluate(run, draws=1, baseline=tmp_path / "other", say=said.append)
    assert {"baseline.draws.top1", "baseline.draws.top1_interval"} <= set(made)


def test_a_pruned_weight_has_no_sigma(run: Run, tmp_path: Path) -> None:
    sigma = run.learner.posterior.sigma
    prune(run, tmp_path / "pruned", Pruning("snr", 0.9, part="all"), curve=())
    pruned = byov.load(tmp_path / "pruned")
    found = evaluate(pruned)["median_sigma"]
    assert found == weight_spread(pruned)["median_sigma"]
    assert float(sigma.min()) <= found <= float(sigma.max())


def test_another_bank_takes_nothing_over(run: Run) -> None:
    def place() -> Path:
        data = load_labelled(run, run.config.data, lambda *what: None)
        evaluation = module._Evaluation(
            run, data, ReferenceSet(run), module.Wanted(), lambda *what: None, lambda text: None
        )
        return evaluation.cache.path("uncertainty")

    before, path = place(), run.folder / "reference" / "images.json"
    told = path.read_text()
    try:
        assert place() == before
        path.write_text(json.dumps(json.loads(told) | {"bank": json.loads(told)["bank"][:50]}))
        assert place() != before
    finally:
        path.write_text(told)


def test_a_baseline_without_a_teacher_is_refused_before_anything_is_done(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare(replace(SMALL, data=run.config.data, method="supervised"), tmp_path / "other")
    monkeypatch.setattr(module, "load_labelled", None)
    with pytest.raises(BadInput, match="no teacher"):
        evaluate(run, teacher=True, baseline=tmp_path / "other")


def test_the_working_points_measures_are_the_evaluations(folder: Path, everything) -> None:
    found = point_measures(byov.load(folder / "byov"), 4)
    results = evaluate(byov.load(folder / "byov"), draws=4)
    for key in ("top1", "ece", "brier", "nll", "draws.top1", "draws_unaligned.nll"):
        assert found[key] == pytest.approx(results[key], abs=1e-6)
    assert 0 <= found["validation.top1"] <= 1 and "validation.draws.top1" in found
    assert -1 <= found["sigma_magnitude_spearman"] <= 1
    still = point_measures(byov.load(folder / "byol"), 4)
    assert still["median_sigma"] is None and "draws.top1" not in still


def test_results_belong_to_the_weights_they_were_made_with(run: Run, folder: Path, tmp_path: Path) -> None:
    """After `byov train --extend`, an evaluation is not current, and a baseline is evaluated again."""
    shutil.copytree(folder / "byol", tmp_path / "other", ignore=shutil.ignore_patterns("results"))
    other = byov.load(tmp_path / "other")
    before = evaluate(other)
    assert is_current(before, other.folder) and is_current({"settings": {"step": other.step}}, other.folder)
    retrained = {"settings": before["settings"] | {"weights": "0" * 16}}
    assert not is_current(retrained, other.folder) and is_current(before, tmp_path / "no checkpoint")
    prepare(other.config, other.folder, extend=1).run()
    assert not is_current(before, other.folder) and not is_current({"settings": {"step": other.step}}, other.folder)
    said: list[str] = []
    made = evaluate(run, baseline=other.folder, say=said.append)
    assert made["settings"]["baseline"]["made_now"] and any("belongs to an earlier state" in text for text in said)
    after = json.loads(results_path(other, other.config.data, False).read_text())
    assert is_current(after, other.folder) and after["settings"]["step"] > before["settings"]["step"]
