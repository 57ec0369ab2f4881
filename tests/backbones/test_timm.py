"""timm's models as backbones. Its smallest ones, `test_*`, have no use but this."""

import importlib
import sys

import pytest
import torch
from torch import nn

import byov
from byov._core.errors import BadInput
from byov.backbones import build_encoder, timm
from byov.config import Model


@pytest.fixture(scope="module")
def library():
    try:
        return timm._timm()
    except BadInput:
        pytest.skip("timm is not installed")


@pytest.mark.parametrize(
    ("name", "shape", "features"),
    [
        ("test_resnet", (3, 32, 32), 96),
        ("test_vit", (1, 32, 32), 64),
        ("test_efficientnet", (3, 40, 40), 256),
        ("mobilenetv3_small_050", (3, 32, 32), 1024),  # more features than num_features says
    ],
)
def test_features_without_a_classifier(library, name: str, shape: tuple[int, int, int], features: int) -> None:
    encoder = build_encoder(Model(f"timm:{name}"), shape)
    assert encoder.features == features and encoder(torch.rand(2, *shape)).shape == (2, features)
    assert encoder.training and all(module.training for module in encoder.modules())
    assert all(module.p == 0 for module in encoder.modules() if isinstance(module, nn.Dropout))
    assert not any(getattr(module, "drop_prob", 0) for module in encoder.modules())


def test_parameters_keep_timms_names(library) -> None:
    theirs = library.create_model("test_resnet", num_classes=0)
    encoder = build_encoder(Model("timm:test_resnet"), (3, 32, 32))
    encoder.backbone.load_state_dict(theirs.state_dict())
    images = torch.rand(2, 3, 32, 32)
    encoder.set_pixel_statistics(torch.zeros(3), torch.ones(3))
    torch.testing.assert_close(encoder.eval()(images), theirs.eval()(images))


def test_norms_of_timms_own_are_norms(library) -> None:
    kinds = {
        s.name: s.kind
        for s in byov.Posterior(build_encoder(Model("timm:test_efficientnet_evos"), (3, 32, 32))).segments
    }
    assert {kind for name, kind in kinds.items() if ".bn" in name} == {"norm"}
    assert kinds["backbone.conv_stem.weight"] == "weight"


@pytest.mark.parametrize(
    ("name", "shape", "telling"),
    [
        ("no_such_model", (3, 32, 32), "timm has no model 'no_such_model'"),
        ("resnet-18", (3, 32, 32), r"did you mean timm:resnet18.*\?$"),
        ("test_vit", (3, 8, 8), "8 x 8"),
    ],
)
def test_what_cannot_work_is_one_sentence(library, name: str, shape: tuple[int, int, int], telling: str) -> None:
    with pytest.raises(BadInput, match=telling) as error:
        build_encoder(Model(f"timm:{name}"), shape)
    assert "\n" not in str(error.value)


def test_missing_timm_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "timm", None)  # import raises ImportError
    with pytest.raises(BadInput, match=r"pip install 'byov-torch\[timm\]'"):
        build_encoder(Model("timm:resnet18"), (3, 32, 32))


def test_pretrained_weights_bring_their_pixel_statistics(library, monkeypatch: pytest.MonkeyPatch) -> None:
    create = library.create_model

    def without_hub(name: str, pretrained: bool, **options: object) -> nn.Module:
        torch.manual_seed(7)
        return create(name, pretrained=False, **options)

    monkeypatch.setattr(library, "create_model", without_hub)
    for channels in (3, 1):
        weights = timm.pretrained("timm:resnet10t", (channels, 32, 32))
        assert weights["conv1.0.weight"].shape[1] == channels
        mean = torch.tensor([0.485, 0.456, 0.406])
        expected = mean if channels == 3 else mean.mean().reshape(1)
        torch.testing.assert_close(weights["pixel_mean"].flatten(), expected)


def test_weights_out_of_reach_are_one_sentence(library, monkeypatch: pytest.MonkeyPatch) -> None:
    constants = importlib.import_module("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(BadInput, match="cannot be downloaded") as error:
        timm.pretrained("timm:test_vit", (3, 32, 32))
    assert "\n" not in str(error.value)
