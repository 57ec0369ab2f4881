"""Fine-tuning starts from the means and the probe, leaves the run unchanged, and resumes where it stopped."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import byov
from byov.config import Config, Model, Monitor, Optim
from byov.evaluation import finetune
from byov.evaluation.finetune import finetune_measures
from byov.evaluation.measures import class_measures
from byov.evaluation.probe import Subject, load_labelled
from byov.pruning.criteria import Pruning
from byov.pruning.prune import prune
from byov.training.loop import Trainer
from byov.training.prepare import prepare

SMALL = Config(
    images=64,
    threads=1,
    device="cpu",
    model=Model(width=16, depth=1, heads=2, head_hidden=16, head_output=8),
    optim=Optim(epochs=1, batch_size=16),
    monitor=Monitor(tensorboard=False, knn_every=0),
)


@pytest.fixture(scope="module")
def subject(tmp_path_factory: pytest.TempPathFactory) -> Subject:
    folder = tmp_path_factory.mktemp("finetune") / "run"
    prepare(SMALL, folder).run()
    run = byov.load(folder)
    return Subject(run, run.encoder, load_labelled(run, "digits", lambda *what: None), 8, lambda *what: None)


@pytest.fixture(autouse=True)
def three_epochs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(finetune, "STEPS", 1)


def tuned(subject: Subject, folder: Path, monkeypatch: pytest.MonkeyPatch, lr: float) -> dict[str, float]:
    monkeypatch.setattr(finetune, "OPTIM", replace(finetune.OPTIM, lr=lr, batch_size=16))
    return finetune_measures(subject, folder, lambda text: None)


def test_at_no_speed_it_is_the_probe(subject: Subject, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = tuned(subject, tmp_path / "tuning", monkeypatch, lr=0.0)
    expected = class_measures(subject.probe.probabilities(subject.test_features), subject.data.test_labels)
    assert found["finetune.top1"] == expected["top1"] and not (tmp_path / "tuning").exists()
    assert found["finetune.nll"] == pytest.approx(expected["nll"], rel=1e-4)


def test_it_goes_on_where_it_stopped_and_leaves_the_run_alone(
    subject: Subject, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    last = subject.run.folder / "checkpoints" / "last.safetensors"
    before, features = last.read_bytes(), subject.test_features.clone()
    expected = tuned(subject, tmp_path / "whole", monkeypatch, lr=1e-3)
    assert expected != tuned(subject, tmp_path / "still", monkeypatch, lr=0.0)
    steps: list[int] = []

    def pull_the_plug(trainer: Trainer) -> bool:
        steps.append(trainer.step)
        if len(steps) == 6:
            raise ZeroDivisionError
        return trainer.step == 4

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_due", pull_the_plug)
        with pytest.raises(ZeroDivisionError):
            tuned(subject, tmp_path / "stopped", monkeypatch, lr=1e-3)
        assert tuned(subject, tmp_path / "stopped", monkeypatch, lr=1e-3) == expected
    assert steps == [1, 2, 3, 4, 5, 6, *range(5, 13)]  # 3 epochs of 4 steps
    assert last.read_bytes() == before and torch.equal(subject.run.features(subject.data.test.images), features)


def test_few_images_are_passed_more_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    for images, epochs in ((50_000, 3), (10_000, 13), (1370, 100), (100, 1000)):
        assert finetune.finetuning(images)["epochs"] == epochs  # 1,000 steps of 128 images, or 3 epochs
        assert epochs * max(1, images // 128) >= 1000


def test_an_untrained_encoder_starts_from_its_own_weights_and_probe(
    subject: Subject, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compared with the tuned run it shows what the pretraining was worth."""
    beginner = replace(subject, encoder=subject.run.untrained_encoder())
    probe = class_measures(beginner.probe.probabilities(beginner.test_features), subject.data.test_labels)
    still, moved = (tuned(beginner, tmp_path / str(lr), monkeypatch, lr) for lr in (0.0, 1e-3))
    assert still["finetune.nll"] == pytest.approx(probe["nll"], rel=1e-4) != moved["finetune.nll"]
    assert still["finetune.nll"] != tuned(subject, tmp_path / "run", monkeypatch, 0.0)["finetune.nll"]


def test_what_is_pruned_stays_so(subject: Subject, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prune(subject.run, tmp_path / "pruned", Pruning("magnitude", 0.5), curve=())
    monkeypatch.setattr(finetune, "OPTIM", replace(finetune.OPTIM, lr=1e-2, batch_size=16))
    run = byov.load(tmp_path / "pruned")
    trainer = finetune._trainer(replace(subject, run=run, encoder=run.encoder), tmp_path / "tuning")
    before = {name: p.detach().clone() for name, p in trainer.learner.posterior.module.named_parameters()}
    trainer.run()
    masks = trainer.learner.masks
    assert masks and all(name.startswith("encoder.") for name in masks)
    for name, parameter in trainer.learner.posterior.module.named_parameters():
        if name in masks:
            assert not parameter[~masks[name]].any() and not torch.equal(parameter, before[name])


def test_digits_are_not_mirrored_whatever_the_run_was_trained_on(subject: Subject, tmp_path: Path) -> None:
    views = subject.run.config.views
    photographs = replace(subject.run.config, views=replace(views, first=replace(views.first, flip=0.5)))
    run = replace(subject.run, config=photographs)
    for flips, expected in ((False, 0.0), (True, 0.5)):
        there = replace(subject, run=run, data=replace(subject.data, flips=flips))
        assert finetune._trainer(there, tmp_path / "tuning").config.views.first.flip == expected
