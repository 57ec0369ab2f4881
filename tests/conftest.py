"""What tests of several rooms share."""

import resource
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import pytest
import torch


@pytest.fixture
def files_up_to() -> Callable[[int], AbstractContextManager[None]]:
    """files_up_to(size): within the block no file may grow beyond `size` bytes, as on a full disk."""

    @contextmanager
    def limited(size: int) -> Iterator[None]:
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    return limited


@pytest.fixture(autouse=True)
def threads_of_before() -> Iterator[None]:
    """--threads is for the whole process: what a command has set does not reach the next test."""
    before = torch.get_num_threads()
    yield
    if torch.get_num_threads() != before:
        torch.set_num_threads(before)
