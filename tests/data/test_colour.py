"""Every colour operation against torchvision, image by image."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from byov.data.colour import (
    BRIGHTNESS,
    CONTRAST,
    HUE,
    SATURATION,
    blend_,
    grey_,
    jitter_,
    luma,
    shift_hue,
    solarise_,
)

NAMES = {BRIGHTNESS: "brightness", CONTRAST: "contrast", SATURATION: "saturation", HUE: "hue"}
FACTORS = torch.tensor([0.0, 0.6, 0.9, 1.0, 1.2, 1.4])
SHIFTS = torch.tensor([-0.5, -0.1, 0.02, 0.1, 0.3, 0.5])


def hard_images(channels: int = 3) -> Tensor:
    """Six images: random; grey; black below; few levels, so that channels tie; pure colours; almost grey."""
    images = torch.rand(6, channels, 16, 16, generator=torch.Generator().manual_seed(0))
    images[1] = images[1].mean(0)
    images[2, :, 8:] = 0
    images[3] = (images[3] * 2).round() / 2
    images[4] = images[4].round()
    images[5] = 0.5 + images[5] * 1e-6
    return images


def operate(functional: Any, image: Tensor, operation: int, factor: float) -> Tensor:
    return getattr(functional, f"adjust_{NAMES[operation]}")(image, factor)


@pytest.mark.parametrize(
    ("kind", "channels"), [(BRIGHTNESS, 3), (CONTRAST, 3), (SATURATION, 3), (BRIGHTNESS, 1), (CONTRAST, 1)]
)
def test_blends_as_torchvision(functional: Any, kind: int, channels: int) -> None:
    images = hard_images(channels)
    got = blend_(images.clone(), torch.full((6,), kind), FACTORS)
    want = torch.stack([operate(functional, images[i], kind, FACTORS[i].item()) for i in range(6)])
    torch.testing.assert_close(got, want, atol=1e-6, rtol=0)


def test_blends_each_image_in_its_own_way(functional: Any) -> None:
    images, kinds = hard_images(), torch.tensor([2, 1, 0, 2, 0, 1])
    got = blend_(images.clone(), kinds, FACTORS)
    want = [operate(functional, images[i], int(kinds[i]), FACTORS[i].item()) for i in range(6)]
    torch.testing.assert_close(got, torch.stack(want), atol=1e-6, rtol=0)


@pytest.mark.parametrize("turn", range(6))
def test_shifts_hue_as_torchvision(functional: Any, turn: int) -> None:
    images, shifts = hard_images(), SHIFTS.roll(turn)
    want = torch.stack([functional.adjust_hue(images[i], shifts[i].item()) for i in range(6)])
    torch.testing.assert_close(shift_hue(images, shifts), want, atol=1e-5, rtol=0)


def test_a_full_circle_of_hue_ends_where_it_began() -> None:
    images = hard_images()
    third = torch.full((6,), 1 / 3)
    torch.testing.assert_close(shift_hue(images, third), images.roll(1, dims=1), atol=1e-5, rtol=0)
    torch.testing.assert_close(shift_hue(images, third * 3), images, atol=1e-5, rtol=0)


@pytest.mark.parametrize("channels", [1, 3])
def test_jitters_in_all_orders_as_torchvision(functional: Any, channels: int) -> None:
    orders = torch.tensor(list(itertools.permutations(range(4))))
    images = hard_images(channels).repeat(4, 1, 1, 1)
    factors = torch.stack([FACTORS, FACTORS.flip(0), FACTORS.roll(2), SHIFTS], 1).repeat(4, 1)
    got = jitter_(images.clone(), orders, factors)
    for i, order in enumerate(orders.tolist()):
        want = images[i]
        for operation in order:
            want = operate(functional, want, operation, factors[i, operation].item())
        torch.testing.assert_close(got[i], want, atol=1e-5, rtol=0)


def test_neutral_factors_change_nothing() -> None:
    images = hard_images()
    orders = torch.tensor(list(itertools.permutations(range(4))))[:6]
    got = jitter_(images.clone(), orders, torch.tensor([1.0, 1.0, 1.0, 0.0]).repeat(6, 1))
    assert torch.equal(got, images)


def test_grey_as_torchvision(functional: Any) -> None:
    images = hard_images()
    torch.testing.assert_close(luma(images), functional.rgb_to_grayscale(images), atol=1e-6, rtol=0)
    chosen = torch.tensor([True, False, False, True, True, False])
    got = grey_(images.clone(), chosen)
    assert torch.equal(got[~chosen], images[~chosen])
    want = functional.rgb_to_grayscale(images[chosen], num_output_channels=3)
    torch.testing.assert_close(got[chosen], want, atol=1e-6, rtol=0)


def test_solarise_as_torchvision(functional: Any) -> None:
    images = hard_images()
    chosen = torch.tensor([True, False, True, True, True, False])
    got = solarise_(images.clone(), chosen)
    assert torch.equal(got[~chosen], images[~chosen])
    assert torch.equal(got[chosen], functional.solarize(images[chosen], 0.5))


def test_grey_images_have_no_colour_to_lose() -> None:
    images = hard_images(1)
    assert torch.equal(grey_(images.clone(), torch.ones(6, dtype=torch.bool)), images)
