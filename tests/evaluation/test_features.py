from __future__ import annotations

import time

import pytest
import torch
from torch import Tensor, nn

from byov.backbones.vit import Size, ViT
from byov.evaluation.features import FEW, LEAST, features_of, outputs_of
from byov.posterior import Posterior

IMAGES = torch.rand(300, 1, 8, 8, generator=torch.Generator().manual_seed(0))


def encoder() -> ViT:
    torch.manual_seed(0)
    return ViT((8, 8), 2, 1, Size(16, 2, 2))


class Seen(nn.Module):
    """Gives out the sums of images, and keeps how many came at a time, and under which modes."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: list[int] = []
        self.modes: set[tuple[bool, bool]] = set()

    def forward(self, images: Tensor) -> Tensor:
        self.counts.append(len(images))
        self.modes.add((self.training, torch.is_grad_enabled()))
        return images.sum((1, 2, 3))[:, None]


@pytest.mark.parametrize("count", [2, 3, FEW + 1])
def test_features_do_not_hang_on_the_threads(count: int) -> None:
    network = encoder()
    torch.set_num_threads(1)
    expected = features_of(network, IMAGES)
    torch.set_num_threads(count)
    torch.testing.assert_close(features_of(network, IMAGES), expected, rtol=1e-5, atol=1e-6)


def test_cores_of_their_own_see_the_draw() -> None:
    posterior = Posterior(encoder(), init_log_variance=-4.0)
    found = []
    for count in (1, 2):
        torch.set_num_threads(count)
        with torch.no_grad(), posterior.sampled(torch.Generator().manual_seed(1)):
            found.append(features_of(posterior, IMAGES))
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-6)
    assert not torch.allclose(found[0], features_of(posterior, IMAGES), atol=0.01)


@pytest.mark.parametrize("count", [1, 2])
def test_all_images_come_once_in_order_in_evaluation_mode_without_autograd(count: int) -> None:
    torch.set_num_threads(count)
    network, told = Seen(), []
    found = features_of(network, IMAGES, 100, told.append)
    torch.testing.assert_close(found[:, 0], IMAGES.sum((1, 2, 3)))
    assert sum(told) == sum(network.counts) == 300 and max(network.counts) <= 100 // count
    assert network.modes == {(False, False)} and network.training


def test_batches_are_never_larger_than_asked_for_and_small_ones_are_not_split() -> None:
    torch.set_num_threads(2)
    for batch, largest in ((7, 7), (LEAST + 8, LEAST)):
        network = Seen()
        features_of(network, IMAGES, batch)
        assert max(network.counts) == largest
    network = Seen()
    features_of(network, IMAGES[: 2 * LEAST - 1])
    assert network.counts == [2 * LEAST - 1]


def test_few_images_are_shared_by_all_cores() -> None:
    torch.set_num_threads(2)
    network = Seen()
    features_of(network, IMAGES[:256], 512)
    assert network.counts == [128, 128]


def test_nothing_is_under_way_any_more_after_an_interrupt() -> None:
    """Else a forward would meet a network in training mode, and change its statistics."""

    class Slow(nn.BatchNorm2d):
        def forward(self, images: Tensor) -> Tensor:
            time.sleep(0.05)
            return super().forward(images)

    def interrupt(count: int) -> None:
        raise KeyboardInterrupt

    torch.set_num_threads(2)
    network = Slow(1)
    with pytest.raises(KeyboardInterrupt):
        features_of(network, IMAGES, 64, interrupt)
    time.sleep(0.3)
    assert network.training and network.num_batches_tracked == 0


@pytest.mark.parametrize("count", [1, 2])
def test_a_failure_is_raised_and_leaves_the_mode_alone(count: int) -> None:
    torch.set_num_threads(count)
    network = encoder()
    with pytest.raises(RuntimeError):
        list(outputs_of(network, IMAGES[:, :, :7]))
    assert network.training
