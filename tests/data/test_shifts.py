"""Corruptions against closed forms and other libraries; the strengths; what the randomness depends on."""

from __future__ import annotations

import colorsys
import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.colors import hsv_to_rgb, rgb_to_hsv
from numpy.typing import NDArray
from PIL import Image, ImageOps
from scipy import ndimage, stats
from sklearn.datasets import load_sample_image
from torch import Tensor

from byov._core.errors import BadInput
from byov._core.randomness import uniforms
from byov.data import shifts
from byov.data.shifts import SEVERITIES, SHIFTS, Draw, shifted, warp
from byov.data.transforms import luma, resized

LEFT, RIGHT = 0.25, 0.75  # the two sides of a coin
VALUES = 250_000  # of noise


def small_images(batch: int, channels: int = 3, height: int = 16, width: int = 12) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, (batch, channels, height, width), dtype=torch.uint8, generator=generator)


def always(*numbers: float) -> Draw:
    """Draw these numbers for every image of a batch of any size: they broadcast."""

    def draw(count: int) -> Tensor:
        assert count == len(numbers)
        return torch.tensor([numbers])

    return draw


def no_draw(count: int) -> Tensor:
    raise AssertionError("nothing is random here")


def all_bytes(channels: int = 1) -> Tensor:
    return torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16).repeat(1, channels, 1, 1)


# --------------------------------------------------------------------------------------------------------------- noise


def test_salt_and_pepper_by_hand() -> None:
    chance = torch.tensor([[0.0, 0.049, 0.051, 0.949, 0.951, 0.999]])
    got = shifts.salt_pepper(torch.full((1, 1, 2, 3), 77, dtype=torch.uint8), 0.1, lambda count: chance)
    assert got.flatten().tolist() == [0, 0, 77, 77, 255, 255]


