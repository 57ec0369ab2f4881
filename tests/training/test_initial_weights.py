"""--init: from a state dict of torchvision or timm, wrapped or not; what does not fit is refused in one sentence."""

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from byov._core.errors import BadInput
from byov.backbones import build_encoder, timm
from byov.backbones._torchvision import import_torchvision
from byov.backbones.resnet import ResNet
from byov.config import Model
from byov.training.initial_weights import initialiser
from byov.training.learners import Classifier, Student

MODEL = Model("resnet-18", width=4, stem="imagenet", head_hidden=16, head_output=8)


def student(model: Model = MODEL, channels: int = 3, seed: int = 1) -> Student:
    torch.manual_seed(seed)
    return Student(build_encoder(model, (channels, 32, 32)), model)


def foreign(size: str = "18", **options: object) -> dict[str, Tensor]:
    """The state dict of a network that is not ours, with a classifier."""
    torch.manual_seed(0)
    network = ResNet(size, **{"width": 4, **options})
    network.fc = nn.Linear(network.features, 10)
    return network.state_dict()


def backbone(network: nn.Module) -> dict[str, Tensor]:
    return network.encoder.backbone.state_dict()


def equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return all(torch.equal(value, b[name]) for name, value in a.items())


def test_a_resnet_of_torchvision(tmp_path: Path) -> None:
    try:
        import_torchvision()
        from torchvision.models import resnet18
    except ImportError:
        pytest.skip("torchvision is not installed")
    theirs = resnet18()
    torch.save(theirs.state_dict(), tmp_path / "resnet18.pth")
    model = Model("resnet-18", stem="imagenet", head_hidden=16, head_output=8)
    network = student(model).eval()
    network.encoder.set_pixel_statistics(torch.full((3,), 0.3), torch.full((3,), 0.2))
    initialiser(str(tmp_path / "resnet18.pth"))(network)
    images = torch.rand(2, 3, 32, 32)
    theirs.fc = nn.Identity()
    torch.testing.assert_close(network.encoder(images), theirs.eval()((images - 0.3) / 0.2), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("container", "prefix"),
    [
        (None, ""),
        ("state_dict", ""),
        ("model", "module."),
        (None, "backbone."),
        ("state_dict", "module.encoder."),
        ("state_dict", "_orig_mod.model.backbone."),
        (None, "encoder.backbone."),
    ],
)
def test_wrappings_are_found(tmp_path: Path, container: str | None, prefix: str) -> None:
    weights = foreign()
    state: dict[str, object] = {prefix + name: value for name, value in weights.items()}
    state["momentum_encoder.conv1.weight"] = torch.zeros(1)  # another network next to it
    if container is not None:
        state = {container: state, "epoch": 3, "optimizer": {"lr": 0.1}}
    torch.save(state, tmp_path / "w.pt")
    network = student()
    heads = {name: value.clone() for name, value in network.projector.state_dict().items()}
    initialiser(str(tmp_path / "w.pt"))(network)
    assert equal(backbone(network), weights) and equal(heads, network.projector.state_dict())


def test_safetensors_and_old_files(tmp_path: Path) -> None:
    weights = {k: v for k, v in foreign().items() if not k.endswith("num_batches_tracked")}
    save_file(weights, tmp_path / "w.safetensors")
    network = student()
    mean = network.encoder.pixel_mean.clone()
    initialiser(str(tmp_path / "w.safetensors"))(network)
    assert equal({k: v for k, v in weights.items() if not k.startswith("fc.")}, backbone(network))
    assert torch.equal(network.encoder.pixel_mean, mean)  # the data's own: the file has none


def test_a_foreign_classifier_is_left_alone_but_ours_is_taken(tmp_path: Path) -> None:
    ours = Classifier(build_encoder(MODEL, (3, 32, 32)), 10)
    other = Classifier(build_encoder(MODEL, (3, 32, 32)), 10)
    head = {"classifier.weight": torch.ones(10, 32), "classifier.bias": torch.ones(10)}
    torch.save(foreign() | head, tmp_path / "w.pt")
    initialiser(str(tmp_path / "w.pt"))(ours)
    assert not (ours.classifier.weight == 1).any()
    torch.save(ours.state_dict(), tmp_path / "ours.pt")
    initialiser(str(tmp_path / "ours.pt"))(other)
    assert torch.equal(other.classifier.weight, ours.classifier.weight)


