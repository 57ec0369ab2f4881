from __future__ import annotations

import time
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from byov._core.errors import BadInput
from byov.backbones import build_encoder
from byov.backbones.vit import Size, ViT
from byov.config import Model
from byov.inference.run import (
    FEW,
    LEAST,
    at_this_draw,
    before_draws,
    features_of,
    has_trunk,
    outputs_of,
    shared_trunks,
)
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
def test_features_do_not_depend_on_threads(count: int) -> None:
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


# ------------------------------------------------------------------------------------------------------- frozen stages


@pytest.mark.parametrize("side", [8, 13])
@pytest.mark.parametrize(
    "model",
    [
        Model(width=16, depth=2, heads=2, patch=2),
        Model(width=16, depth=2, heads=2, patch=2, frozen_until="blocks.0"),
        Model("resnet-18", width=4, stem="cifar"),
        Model("resnet-18", width=4, stem="cifar", frozen_until="layer2"),
    ],
    ids=lambda model: f"{model.backbone}-{model.frozen_until}",
)
def test_what_comes_before_draws_and_the_rest_are_the_features(model: Model, side: int) -> None:
    torch.manual_seed(0)
    whole = build_encoder(model, (1, 8, 8))
    with torch.no_grad():
        whole(IMAGES)  # statistics
    posterior = Posterior(whole, init_log_variance=-4.0)
    images = torch.rand(70, 1, side, side, generator=torch.Generator().manual_seed(1))
    before = before_draws(posterior, images, 8, batch_size=32)
    assert has_trunk(posterior) == (model.frozen_until is not None) != (before.shape[1:] == (1, 8, 8))
    found = []
    for seed in (None, 1, 2):
        with torch.no_grad(), nullcontext() if seed is None else posterior.sampled(torch.manual_seed(seed)):
            expected = features_of(posterior, images, size=8)
            found.append(at_this_draw(posterior, before, batch_size=32))
        torch.testing.assert_close(found[-1], expected, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(found[0], found[1], atol=0.01) and not torch.allclose(found[1], found[2], atol=0.01)
    assert posterior.training and whole.training


def test_a_trunk_is_passed_once_for_all_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = build_encoder(Model(width=16, depth=2, heads=2, patch=2, frozen_until="blocks.0"), (1, 8, 8))
    posterior, passed = Posterior(whole), []
    monkeypatch.setattr(type(whole), "trunk", lambda self, images: passed.append(len(images)) or images.flatten(1))
    monkeypatch.setattr(type(whole), "after_trunk", lambda self, activations: activations)
    before = before_draws(posterior, IMAGES[:20], 8)
    for seed in range(3):
        with torch.no_grad(), posterior.sampled(torch.manual_seed(seed)):
            assert torch.equal(at_this_draw(posterior, before), IMAGES[:20].flatten(1))
    assert passed == [20]


def test_features_that_are_not_finite_are_refused() -> None:
    images = IMAGES.clone()
    images[7, 0, 0, 0] = float("nan")
    with pytest.raises(BadInput, match="features of 1 of 300 images are not finite"):
        features_of(encoder(), images)


@pytest.mark.parametrize(
    "model",
    [
        Model(width=16, depth=2, heads=2, patch=2, frozen_until="blocks.0"),
        Model("resnet-18", width=4, stem="cifar", frozen_until="layer2", frozen_statistics=True),
    ],
    ids=lambda model: model.backbone,
)
def test_runs_of_one_trunk_share_its_activations(model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def posterior(seed: int, scale: float = 1.0) -> Posterior:
        """The trunk's weights are those of seed 0, times a scale; the other means depend on the seed."""
        torch.manual_seed(0)
        found = Posterior(build_encoder(model, (1, 8, 8)), init_log_variance=-4.0)
        with torch.no_grad():
            found.means.add_(0.1 * seed)
            for parameter in found.module.parameters():
                parameter.mul_(scale)
        return found

    images, passed = IMAGES[:40], []
    kind = type(posterior(0).module)
    trunk = kind.trunk
    monkeypatch.setattr(kind, "trunk", lambda self, x: passed.append(len(x)) or trunk(self, x))
    runs = [posterior(0), posterior(1), posterior(1)]
    expected = [features_of(run, images, size=8) for run in runs]
    assert not torch.allclose(expected[0], expected[1], atol=0.01)
    with shared_trunks(tmp_path):
        for run, plain in zip(runs, expected, strict=True):
            advanced: list[int] = []
            found = features_of(run, images, advance=advanced.append, size=8)
            torch.testing.assert_close(found, plain, rtol=1e-4, atol=1e-5)
            assert sum(advanced) == 40
        with torch.no_grad(), runs[0].sampled(torch.manual_seed(3)):
            drawn = features_of(runs[0], images, size=8)
        assert sum(passed) == 40 and not torch.allclose(drawn, expected[0], atol=0.01)
        features_of(posterior(0, 1.5), images, size=8)  # another trunk
        features_of(runs[0], images[:30], size=8)  # other images
    assert sum(passed) == 40 + 40 + 30
    features_of(runs[0], images, size=8)  # shared only inside the block
    assert len(list(tmp_path.iterdir())) == 3
