"""Every operation against torchvision, image by image."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from byov.backbones._torchvision import import_torchvision
from byov.data.transforms import (
    BRIGHTNESS,
    CONTRAST,
    HUE,
    SATURATION,
    Boxes,
    blend_,
    blur_,
    blur_kernel_size,
    gaussian_blur,
    grey_,
    jitter_,
    luma,
    resize_matrices,
    resized,
    resized_crop,
    shift_hue,
    solarise_,
)


def random_images(batch: int, channels: int, height: int, width: int) -> Tensor:
    generator = torch.Generator().manual_seed(height * width)
    return torch.randint(0, 256, (batch, channels, height, width), dtype=torch.uint8, generator=generator)


def random_boxes(batch: int, height: int, width: int) -> Boxes:
    """Boxes of all sizes; the first is the whole image, the second one pixel, the third the lower right corner."""
    generator = torch.Generator().manual_seed(1)
    heights = torch.randint(1, height + 1, (batch,), generator=generator)
    widths = torch.randint(1, width + 1, (batch,), generator=generator)
    heights[:3], widths[:3] = torch.tensor([height, 1, 2]), torch.tensor([width, 1, 2])
    top = (torch.rand(batch, generator=generator) * (height - heights + 1)).long()
    left = (torch.rand(batch, generator=generator) * (width - widths + 1)).long()
    top[2], left[2] = height - 2, width - 2
    return Boxes(top, left, heights, widths)


@pytest.mark.parametrize(
    ("channels", "height", "width", "size"),
    [(3, 32, 32, 32), (1, 8, 8, 8), (3, 40, 70, 16), (3, 20, 30, 64), (1, 28, 28, 32), (3, 110, 120, 100)],
)
def test_crops_as_torchvision(functional: Any, channels: int, height: int, width: int, size: int) -> None:
    images, boxes = random_images(12, channels, height, width), random_boxes(12, height, width)
    flip = torch.arange(12) % 2 == 0
    got = resized_crop(images, boxes, flip, torch.empty(12, channels, size, size))
    for i, box in enumerate(zip(*(field.tolist() for field in boxes), strict=True)):
        mode = import_torchvision().transforms.InterpolationMode.BICUBIC
        want = functional.resized_crop(images[i] / 255, *box, [size, size], interpolation=mode, antialias=True)
        want = functional.horizontal_flip(want) if flip[i] else want
        torch.testing.assert_close(got[i], want.clamp(0, 1), atol=1e-5, rtol=0)


@pytest.mark.parametrize(("side", "size"), [(96, 64), (32, 16), (16, 32), (9, 9)])
def test_resizes_as_torchvision(functional: Any, side: int, size: int) -> None:
    images, mode = random_images(5, 3, side, side), import_torchvision().transforms.InterpolationMode.BICUBIC
    got = resized(images, size)
    want = functional.resize(images / 255, [size, size], interpolation=mode, antialias=True).clamp(0, 1)
    assert got.dtype == torch.uint8 and (got - want * 255).abs().max() <= 0.51
    torch.testing.assert_close(resized(images / 255, size), want, atol=1e-5, rtol=0)
    assert torch.equal(resized(images[2:4], size), got[2:4])  # in any batch


def test_resize_matrices_keep_a_constant_and_stay_in_the_box() -> None:
    start, length = torch.tensor([0, 3, 7]), torch.tensor([10, 5, 3])
    matrices = resize_matrices(start, length, torch.zeros(3, dtype=torch.bool), 6, 10)
    torch.testing.assert_close(matrices.sum(2), torch.ones(3, 6))
    column = torch.arange(10)
    outside = (column < start[:, None]) | (column >= (start + length)[:, None])
    assert matrices.abs().sum(1)[outside].max() == 0


def test_a_flip_reverses_the_matrix() -> None:
    start, length = torch.tensor([2, 2]), torch.tensor([7, 7])
    matrices = resize_matrices(start, length, torch.tensor([False, True]), 9, 12)
    torch.testing.assert_close(matrices[0].flip(0), matrices[1], atol=0, rtol=0)


@pytest.mark.parametrize(("channels", "size"), [(3, 32), (1, 8), (3, 64), (1, 224)])
def test_blurs_as_torchvision(functional: Any, channels: int, size: int) -> None:
    images = random_images(5, channels, size, size) / 255
    sigma = torch.tensor([0.1, 0.3, 0.7, 1.3, 2.0])
    got = gaussian_blur(images, sigma)
    taps = blur_kernel_size(size)
    for i in range(5):
        want = functional.gaussian_blur(images[i], [taps, taps], [sigma[i].item()])
        torch.testing.assert_close(got[i], want, atol=1e-5, rtol=0)


def test_the_kernel_is_a_tenth_of_the_side_and_odd() -> None:
    assert [blur_kernel_size(size) for size in (8, 32, 64, 96, 224)] == [3, 3, 7, 9, 23]


@pytest.mark.parametrize("chosen", [[True, False, True], [False] * 3, [True] * 3])
def test_blurs_the_chosen_only(chosen: list[bool]) -> None:
    images, sigma = torch.rand(3, 3, 32, 32), torch.tensor([0.5, 1.0, 2.0])
    want = torch.where(torch.tensor(chosen)[:, None, None, None], gaussian_blur(images, sigma), images)
    torch.testing.assert_close(blur_(images.clone(), sigma, torch.tensor(chosen)), want)


# --------------------------------------------------------------------------------------------------------------- colour

NAMES = {BRIGHTNESS: "brightness", CONTRAST: "contrast", SATURATION: "saturation", HUE: "hue"}
FACTORS = torch.tensor([0.0, 0.6, 0.9, 1.0, 1.2, 1.4])
SHIFTS = torch.tensor([-0.5, -0.1, 0.02, 0.1, 0.3, 0.5])


def hard_images(channels: int = 3) -> Tensor:
    """Six images: random; grey; lower half black; few levels, so that channels tie; pure colours; almost grey."""
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
