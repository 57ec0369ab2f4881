"""ResNets against torchvision's, and what theirs have not: the small stem, weight standardisation, no norm."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import byov
from byov.backbones import build_encoder
from byov.backbones._torchvision import import_torchvision
from byov.backbones.resnet import SIZES, NoNorm, ResNet, StandardisedConv2d, group_norm
from byov.config import Model


def torchvisions(size: str) -> nn.Module:
    try:
        import_torchvision()
        import torchvision.models
    except ImportError:
        pytest.skip("torchvision is not installed")
    torch.manual_seed(0)
    network = getattr(torchvision.models, f"resnet{size}")()
    network.fc = nn.Identity()
    for module in network.modules():  # running statistics as if trained
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.running_mean, -0.1, 0.1)
            nn.init.uniform_(module.running_var, 0.5, 1.5)
    return network


@pytest.mark.parametrize("size", ["18", "50"])
@pytest.mark.parametrize("training", [False, True])
def test_equals_torchvisions_with_the_same_weights(size: str, training: bool) -> None:
    theirs = torchvisions(size).train(training)
    ours = ResNet(size).train(training)
    ours.load_state_dict(theirs.state_dict())  # strict: the names are the same
    images = torch.randn(3, 3, 64, 64)
    torch.testing.assert_close(ours(images), theirs(images), rtol=1e-5, atol=1e-5)
    assert ours.features == (512 if size == "18" else 2048)


@pytest.mark.parametrize("size", list(SIZES))
def test_every_size_has_torchvisions_parameters(size: str) -> None:
    with torch.device("meta"):
        ours = ResNet(size)
    shapes = {name: tuple(value.shape) for name, value in torchvisions(size).state_dict().items()}
    assert {name: tuple(value.shape) for name, value in ours.state_dict().items()} == shapes


@pytest.mark.parametrize(("stem", "side"), [("imagenet", 2), ("cifar", 8)])
def test_stems(stem: str, side: int) -> None:
    network = ResNet("18", channels=1, width=8, stem=stem)
    seen: list[Tensor] = []
    network.layer1.register_forward_hook(lambda module, inputs, output: seen.append(inputs[0]))
    assert network(torch.randn(2, 1, 8, 8)).shape == (2, 64)
    assert seen[0].shape == (2, 8, side, side)


@pytest.mark.parametrize(
    ("model", "shape", "features"),
    [
        (Model("resnet-18", width=16), (3, 32, 32), 128),
        (Model("resnet-50", width=4), (1, 28, 28), 128),
        (Model("resnet-34", width=6, stem="imagenet", norm="group"), (3, 33, 33), 48),
        (Model("resnet-18", width=5, norm="none"), (1, 8, 8), 40),
    ],
)
def test_encoders_of_any_width_and_image(model: Model, shape: tuple[int, int, int], features: int) -> None:
    encoder = build_encoder(model, shape)
    assert encoder.features == features and encoder(torch.rand(2, *shape)).shape == (2, features)


def test_groups_divide_and_hold_four_channels() -> None:
    assert [group_norm(channels).num_groups for channels in (64, 256, 16, 12, 9, 2)] == [16, 16, 4, 3, 1, 1]


def test_weight_standardisation_by_hand_and_at_a_draw() -> None:
    torch.manual_seed(0)
    layer = StandardisedConv2d(3, 4, 3, bias=False)
    x = torch.randn(2, 3, 6, 6)

    def by_hand(weight: Tensor) -> Tensor:
        filters = [(w - w.mean()) / w.std(correction=0) for w in weight]
        return F.conv2d(x, torch.stack(filters))

    torch.testing.assert_close(layer(x), by_hand(layer.weight))
    torch.testing.assert_close(layer(x), StandardisedConv2d.forward(_scaled(layer, 3.0), x))
    posterior = byov.Posterior(layer, init_log_variance=-2.0)
    with posterior.sampled(torch.Generator().manual_seed(0)):
        drawn = layer.weight
        torch.testing.assert_close(posterior(x), by_hand(drawn))
        posterior(x).square().sum().backward()
    assert not torch.equal(drawn, posterior.means.view_as(drawn)) and float(posterior.means.grad.norm()) > 0


def _scaled(layer: nn.Conv2d, factor: float) -> nn.Conv2d:
    twin = StandardisedConv2d(layer.in_channels, layer.out_channels, 3, bias=False)
    with torch.no_grad():
        twin.weight.copy_(layer.weight * factor)
    return twin


@pytest.mark.parametrize("norm", ["batch", "group", "none"])
@pytest.mark.parametrize("size", ["18", "50"])
def test_the_signal_keeps_its_scale(norm: str, size: str) -> None:
    torch.manual_seed(0)
    network = ResNet(size, width=16, stem="cifar", norm=norm)
    with torch.no_grad():
        features = network(torch.randn(4, 3, 32, 32))
    assert 0.05 < float(features.square().mean().sqrt()) < 5


def test_kinds_are_what_lars_and_weight_decay_need() -> None:
    for norm in ("batch", "group", "none"):
        posterior = byov.Posterior(ResNet("18", width=4, norm=norm))
        kinds = {segment.name: segment.kind for segment in posterior.segments}
        assert {kind for name, kind in kinds.items() if "bn" in name or "downsample.1" in name} == {"norm"}
        assert {kind for name, kind in kinds.items() if "conv" in name or "downsample.0" in name} == {"weight"}


@pytest.mark.parametrize("norm", ["batch", "group", "none"])
def test_learns_with_any_norm(norm: str) -> None:
    """Forty steps on eight images. At this learning rate, `none` with branches that start at 1 ends in NaN."""
    torch.manual_seed(0)
    network = nn.Sequential(ResNet("18", width=8, stem="cifar", norm=norm), nn.Linear(64, 8))
    optimizer = torch.optim.SGD(network.parameters(), lr=0.02, momentum=0.9)
    images, labels = torch.randn(8, 3, 16, 16), torch.arange(8)
    losses = []
    for _ in range(40):
        loss = F.cross_entropy(network(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert all(torch.isfinite(torch.tensor(losses))) and losses[-1] < 0.5 * losses[0]


def test_no_norm_has_no_statistics() -> None:
    layer = NoNorm(2)
    assert torch.equal(layer(torch.ones(1, 2, 3, 3)), torch.ones(1, 2, 3, 3)) and not list(layer.buffers())
