"""Crop, resize, flip and blur against torchvision, image by image."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from byov.backbones._torchvision import import_torchvision
from byov.data.resample import (
    Boxes,
    blur_,
    blur_kernel_size,
    gaussian_blur,
    resize_matrices,
    resized,
    resized_crop,
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
    assert torch.equal(resized(images[2:4], size), got[2:4])  # whatever the batch


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
