"""A step of BYOV over every family of backbones: finite, all learn; the teacher has its own BatchNorm statistics."""

from pathlib import Path

import pytest
import torch

import tiny
from byov._core.errors import BadInput
from byov.backbones import timm
from byov.config import Model, Optim
from byov.data.images import ImageSet
from byov.training.loop import Trainer
from byov.training.preview import describe

HEADS = {"head_hidden": 16, "head_output": 8}
RESNETS = [
    Model("resnet-18", width=4, **HEADS),
    Model("resnet-50", width=4, norm="group", **HEADS),
    Model("resnet-18", width=4, norm="none", **HEADS),
]
TIMMS = [Model("timm:test_resnet", **HEADS), Model("timm:test_vit", **HEADS), Model("timm:test_convnext", **HEADS)]


def trainer(folder: Path, model: Model, method: str = "byov", **optim: object) -> Trainer:
    if model.backbone.startswith("timm:"):
        try:
            timm._timm()
        except BadInput:
            pytest.skip("timm is not installed")
    g = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (16, 3, 32, 32), generator=g, dtype=torch.uint8)
    data = ImageSet(pixels, torch.arange(16) % 3, None)
    settings = tiny.config(method, model=model, optim=Optim(epochs=2, batch_size=8, warmup=0.0, **optim))
    return tiny.trainer(folder, settings, data)


@pytest.mark.parametrize("optimizer", ["adamw", "lars"])
@pytest.mark.parametrize("model", [*RESNETS, *TIMMS], ids=lambda m: f"{m.backbone}-{m.norm}")
def test_a_step_moves_every_weight(tmp_path: Path, model: Model, optimizer: str) -> None:
    run = trainer(tmp_path, model, optimizer=optimizer, lr=1e-3 if optimizer == "adamw" else 0.3)
    posterior = run.learner.posterior
    before = posterior.means.detach().clone()
    assert posterior.means.numel() and not list(posterior.module.parameters())
    for _ in range(2):
        run._advance()
    for segment, old in zip(posterior.segments, posterior.segments.views(before), strict=True):
        new = posterior.means.detach()[segment.offset : segment.stop].view(segment.shape)
        assert new.isfinite().all() and not torch.equal(new, old), segment.name
    assert f"{model.backbone}: " in describe(run, "mine") and "None" not in describe(run, "mine")


@pytest.mark.parametrize("method", ["byov", "byol"])
def test_batch_statistics_are_the_teachers_own(tmp_path: Path, method: str) -> None:
    """Each normalises by its own batches: at its own weights the student's running mean differs from the teacher's."""
    run = trainer(tmp_path, RESNETS[0], method)
    student, teacher = run.learner.posterior.module, run.learner.teacher.module
    run._advance()
    for network in (student, teacher):
        assert network.training and int(network.encoder.backbone.bn1.num_batches_tracked) == 2  # both views
    run._advance()
    own, others = (network.encoder.backbone.layer4[1].bn2 for network in (student, teacher))
    assert own.running_mean.data_ptr() != others.running_mean.data_ptr()
    assert not torch.equal(own.running_mean, others.running_mean)
    # The teacher's statistics are not an average of the student's.
    kept = others.running_mean.clone()
    run.learner.teacher.update(run.learner.posterior, 0.0)
    assert torch.equal(others.running_mean, kept)


def test_flipout_leaves_standardised_convolutions_to_the_shared_draw(tmp_path: Path) -> None:
    run = trainer(tmp_path, RESNETS[1])
    posterior = run.learner.posterior
    with torch.no_grad():
        posterior.log_variances.fill_(-6.0)
    encoder, images = posterior.module.encoder.eval(), torch.rand(2, 3, 32, 32)
    with torch.no_grad():
        with posterior.sampled(torch.Generator().manual_seed(0)):
            plain = encoder(images)
        with posterior.sampled(torch.Generator().manual_seed(0), flipout=True):
            torch.testing.assert_close(encoder(images), plain)
