"""Fine-tuning: train all weights on the labels, starting from the means and the linear probe.

Starting from the fitted probe instead of a random classifier protects the features in the first steps (Kumar et al.
2022, "LP-FT"). The untrained encoder, trained in the same way, shows what the pretraining is worth.
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from byov._core.callbacks import Say
from byov._core.files import without_prefix
from byov.config import Config, Monitor, Optim, Posterior, View
from byov.evaluation.measures import Measures, class_measures
from byov.evaluation.predictive import below
from byov.evaluation.probe import Subject
from byov.inference.run import features_of
from byov.runs import checkpoints
from byov.runs.folder import RunFolder
from byov.training.learners import build_learner
from byov.training.loop import Trainer
from byov.training.masks import hold_pruned
from byov.training.resolve import resolve

OPTIM = Optim(batch_size=128, lr=1e-3)  # held out, 1,000 steps: Fashion-MNIST .806 (1e-4: .787, the probe .792)
EPOCHS, STEPS = 3, 1000  # at least, of both: 30 steps on 1,370 digits make the features worse, not yet better
IMPOSSIBLE = -1e4  # the bias of a class without training images: finite, so that no gradient is NaN


def finetuning(images: int) -> dict[str, Any]:
    """What the numbers depend on."""
    start = "the encoder at its means, and its linear probe"
    return {"epochs": _epochs(images), "batch_size": OPTIM.batch_size, "lr": OPTIM.lr, "start": start}


def _epochs(images: int) -> int:
    return max(EPOCHS, -(-STEPS // max(1, images // OPTIM.batch_size)))


def finetune_measures(subject: Subject, folder: Path, say: Say) -> Measures:
    """Compute `finetune.*` of the subject's encoder: the run's, or another with the same architecture.

    Training saves its checkpoints in `folder`, resumes from there, and removes the folder at the end.
    """
    trainer = _trainer(subject, folder)
    trainer.say = say
    trainer.on_step = lambda step, row: subject.progress("fine-tuning", step, trainer.total)
    if RunFolder(folder).checkpoint.is_file():
        trainer.restore()
    trainer.run()
    network = trainer.learner.posterior.module
    features = features_of(network.get_submodule("encoder"), subject.test_images)
    with torch.no_grad():
        probabilities = network.get_submodule("classifier").cpu()(features).softmax(1)
    shutil.rmtree(folder)
    return below("finetune.", class_measures(probabilities, subject.data.test_labels))


def _trainer(subject: Subject, folder: Path) -> Trainer:
    run, data = subject.run, subject.data
    shape = run.image_shape
    config = resolve(_config(run.config, subject), shape, len(data.train), data.flips)
    own = subject.encoder is run.encoder
    encoder = run.encoder.unwrapped() if own else subject.encoder

    def initialise(network: nn.Module) -> None:
        network.get_submodule("encoder").load_state_dict(encoder.state_dict())
        classifier = network.get_submodule("classifier")
        assert isinstance(classifier, nn.Linear)
        weights = subject.probe.weights / subject.probe.std
        with torch.no_grad():
            classifier.weight.copy_(weights)
            classifier.bias.copy_((subject.probe.bias - weights @ subject.probe.mean).nan_to_num(neginf=IMPOSSIBLE))

    learner = build_learner(config, shape, data.classes, run.encoder.means.device, initialise)
    masks = without_prefix(checkpoints.load(RunFolder(run.folder).checkpoint)[0], "mask.") if own else {}
    hold_pruned(learner, {name: mask for name, mask in masks.items() if name.startswith("encoder.")})
    return Trainer(config, folder, learner, data.train)


def _config(config: Config, subject: Subject) -> Config:
    """The run's model, deterministic, trained with labels on crops and flips only, as BYOL is fine-tuned."""
    first = config.views.first
    flip = first.flip if subject.data.flips else 0.0
    crops = View(first.crop_area, first.crop_ratio, flip, jitter=0.0, grey=0.0, blur=0.0)
    return replace(
        config,
        data=subject.data.name,
        method="supervised",
        images=len(subject.data.train),
        calibration=0,
        init=None,
        device=subject.run.encoder.means.device.type,
        threads=torch.get_num_threads(),
        precision="32-true",
        views=replace(config.views, first=crops),
        posterior=Posterior(where="none"),
        optim=replace(OPTIM, epochs=_epochs(len(subject.data.train))),
        monitor=Monitor(knn_every=0, tensorboard=False),
    )
