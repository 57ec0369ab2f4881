"""The compiled loops of a CPU agree with the tensor operations of GPUs: same parameters, same views."""

from __future__ import annotations

import itertools
import subprocess
import sys
from hashlib import sha256
from inspect import getsource

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from byov._compiled import kernels
from byov._core import randomness
from byov._core.randomness import hashed_uniforms
from byov.config import View
from byov.data import compiled_views, transforms
from byov.data.compiled_views import hash_uniforms, make_views
from byov.data.transforms import Boxes
from byov.data.views import NUMBERS, Parameters, draw_parameters, fill_by_loops, fill_by_tensors, view

FULL = View(crop_area=(0.08, 1.0), flip=0.5, grey=0.2, blur=0.5, blur_sigma=(0.1, 2.0), solarise=0.2)


def images_of(count: int, channels: int, height: int, width: int) -> Tensor:
    generator = torch.Generator().manual_seed(height * width)
    return torch.randint(0, 256, (count, channels, height, width), dtype=torch.uint8, generator=generator)


def both(images: Tensor, parameters: Parameters, size: int) -> tuple[Tensor, Tensor]:
    outs = [torch.full((len(parameters.flip), images.shape[1], size, size), torch.nan) for _ in range(2)]
    for fill, out in zip((fill_by_loops, fill_by_tensors), outs, strict=True):
        fill(out, images, parameters)
    return outs[0], outs[1]


def plain(count: int, height: int, width: int) -> Parameters:
    """Parameters that leave whole images unchanged."""
    zeros, no = torch.zeros(count, dtype=torch.int64), torch.zeros(count, dtype=torch.bool)
    return Parameters(
        boxes=Boxes(zeros, zeros, zeros + height, zeros + width),
        flip=no,
        order=torch.arange(4).repeat(count, 1),
        factors=torch.tensor([1.0, 1.0, 1.0, 0.0]).repeat(count, 1),
        grey=no,
        blur=no,
        sigma=torch.ones(count),
        solarise=no,
    )


@settings(max_examples=60, deadline=None)
@given(
    channels=st.sampled_from([1, 3]),
    height=st.integers(2, 130),
    width=st.integers(2, 130),
    size=st.sampled_from([8, 28, 32, 64, 96]),
    seed=st.integers(0, 1000),
)
def test_drawn_views_are_the_same(channels: int, height: int, width: int, size: int, seed: int) -> None:
    """Enlarged, reduced by up to 16, not square; two views per image."""
    images = images_of(4, channels, height, width)
    drawn = draw_parameters(torch.arange(4), (FULL, FULL), height, width, ((seed, 0), (seed, 1)))
    torch.testing.assert_close(*both(images, drawn, size), atol=1e-5, rtol=0)


@pytest.mark.parametrize("size", [192, 224])
def test_large_views_are_the_same(size: int) -> None:
    images = images_of(8, 3, 224, 224)
    drawn = draw_parameters(torch.arange(8), (FULL,), 224, 224, ((0,),))
    torch.testing.assert_close(*both(images, drawn, size), atol=1e-5, rtol=0)


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("side", [8, 28, 32, 64, 96])
def test_all_orders_are_the_same(channels: int, side: int) -> None:
    orders = torch.tensor(list(itertools.permutations(range(4))))
    uniform = torch.rand(24, 4, generator=torch.Generator().manual_seed(side))
    factors = torch.tensor([0.0, 0.0, 0.0, -0.5]) + uniform * torch.tensor([2.0, 2.0, 2.0, 1.0])
    images = images_of(24, channels, side, side)
    images[::3] = images[::3] // 128 * 255  # pure colours: channels tie
    images[1::3] = images[1::3, :1]  # grey
    parameters = plain(24, side, side)._replace(order=orders, factors=factors, grey=torch.arange(24) % 5 == 0)
    torch.testing.assert_close(*both(images, parameters, side), atol=1e-5, rtol=0)


@pytest.mark.parametrize("size", [8, 32, 64, 224])
def test_blurs_are_the_same(size: int) -> None:
    images, chosen = images_of(6, 3, size, size), torch.ones(6, dtype=torch.bool)
    parameters = plain(6, size, size)._replace(blur=chosen, sigma=torch.tensor([0.1, 0.2, 0.5, 1.0, 2.0, 9.0]))
    torch.testing.assert_close(*both(images, parameters, size), atol=1e-5, rtol=0)


@settings(deadline=None)
@given(st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=5), st.integers(-(2**63), 2**63 - 1))
def test_the_hash_is_the_same_bit_for_bit(ids: list[int], seed: int) -> None:
    rows, seeds, got = torch.tensor(ids), torch.full((len(ids),), seed), torch.empty(len(ids), NUMBERS)
    hash_uniforms(rows.numpy(), seeds.numpy(), got.numpy())
    assert torch.equal(got, hashed_uniforms(rows, seeds, NUMBERS))


def test_a_box_beyond_the_image_is_an_error() -> None:
    """Compiled loops do not check indices, so they would read beyond the image."""
    parameters = plain(1, 8, 8)._replace(boxes=Boxes(*(torch.tensor([value]) for value in (1, 0, 8, 8))))
    with pytest.raises(ValueError, match="box"):
        make_views(torch.empty(1, 3, 8, 8).numpy(), images_of(1, 3, 8, 8).numpy(), parameters.arrays(1), 0, 1)


def test_numba_is_imported_with_the_first_view_only() -> None:
    check = "import sys, byov, byov.cli.main, byov.training.loop, byov.data.views; assert 'numba' not in sys.modules"
    subprocess.run([sys.executable, "-c", check], check=True)


def test_what_is_compiled_in_from_other_files_is_named_here() -> None:
    # numba caches a loop until its own file changes: if this fails, write the new digest into compiled_views.py
    taken = transforms.LUMA, randomness.MIX, randomness.GAMMA, getsource(transforms.blur_kernel_size), kernels.OPTIONS
    assert sha256(repr(taken).encode()).hexdigest()[:16] == compiled_views.ELSEWHERE


def test_parameters_of_other_images_and_unknown_operations_are_refused() -> None:
    images, parameters, out = images_of(3, 3, 8, 8), plain(3, 8, 8), torch.empty(3, 3, 8, 8)
    with pytest.raises(ValueError, match="do not fit 3 views"):
        fill_by_loops(out, images, parameters._replace(factors=parameters.factors[:, :3]))
    with pytest.raises(ValueError, match="do not fit 3 views"):
        fill_by_loops(out, images, parameters._replace(grey=parameters.grey[:2]))
    with pytest.raises(ValueError, match="an unknown operation"):
        fill_by_loops(out, images, parameters._replace(order=parameters.order + 1))


def test_the_default_dtype_does_not_matter() -> None:
    images, ids = images_of(6, 3, 16, 16), torch.arange(6)
    expected = view(images, ids, FULL, 16, 1)
    torch.set_default_dtype(torch.float64)
    try:
        got = view(images, ids, FULL, 16, 1)
    finally:
        torch.set_default_dtype(torch.float32)
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-6)
