"""Fixtures of the tests of views and shifts."""

from typing import Any

import pytest

from byov.backbones._torchvision import import_torchvision


@pytest.fixture(scope="session")
def functional() -> Any:
    """torchvision's operations, to compare image by image."""
    try:
        return import_torchvision().transforms.v2.functional
    except ModuleNotFoundError:
        pytest.skip("torchvision is not installed")
