"""Backbones are cut between stages, and frozen up to one."""

from dataclasses import replace

import pytest
import torch
from test_efficientnet_lite import scrambled
from torch import Tensor, nn

from byov._core.errors import BadInput
from byov.backbones import Encoder, build_encoder, timm, with_backbone
from byov.backbones.family import Staged
from byov.config import Model
from byov.posterior import Posterior
from byov.training.learners import Student

MODELS = [
    Model(width=16, depth=3, heads=2, patch=8),
    Model(width=16, depth=2, heads=2, patch=8, stem="conv", positions="learned", pool="cls"),
    Model("resnet-18", width=4, stem="imagenet"),
    Model("resnet-50", width=4, stem="cifar", norm="group"),
    Model("efficientnet-lite0"),
]
SHAPE = (3, 32, 32)
IMAGES = torch.rand(2, *SHAPE, generator=torch.Generator().manual_seed(0))
STAGES = {
    "vit-micro": ["stem", "blocks.0", "blocks.1", "blocks.2", "norm"],
    "resnet-18": ["stem", "layer1", "layer2", "layer3", "layer4"],
    "efficientnet-lite0": ["stem", *(f"blocks.{i}" for i in range(7)), "head"],
}


def encoder(model: Model) -> Encoder:
    torch.manual_seed(0)
    return build_encoder(model, SHAPE)


def stages_of(encoder: Encoder) -> list[str]:
    assert isinstance(encoder.backbone, Staged)
    return [stage.name for stage in encoder.backbone.stages()]


def frozen(encoder: nn.Module) -> set[str]:
    return {name for name, parameter in encoder.named_parameters() if not parameter.requires_grad}


@pytest.fixture(params=MODELS, ids=lambda model: f"{model.backbone}-{model.norm or model.pool}")
def model(request: pytest.FixtureRequest) -> Model:
    return request.param  # type: ignore[no-any-return]


def test_the_stages_have_the_names_of_the_documentation() -> None:
    for model in MODELS[::2]:
        assert stages_of(encoder(model)) == STAGES[model.backbone]


@torch.no_grad()
def test_until_a_stage_and_after_it_is_the_whole(model: Model) -> None:
    whole = scrambled(encoder(model), SHAPE)
    expected = whole(IMAGES)
    assert float(expected.std(0).mean()) > 0.01
    for name in stages_of(whole):
        between = whole.backbone.until(name, whole._normalised(IMAGES))
        assert torch.equal(whole.backbone.after(name, between), expected)


def test_exactly_what_the_trunk_depends_on_is_frozen(model: Model) -> None:
    free = encoder(model).eval()
    for name in stages_of(free)[:-1]:
        free.zero_grad()
        free.backbone.until(name, IMAGES).square().sum().backward()
        trunk = {n for n, parameter in free.named_parameters() if parameter.grad is not None}
        cut = encoder(replace(model, frozen_until=name))
        assert frozen(cut) == trunk and trunk
        assert cut.has_trunk and not free.has_trunk
        with torch.no_grad():
            assert torch.equal(cut.eval().after_trunk(cut.trunk(IMAGES)), free(IMAGES))


def test_what_is_frozen_is_not_random(model: Model) -> None:
    name = stages_of(encoder(model))[1]
    cut = encoder(replace(model, frozen_until=name)).eval()
    still, everything = frozen(cut), {n for n, _ in cut.named_parameters()}
    posterior = Posterior(cut, init_log_variance=-2.0)
    assert {segment.name for segment in posterior.segments} == everything - still

    def at(seed: int) -> tuple[Tensor, Tensor]:
        with torch.no_grad(), posterior.sampled(torch.Generator().manual_seed(seed)):
            return cut.trunk(IMAGES), cut(IMAGES)

    (trunk, features), (same, others) = at(1), at(2)
    assert torch.equal(trunk, same) and not torch.allclose(features, others)


def test_stages_that_are_not_there_or_leave_nothing_are_one_sentence(model: Model) -> None:
    known = stages_of(encoder(model))
    for wrong in ("blocks.99", "layer", ""):
        with pytest.raises(BadInput) as error:
            encoder(replace(model, frozen_until=wrong))
        assert str(error.value) == f"there is no stage {wrong!r} to freeze until: use one of {', '.join(known)}."
    with pytest.raises(BadInput, match=f"until '{known[-1]}' leaves no weight of the encoder to train"):
        encoder(replace(model, frozen_until=known[-1]))


@pytest.mark.parametrize("backbone", ["resnet-18", "efficientnet-lite0"])
def test_frozen_statistics_stay_in_training_mode(backbone: str) -> None:
    width = 4 if backbone == "resnet-18" else None
    model = Model(backbone, width=width, frozen_statistics=True, head_hidden=16, head_output=8)
    for kept in (True, False):
        student = Student(encoder(replace(model, frozen_statistics=kept)), model).eval().train()
        norms = [module for module in student.encoder.modules() if isinstance(module, nn.BatchNorm2d)]
        before = [norm.running_mean.clone() for norm in norms]
        assert student.training and student.encoder.training and student.projector[1].training
        assert all(norm.training is not kept for norm in norms)
        student(IMAGES)
        moved = [not torch.equal(norm.running_mean, old) for norm, old in zip(norms, before, strict=True)]
        assert not any(moved) if kept else all(moved)
        assert int(student.projector[1].num_batches_tracked) == 1  # the heads' own are not the encoder's


def test_another_family_has_other_stages() -> None:
    frozen_vit = Model("vit-micro", frozen_until="blocks.1")
    assert with_backbone(frozen_vit, "vit-mini").frozen_until == "blocks.1"
    assert with_backbone(frozen_vit, "resnet-18").frozen_until is None


def test_timms_are_frozen_until_a_module_but_not_cut() -> None:
    try:
        timm._timm()
    except BadInput:
        pytest.skip("timm is not installed")
    cut = encoder(Model("timm:test_resnet", frozen_until="layer2"))
    names = [name.removeprefix("backbone.") for name, _ in cut.named_parameters()]
    still = {name.removeprefix("backbone.") for name in frozen(cut)}
    assert still == {name for name in names if name.split(".")[0] in ("conv1", "bn1", "layer1", "layer2")}
    assert {"conv1", "layer1", "layer2"} <= {name.split(".")[0] for name in still} and not cut.has_trunk
    inner = encoder(Model("timm:test_resnet", frozen_until="layer2.0"))
    assert frozen(inner) <= frozen(cut) and frozen(inner)
    with pytest.raises(BadInput, match=r"no stage 'layer9' to freeze until: use one of conv1, .*layer4"):
        encoder(Model("timm:test_resnet", frozen_until="layer9"))
    with pytest.raises(BadInput, match="leaves no weight"):
        encoder(Model("timm:test_resnet", frozen_until="layer4"))
