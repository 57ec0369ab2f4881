"""The folded copy of a network: the same features, and the network stays what it is."""

import copy

import pytest
import torch
from test_efficientnet_lite import scrambled
from torch import nn

from byov.backbones import build_encoder
from byov.backbones.folded_copy import inference_copy
from byov.config import Model
from byov.posterior import Posterior

CONVOLUTIONAL = [
    Model("efficientnet-lite0"),
    Model("resnet-18", width=4, stem="cifar"),
    Model("resnet-50", width=4, stem="imagenet"),
]
IMAGES = torch.rand(3, 3, 40, 40, generator=torch.Generator().manual_seed(0))


def encoder(model: Model) -> nn.Module:
    torch.manual_seed(0)
    return scrambled(build_encoder(model, (3, 40, 40)), (3, 40, 40))


@pytest.fixture(params=CONVOLUTIONAL, ids=lambda model: model.backbone)
def network(request: pytest.FixtureRequest) -> nn.Module:
    return encoder(request.param)


def norms(network: nn.Module) -> list[nn.Module]:
    return [module for module in network.modules() if isinstance(module, nn.BatchNorm2d)]


@torch.no_grad()
def test_a_copy_without_norms_gives_the_same(network: nn.Module) -> None:
    before = copy.deepcopy(network.state_dict())
    expected = network(IMAGES)
    assert float(expected.std(0).mean()) > 0.01
    twin = inference_copy(network)
    assert twin is not network and norms(network) and not norms(twin)
    assert not twin.training and not any(parameter.requires_grad for parameter in twin.parameters())
    torch.testing.assert_close(twin(IMAGES), expected, rtol=1e-3, atol=1e-4 * float(expected.abs().max()))
    torch.testing.assert_close(network(IMAGES), expected)
    assert network.state_dict().keys() == before.keys()
    assert all(torch.equal(value, before[name]) for name, value in network.state_dict().items())
    assert all(parameter.requires_grad for parameter in network.parameters())


def test_of_a_network_in_training_mode_it_is_what_evaluation_gives(network: nn.Module) -> None:
    before = [norm.running_mean.clone() for norm in norms(network)]
    with torch.no_grad():
        expected = network(IMAGES)
        network.train()
        twin = inference_copy(network)
        assert network.training and not twin.training
        torch.testing.assert_close(twin(IMAGES), expected, rtol=1e-3, atol=1e-4 * float(expected.abs().max()))
    assert all(torch.equal(norm.running_mean, old) for norm, old in zip(norms(network), before, strict=True))


@torch.no_grad()
def test_at_a_draw(network: nn.Module) -> None:
    posterior = Posterior(network, init_log_variance=-9.0)
    at_means = posterior(IMAGES)
    for seed in (1, 2):
        with posterior.sampled(torch.Generator().manual_seed(seed)):
            expected = posterior(IMAGES)
            twin = inference_copy(posterior)
        size = float(expected.abs().max())
        assert not torch.allclose(expected, at_means, atol=1e-3 * size)
        # after the block too: the copy keeps its draw, the posterior is back at its means
        torch.testing.assert_close(twin(IMAGES), expected, rtol=1e-3, atol=1e-4 * size)
    torch.testing.assert_close(posterior(IMAGES), at_means)
    torch.testing.assert_close(inference_copy(posterior)(IMAGES), at_means, rtol=1e-3, atol=1e-4 * size)


@pytest.mark.parametrize(
    "model", [Model(width=16, depth=1, heads=2, patch=8), Model("resnet-18", width=4, norm="group")]
)
def test_where_nothing_can_be_folded_it_is_the_network_itself(model: Model) -> None:
    network = encoder(model)
    assert inference_copy(network) is network
    posterior = Posterior(network)
    assert inference_copy(posterior) is posterior
    foreign = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))  # not ours: who knows what its forward does
    assert inference_copy(foreign) is foreign