@pytest.mark.parametrize(
    ("weights", "model", "telling"),
    [
        ({"stem": "cifar"}, MODEL, "conv1.weight has shape"),
        ({"size": "34"}, MODEL, "layer1.2.conv1.weight, for which this model has no place"),
        ({"size": "50"}, MODEL, "do not fit"),
        ({}, Model("resnet-34", width=4, stem="imagenet"), "layer1.2.conv1.weight is missing"),
        ({}, Model("resnet-18", width=4, stem="imagenet", norm="group"), "bn1.running_mean, for which"),
        ({"norm": "group"}, MODEL, "bn1.running_mean is missing"),
        ({}, Model("vit-micro", patch=8), "do not fit"),
    ],
)
def test_what_does_not_fit_is_one_sentence(tmp_path: Path, weights: dict, model: Model, telling: str) -> None:
    torch.save(foreign(**weights), tmp_path / "w.pt")
    with pytest.raises(BadInput, match=telling) as error:
        initialiser(str(tmp_path / "w.pt"))(student(model))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["patch_embed.proj.weight", "conv_proj.weight"])
def test_a_foreign_vit_is_sent_to_timm(tmp_path: Path, name: str) -> None:
    torch.save({name: torch.zeros(3), "blocks.0.norm1.weight": torch.zeros(3)}, tmp_path / "w.pt")
    with pytest.raises(BadInput, match=r"--model.backbone timm:NAME"):
        initialiser(str(tmp_path / "w.pt"))(student(Model("vit-micro", patch=8)))


class Code:
    def __reduce__(self):  # what a hostile pickle would do
        return os.mkdir, ("harm",)


def test_a_pickle_with_code_is_refused_and_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"state_dict": foreign(), "hook": Code()}, "w.pt")
    with pytest.raises(BadInput, match="more than tensors"):
        initialiser("w.pt")
    assert not Path("harm").exists()


@pytest.mark.parametrize("content", [b"", b"no weights at all", b"PK\x03\x04 cut short"])
def test_a_damaged_file_is_one_sentence(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "w.pt").write_bytes(content)
    with pytest.raises(BadInput, match="cannot read weights") as error:
        initialiser(str(tmp_path / "w.pt"))
    assert "\n" not in str(error.value)


def test_a_file_without_a_state_dict(tmp_path: Path) -> None:
    torch.save(torch.zeros(3), tmp_path / "w.pt")
    with pytest.raises(BadInput, match="holds a Tensor"):
        initialiser(str(tmp_path / "w.pt"))


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch):
    """timm, with a hub that has the weights of seed 7 for every model."""
    try:
        library = timm._timm()
    except BadInput:
        pytest.skip("timm is not installed")
    create = library.create_model

    def create_model(name: str, pretrained: bool = False, **options: object) -> nn.Module:
        if pretrained:
            torch.manual_seed(7)
        return create(name, pretrained=False, **options)

    monkeypatch.setattr(library, "create_model", create_model)
    return create_model


@pytest.mark.parametrize(
    ("name", "model"),
    [
        ("test_resnet", Model("timm:test_resnet")),
        ("test_vit", Model("timm:test_vit")),
        ("test_convnext", Model("timm:test_convnext")),
        ("resnet18", Model("resnet-18", stem="imagenet")),  # timm's ResNet has our names
    ],
)
@pytest.mark.parametrize("channels", [3, 1])
def test_timms_weights(hub, name: str, model: Model, channels: int) -> None:
    network = student(model, channels)
    initialiser(f"timm:{name}")(network)
    sizes = {"img_size": 32} if "vit" in name else {}
    theirs = hub(name, pretrained=True, num_classes=0, in_chans=channels, **sizes)
    assert equal(backbone(network), theirs.state_dict())
    assert float(network.encoder.pixel_mean.mean()) == pytest.approx(sum(theirs.pretrained_cfg["mean"]) / 3)


def test_timms_weights_for_another_model_do_not_fit(hub) -> None:
    with pytest.raises(BadInput, match="do not fit"):
        initialiser("timm:test_resnet")(student())
    with pytest.raises(BadInput, match="another library's ViT"):
        initialiser("timm:test_vit")(student(Model("vit-micro", patch=8)))
    with pytest.raises(BadInput, match=r"no weights timm.*timm:NAME"):
        initialiser("timm")
