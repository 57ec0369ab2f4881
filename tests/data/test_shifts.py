"""Shifts: which strength an image meets, and that its own number, the seed and the shift decide everything."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.datasets import load_sample_image
from torch import Tensor

from byov._core.errors import BadInput
from byov.data import shifts
from byov.data.resample import resized
from byov.data.shifts import SEVERITIES, SHIFTS, shifted

PLAIN = {"blur", "brightness", "contrast", "solarise", "posterise", "jpeg"}  # nothing random
COINS = {"shear": 4, "rotation": 2, "saturation": 2, "hue": 2}  # how many ways there are
COLOUR = {"saturation", "hue"}


def images_of(batch: int, channels: int = 3, height: int = 32, width: int = 32) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, (batch, channels, height, width), dtype=torch.uint8, generator=generator)


@pytest.fixture(scope="module")
def photos() -> Tensor:
    """Two photographs, cut square: uint8 (2, 3, 427, 427)."""
    pictures = [load_sample_image(name)[:, 100:527] for name in ("china.jpg", "flower.jpg")]
    return torch.from_numpy(np.stack(pictures)).permute(0, 3, 1, 2).contiguous()


def test_all_fifteen_are_there() -> None:
    noises = {"salt_pepper", "gaussian_noise", "shot_noise"}
    moves = {"shear", "rotation", "translation"}
    light = {"brightness", "contrast", "saturation", "hue", "solarise", "posterise"}
    assert set(SHIFTS) == noises | moves | light | {"blur", "jpeg", "occlusion"}
    assert all(len(five) == len(SEVERITIES) for shift in SHIFTS.values() for five in shift.strengths.values())


@pytest.mark.parametrize(
    ("name", "side", "severity", "strength"),
    [
        ("gaussian_noise", 32, 5, 0.10),  # CIFAR-10-C
        ("gaussian_noise", 64, 5, 0.18),  # Tiny-ImageNet-C
        ("gaussian_noise", 224, 5, 0.38),  # ImageNet-C
        ("shot_noise", 8, 1, 500),
        ("shot_noise", 45, 1, 500),  # 32 and 64 are equally near at 45.3
        ("shot_noise", 46, 1, 250),
        ("shot_noise", 119, 3, 50),  # 64 and 224 at 119.7
        ("shot_noise", 120, 3, 12),
        ("jpeg", 500, 5, 7),
        ("blur", 16, 5, 0.7),
        ("blur", 17, 5, 1.0),
        ("rotation", 8, 3, 30),
        ("rotation", 224, 3, 30),
    ],
)
def test_the_strength_is_that_of_the_nearest_side(name: str, side: int, severity: int, strength: float) -> None:
    assert SHIFTS[name].strength(severity, side) == strength


def test_the_shorter_side_decides() -> None:
    images = images_of(2, 3, 40, 200)
    want = SHIFTS["solarise"].corrupt(images, 64, lambda count: torch.empty(2, count))
    assert torch.equal(shifted(images, torch.arange(2), "solarise", 5, 0), want)
    blurred = SHIFTS["blur"].corrupt(images, 1.0, lambda count: torch.empty(2, count))  # CIFAR-10-C's fifth
    assert torch.equal(shifted(images, torch.arange(2), "blur", 5, 0), blurred)


@pytest.mark.parametrize("name", SHIFTS)
@pytest.mark.parametrize(("channels", "height", "width"), [(3, 32, 32), (1, 9, 11), (3, 8, 13)])
def test_neither_batch_nor_chunks_nor_threads_change_a_byte(
    name: str, channels: int, height: int, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    images, ids = images_of(33, channels, height, width), torch.arange(33) + 1000
    whole = shifted(images, ids, name, 4, 7)
    some = torch.tensor([17, 3, 32, 4, 5])
    assert torch.equal(shifted(images[some], ids[some], name, 4, 7), whole[some])
    monkeypatch.setattr(shifts, "CHUNK", 5 * channels * height * width)
    threads = torch.get_num_threads()
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            assert torch.equal(shifted(images, ids, name, 4, 7), whole)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("name", SHIFTS)
def test_the_image_s_number_and_the_seed_decide(name: str) -> None:
    images, ids = images_of(1).repeat(40, 1, 1, 1), torch.arange(40)
    first, again, reseeded = (shifted(images, ids, name, 4, seed) for seed in (0, 0, 1))
    assert torch.equal(first, again)
    assert torch.equal(first, reseeded) == (name in PLAIN)
    looks = len({image.numpy().tobytes() for image in first})
    if name in PLAIN or name in COINS:
        assert looks == COINS.get(name, 1)
    else:
        assert looks > 30  # of 40; occlusion's 361 places meet now and then


def test_shifts_do_not_share_their_numbers() -> None:
    """Salt falls where its number is high; had the Gaussian noise the same number, it would be bright there."""
    images, ids = torch.full((50, 1, 32, 32), 128, dtype=torch.uint8), torch.arange(50)
    salt = shifted(images, ids, "salt_pepper", 5, 0) == 255
    noise = shifted(images, ids, "gaussian_noise", 5, 0).double()[salt] - 128
    assert abs(noise.mean().item()) < 4 * 25.5 / len(noise) ** 0.5


@pytest.mark.parametrize("name", SHIFTS)
@pytest.mark.parametrize("side", [32, 64, 224])
def test_each_severity_is_further_from_the_photograph(name: str, side: int, photos: Tensor) -> None:
    images = resized(photos, side).repeat(4 if side < 224 else 1, 1, 1, 1)
    ids = torch.arange(len(images))
    distances = [(shifted(images, ids, name, s, 0).double() - images).abs().mean().item() for s in SEVERITIES]
    assert distances[0] > 0
    assert all(near < far for near, far in itertools.pairwise(distances)), distances


@pytest.mark.parametrize("name", SHIFTS)
def test_grey_images(name: str, photos: Tensor) -> None:
    grey = resized(photos[:, 1:2], 28)
    got = shifted(grey, torch.arange(2), name, 5, 0)
    assert got.shape == grey.shape and got.dtype == torch.uint8
    assert SHIFTS[name].applies_to(3)
    assert SHIFTS[name].applies_to(1) == (name not in COLOUR) == (not torch.equal(got, grey))


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from(list(SHIFTS)),
    severity=st.sampled_from(SEVERITIES),
    channels=st.sampled_from([1, 3]),
    height=st.integers(1, 40),
    width=st.integers(1, 40),
    seed=st.integers(0, 2**63 - 1),
    first=st.integers(0, 2**40),
)
def test_any_size_keeps_its_shape_and_its_bytes_one_by_one(
    name: str, severity: int, channels: int, height: int, width: int, seed: int, first: int
) -> None:
    images, ids = images_of(3, channels, height, width), torch.arange(3) + first
    before = images.clone()
    got = shifted(images, ids, name, severity, seed)
    assert got.shape == images.shape and got.dtype == torch.uint8 and got.is_contiguous()
    assert torch.equal(images, before)
    assert torch.equal(got[2:], shifted(images[2:], ids[2:], name, severity, seed))


@pytest.mark.parametrize("name", SHIFTS)
def test_images_need_not_lie_in_order(name: str) -> None:
    images, ids = images_of(4, 3, 10, 12), torch.arange(4)
    backwards = images.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)
    assert torch.equal(shifted(backwards, ids, name, 3, 0), shifted(images, ids, name, 3, 0))


@pytest.mark.parametrize("name", SHIFTS)
def test_no_images_give_no_images(name: str) -> None:
    assert shifted(images_of(0), torch.arange(0), name, 1, 0).shape == (0, 3, 32, 32)


@pytest.mark.parametrize(
    ("images", "ids", "name", "severity", "words"),
    [
        (images_of(2), torch.arange(2), "fog", 1, "use one of salt_pepper, shear"),
        (images_of(2), torch.arange(2), "blur", 0, "give one from 1 to 5"),
        (images_of(2), torch.arange(2), "blur", 6, "give one from 1 to 5"),
        (images_of(2) / 255, torch.arange(2), "blur", 1, "give grey or RGB"),
        (images_of(2, channels=4), torch.arange(2), "blur", 1, "give grey or RGB"),
        (images_of(2, height=0), torch.arange(2), "blur", 1, "give grey or RGB"),
        (images_of(2)[0], torch.arange(3), "blur", 1, "give grey or RGB"),
        (images_of(2), torch.arange(3), "blur", 1, "give one id an image"),
    ],
)
def test_bad_input_is_told_what_to_give(images: Tensor, ids: Tensor, name: str, severity: int, words: str) -> None:
    with pytest.raises(BadInput, match=words):
        shifted(images, ids, name, severity, 0)
