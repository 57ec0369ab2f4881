"""Crop, resize, flip and blur against torchvision, image by image."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from byov._torchvision import import_torchvision
from byov.data import resample
from byov.data.resample import Boxes, blur_kernel_size, gaussian_blur, resize_matrices, resized_crop

Resizer = Callable[[Tensor, Boxes, Tensor, int], Tensor]


@pytest.fixture(scope="module")
def functional() -> Any:
    pytest.importorskip("importlib.metadata").distribution
    try:
        return import_torchvision().transforms.v2.functional
    except ModuleNotFoundError:
        pytest.skip("torchvision is not installed")


def random_images(batch: int, channels: int, height: int, width: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (batch, channels, height, width), dtype=torch.uint8, generator=generator)