def noisy(name: str, level: int, strength: float) -> NDArray[np.int64]:
    """Count how often each byte results from `level`."""
    images = torch.full((VALUES // 2500, 1, 50, 50), level, dtype=torch.uint8)
    ids = torch.arange(len(images))
    out = getattr(shifts, name)(images, strength, lambda count: uniforms(ids, count, 1, level))
    return np.bincount(out.flatten().numpy(), minlength=256)


def chances(name: str, level: int, strength: float) -> NDArray[np.float64]:
    """Compute the probability of each byte from the definition."""
    if name == "salt_pepper":
        result = np.zeros(256)
        result[level] = 1 - strength
        result[[0, 255]] += strength / 2
        return result
    if name == "gaussian_noise":
        edges = np.concatenate([[-np.inf], np.arange(255) + 0.5, [np.inf]])
        return np.diff(stats.norm(level, 255 * strength).cdf(edges))
    counts = np.arange(2000)
    values = np.minimum(np.ceil(255 * counts / strength - 0.5), 255).astype(int)
    return np.bincount(values, stats.poisson(strength * level / 255).pmf(counts), minlength=256)


@pytest.mark.parametrize(
    ("name", "strength"),
    [("salt_pepper", 0.07), ("gaussian_noise", 0.1), ("gaussian_noise", 0.38), ("shot_noise", 500), ("shot_noise", 3)],
)
@pytest.mark.parametrize("level", [0, 10, 128, 250, 255])
def test_noise_has_the_distribution_of_its_definition(name: str, strength: float, level: int) -> None:
    counts, chance = noisy(name, level, strength), chances(name, level, strength)
    assert counts[chance == 0].sum() == 0
    byte = np.arange(256)
    mean = (chance * byte).sum()
    variance = (chance * (byte - mean) ** 2).sum()
    fourth = (chance * (byte - mean) ** 4).sum()
    assert abs((counts * byte).sum() / VALUES - mean) <= 4 * math.sqrt(variance / VALUES)
    sampled = (counts * (byte - mean) ** 2).sum() / VALUES
    assert abs(sampled - variance) <= 4 * math.sqrt((fourth - variance**2) / VALUES)
    often = VALUES * chance >= 10
    chi_square = ((counts - VALUES * chance)[often] ** 2 / (VALUES * chance)[often]).sum()
    assert chi_square <= stats.chi2(max(often.sum() - 1, 1)).isf(1e-4)


@pytest.mark.parametrize("name", ["salt_pepper", "gaussian_noise", "shot_noise"])
def test_noise_is_independent_from_value_to_value(name: str) -> None:
    images, ids = torch.full((40, 3, 32, 32), 128, dtype=torch.uint8), torch.arange(40)
    strength = {"salt_pepper": 0.5, "gaussian_noise": 0.1, "shot_noise": 50}[name]
    noise = getattr(shifts, name)(images, strength, lambda count: uniforms(ids, count, 0)).double()
    flat = noise - noise.mean()
    variance, bound = flat.square().mean(), 4 / math.sqrt(flat.numel() / 2)
    pairs = [(flat[1:], flat[:-1]), (flat[:, 1:], flat[:, :-1]), (flat[..., 1:], flat[..., :-1])]
    for one, other in [*pairs, (flat[:, :, 1:], flat[:, :, :-1])]:
        assert ((one * other).mean() / variance).abs() < bound


# ------------------------------------------------------------------------------------------------------- blur and JPEG


@pytest.mark.parametrize("sigma", [0.7, 2.0])
def test_blur_spreads_a_point_as_a_gaussian(sigma: float) -> None:
    point = torch.zeros(2, 1, 41, 31, dtype=torch.uint8)
    point[0, 0, 20, 15] = 255
    y, x = torch.arange(41)[:, None] - 20, torch.arange(31) - 15
    bell = torch.exp(-(x**2 + y**2) / (2 * sigma**2)).double()
    got = shifts.blur(point, sigma, no_draw)
    assert (got[0, 0] - 255 * bell / bell.sum()).abs().max() <= 0.51  # half a byte, and the tails beyond 4 sigma
    assert got[1].max() == 0


def test_blur_keeps_what_is_plain_and_channels_apart() -> None:
    plain = torch.tensor([7, 0, 255], dtype=torch.uint8).view(1, 3, 1, 1).expand(1, 3, 9, 9)
    assert torch.equal(shifts.blur(plain, 6.0, no_draw), plain)


@pytest.mark.parametrize("channels", [1, 3])
def test_jpeg_is_what_pillow_reads_back(channels: int, tmp_path: Any) -> None:
    images = small_images(3, channels)
    for image, got in zip(images, shifts.jpeg(images, 30, no_draw), strict=True):
        Image.fromarray(image.permute(1, 2, 0).squeeze(2).numpy()).save(tmp_path / "image.jpg", quality=30)
        read = np.asarray(Image.open(tmp_path / "image.jpg"))
        assert np.array_equal(got.permute(1, 2, 0).squeeze(2).numpy(), read)


def test_jpeg_keeps_plain_colours() -> None:
    colours = torch.tensor([[200, 30, 60], [10, 90, 250]], dtype=torch.uint8)
    got = shifts.jpeg(colours[:, :, None, None].expand(2, 3, 16, 16), 90, no_draw)
    assert (got.int() - colours[:, :, None, None].int()).abs().max() <= 4


# -------------------------------------------------------------------------------------------------------------- moving


@pytest.mark.parametrize(("height", "width"), [(16, 12), (9, 15), (8, 8)])
def test_warp_as_scipy(height: int, width: int) -> None:
    images = small_images(4, 3, height, width)
    noise = torch.randn(4, 2, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    matrices = torch.eye(2, 3, dtype=torch.float64) + noise * torch.tensor([0.5, 0.5, 3.0])
    got = warp(images, matrices)
    centre = np.array([(height - 1) / 2, (width - 1) / 2])
    for i in range(4):
        matrix = matrices[i, :, :2].numpy()[::-1, ::-1]  # scipy has rows first
        offset = matrices[i, :, 2].numpy()[::-1] + centre - matrix @ centre
        for channel in range(3):
            plane = images[i, channel].numpy().astype(float)
            want = ndimage.affine_transform(plane, matrix, offset, order=1, mode="mirror")
            assert np.abs(got[i, channel].numpy() - want).max() <= 0.5 + 1e-6


def test_quarter_turns_by_hand() -> None:
    images = small_images(2, 3, 9, 9)
    assert torch.equal(shifts.rotation(images, 0, always(LEFT)), images)
    one, other = (shifts.rotation(images, 90, always(side)) for side in (LEFT, RIGHT))
    assert torch.equal(one, images.rot90(1, (2, 3))) and torch.equal(other, images.rot90(-1, (2, 3)))
    assert torch.equal(shifts.rotation(images, 180, always(LEFT)), images.flip(2, 3))


def test_translation_by_hand() -> None:
    """Two of eight pixels to the left (direction 0), and four of sixteen rows up (a quarter of the circle)."""
    images = small_images(2, 3, 16, 8)
    left = shifts.translation(images, 0.25, always(0.0))
    assert torch.equal(left[..., :6], images[..., 2:])
    assert torch.equal(left[..., 6:], images[..., [6, 5]])  # mirrored at the last pixel
    up = shifts.translation(images, 0.25, always(0.25))
    assert torch.equal(up[:, :, :12], images[:, :, 4:])


def test_shear_by_hand() -> None:
    """Slope 1 on 5 x 9 pixels: the row y pixels below the centre comes from y pixels to the right, or to the left."""
    images = small_images(1, 1, 5, 9)
    for side, way in ((LEFT, -1), (RIGHT, 1)):
        got = shifts.shear(images, 1.0, always(side, LEFT))
        for y in range(-2, 3):
            assert torch.equal(got[0, 0, y + 2, 2:7], images[0, 0, y + 2, 2 + way * y : 7 + way * y])
        columns = shifts.shear(images.transpose(2, 3), 1.0, always(side, RIGHT))
        assert torch.equal(columns, got.transpose(2, 3))


def test_a_line_of_one_pixel_moves_nowhere_across() -> None:
    line = torch.arange(9, dtype=torch.uint8).view(1, 1, 1, 9)
    assert torch.equal(shifts.translation(line, 0.5, always(0.25)), line)


# --------------------------------------------------------------------------------------------------- light and colour


@pytest.mark.parametrize("amount", [0.05, 0.3, 0.5])
def test_brightness_as_matplotlib_s_hsv(amount: float) -> None:
    images = small_images(4)
    images[0, :, :4] = 0
    hsv = rgb_to_hsv(images.permute(0, 2, 3, 1).numpy() / 255)
    hsv[..., 2] = np.clip(hsv[..., 2] + amount, 0, 1)
    want = 255 * hsv_to_rgb(hsv)
    got = shifts.brightness(images, amount, no_draw).permute(0, 2, 3, 1).numpy()
    assert np.abs(got - want).max() <= 0.5 + 1e-6


def test_brightness_of_grey_by_hand() -> None:
    got = shifts.brightness(all_bytes(), 0.2, no_draw)
    assert got.flatten().tolist() == [min(value + 51, 255) for value in range(256)]


def test_contrast_by_hand() -> None:
    image = torch.tensor([[[0, 100], [100, 200]], [[10, 10], [10, 50]]], dtype=torch.uint8)[None].repeat(2, 1, 1, 1)
    image[1] = 255 - image[1]
    got = shifts.contrast(image, 0.1, no_draw)  # channel means 100 and 20
    assert got[0].flatten().tolist() == [90, 100, 100, 110, 19, 19, 19, 23]
    assert got[1].flatten().tolist() == [165, 155, 155, 145, 236, 236, 236, 232]
    assert torch.equal(shifts.contrast(image, 1.0, no_draw), image)


@pytest.mark.parametrize("change", [0.0, 0.2, 0.8])
def test_saturation_as_torchvision(functional: Any, change: float) -> None:
    images = small_images(4)
    for side, factor in ((LEFT, 1 - change), (RIGHT, 1 + change)):
        draw = always(side)
        got = shifts.saturation(images, change, lambda count, draw=draw: draw(count).expand(4, 1))
        want = 255 * functional.adjust_saturation(images / 255, factor)
        assert (got - want).abs().max() <= 0.5 + 1e-3


def test_saturation_can_take_all_colour() -> None:
    images = small_images(2)
    got = shifts.saturation(images, 1.0, lambda count: torch.full((2, count), LEFT))
    assert torch.equal(got, luma(images.double()).round().to(torch.uint8).expand_as(got))


@pytest.mark.parametrize("turn", [0.0, 0.1, 0.35, 0.5])
def test_hue_as_colorsys(turn: float) -> None:
    images = small_images(1, 3, 8, 8)
    for side, way in ((LEFT, -1), (RIGHT, 1)):
        got = shifts.hue(images, turn, always(side))[0].flatten(1).T
        for before, after in zip(images[0].flatten(1).T / 255, got, strict=True):
            h, s, v = colorsys.rgb_to_hsv(*before.tolist())
            want = colorsys.hsv_to_rgb((h + way * turn) % 1, s, v)
            assert max(abs(a - 255 * b) for a, b in zip(after.tolist(), want, strict=True)) <= 0.5 + 1e-3


def test_grey_images_have_no_colour_to_change() -> None:
    images = small_images(3, 1)
    for corrupt in (shifts.saturation, shifts.hue):
        assert torch.equal(corrupt(images, 0.5, no_draw), images)


@pytest.mark.parametrize("threshold", [0, 64, 128, 224, 255])
def test_solarise_as_pillow(threshold: int) -> None:
    want = ImageOps.solarize(Image.fromarray(all_bytes()[0, 0].numpy()), threshold)
    assert np.array_equal(shifts.solarise(all_bytes(), threshold, no_draw)[0, 0].numpy(), np.asarray(want))


@pytest.mark.parametrize("bits", range(1, 9))
def test_posterise_as_pillow(bits: int) -> None:
    want = ImageOps.posterize(Image.fromarray(all_bytes()[0, 0].numpy()), bits)
    assert np.array_equal(shifts.posterise(all_bytes(), bits, no_draw)[0, 0].numpy(), np.asarray(want))


# --------------------------------------------------------------------------------------------------------------- cover


def test_occlusion_by_hand() -> None:
    """A quarter of 8 x 12 pixels is 4 x 6; extreme numbers reach the corners, middle ones the centre."""
    images = small_images(1, 3, 8, 12)
    for numbers, (top, left) in {(0.0, 0.0): (0, 0), (0.999, 0.999): (4, 6), (0.5, 0.5): (2, 3)}.items():
        got = shifts.occlusion(images, 0.25, always(*numbers))
        want = images.clone()
        want[:, :, top : top + 4, left : left + 6] = shifts.MID_GREY
        assert torch.equal(got, want)


def test_boxes_are_uniform_and_grow_around_themselves() -> None:
    images, ids = torch.zeros(6000, 1, 8, 8, dtype=torch.uint8), torch.arange(6000)

    def covered(area: float) -> Tensor:
        return shifts.occlusion(images, area, lambda count: uniforms(ids, count, 0)) > 0

    boxes = [covered(area) for area in (0.05, 0.1, 0.25, 0.5, 1.0)]
    assert [int(box[0].sum()) for box in boxes] == [4, 9, 16, 36, 64]
    assert all((small <= large).all() for small, large in itertools.pairwise(boxes))
    starts = boxes[2].flatten(1).to(torch.uint8).argmax(1)
    counts = np.unique(starts.numpy(), return_counts=True)[1]
    assert len(counts) == 25
    assert stats.chisquare(counts).pvalue > 1e-3


# ----------------------------------------------------------------------------------------------------------- severities

PLAIN = {"blur", "brightness", "contrast", "solarise", "posterise", "jpeg"}  # nothing random
COINS = {"shear": 4, "rotation": 2, "saturation": 2, "hue": 2}  # number of outcomes
COLOUR = {"saturation", "hue"}


def images_of(batch: int, channels: int = 3, height: int = 32, width: int = 32) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, (batch, channels, height, width), dtype=torch.uint8, generator=generator)


@pytest.fixture(scope="module")
def photos() -> Tensor:
    """Two photographs, cut square: uint8 (2, 3, 427, 427)."""
    pictures = [load_sample_image(name)[:, 100:527] for name in ("china.jpg", "flower.jpg")]
    return torch.from_numpy(np.stack(pictures)).permute(0, 3, 1, 2).contiguous()


def test_all_fifteen_exist() -> None:
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
        assert looks > 30  # of 40; occlusion's 361 places coincide now and then


def test_shifts_do_not_share_their_numbers() -> None:
    """Salt appears where its number is high; with the same numbers, Gaussian noise would be bright there."""
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
def test_images_need_not_be_contiguous(name: str) -> None:
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
        (images_of(2), torch.arange(3), "blur", 1, "give one id per image"),
    ],
)
def test_bad_input_is_explained(images: Tensor, ids: Tensor, name: str, severity: int, words: str) -> None:
    with pytest.raises(BadInput, match=words):
        shifted(images, ids, name, severity, 0)
