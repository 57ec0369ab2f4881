"""Fine-tuning: all weights trained on the labels, from the means and the linear probe on.

Starting from the fitted probe instead of a random classifier keeps the features from being spoiled in the first steps
(Kumar et al. 2022, "LP-FT").
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from byov.config import Config, Monitor, Optim, Posterior
from byov.data.decoded import Say
from byov.evaluation.features import features_of
from byov.evaluation.measures import Measures, below, class_measures
from byov.evaluation.subject import Subject
from byov.training import checkpoints
from byov.training.initial import initialiser
from byov.training.learners import build_learner
from byov.training.loop import Trainer
from byov.training.masks import hold_pruned
from byov.training.resolve import resolve

OPTIM = Optim(epochs=3, batch_size=128, lr=1e-4)  # a tenth of the recipes' lr: the weights are good already
IMPOSSIBLE = -1e4  # the bias of a class without training images: finite, so that no gradient is NaN
LAST = Path("checkpoints") / "last.safetensors"


def finetuning() -> dict[str, Any]:
    """What the numbers hang on."""
    return {"epochs": OPTIM.epochs, "batch_size": OPTIM.batch_size, "lr": OPTIM.lr, "start": "means and linear probe"}


def finetune_measures(subject: Subject, folder: Path, say: Say) -> Measures:
    """`finetune.*`. Training leaves its checkpoints in `folder`, goes on from there, and removes it when it is done."""
    trainer = _trainer(subject, folder)
    trainer.say = say
    trainer.on_step = lambda step, row: subject.progress("fine-tuning", step, trainer.total)
    if (folder / LAST).is_file():
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

    def initialise(network: nn.Module) -> None:
        initialiser(str(run.folder))(network)
        classifier = network.get_submodule("classifier")
        assert isinstance(classifier, nn.Linear)
        weights = subject.probe.weights / subject.probe.std
        with torch.no_grad():
            classifier.weight.copy_(weights)
            classifier.bias.copy_((subject.probe.bias - weights @ subject.probe.mean).nan_to_num(neginf=IMPOSSIBLE))

    learner = build_learner(config, shape, data.classes, run.encoder.means.device, initialise)
    masks = checkpoints.part(checkpoints.load(run.folder / LAST)[0], "mask.")
    hold_pruned(learner, {name: mask for name, mask in masks.items() if name.startswith("encoder.")})
    return Trainer(config, folder, learner, data.train)


def _config(config: Config, subject: Subject) -> Config:
    """The run's model and views, trained with labels and nothing random; flips only where the source allows them."""
    first = config.views.first
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
        views=replace(config.views, first=first if subject.data.flips else replace(first, flip=0.0)),
        posterior=Posterior(where="none"),
        optim=OPTIM,
        monitor=Monitor(knn_every=0, tensorboard=False),
    )
