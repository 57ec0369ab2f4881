"""The distribution of the drawn parameters, and that views follow them."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from byov._core.errors import BadInput
from byov.backbones._torchvision import import_torchvision
from byov.config import View, Views
from byov.data import views
from byov.data.transforms import blur_kernel_size
from byov.data.views import Parameters, draw_parameters, two_views, view

SIGMA = (0.1, 2.0)
FULL = View(crop_area=(0.08, 1.0), flip=0.5, blur=0.5, blur_sigma=SIGMA, solarise=0.2)
NOTHING = View((1.0, 1.0), (1.0, 1.0), flip=0.0, jitter=0.0, grey=0.0, blur=0.0, blur_sigma=SIGMA)
OPERATIONS = ("brightness", "contrast", "saturation", "hue")


def images_of(batch: int, channels: int = 3, height: int = 32, width: int = 32) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, (batch, channels, height, width), dtype=torch.uint8, generator=generator)


def one_by_one(functional: Any, images: Tensor, drawn: Parameters, size: int) -> Tensor:
    """Make the same views with torchvision, in a loop over images and operations."""
    bicubic, taps, results = import_torchvision().transforms.InterpolationMode.BICUBIC, blur_kernel_size(size), []
    for i in range(len(images)):
        box = [int(field[i]) for field in drawn.boxes]
        image = functional.resized_crop(images[i] / 255, *box, [size, size], interpolation=bicubic, antialias=True)
        image = image.clamp(0, 1)
        if drawn.flip[i]:
            image = functional.horizontal_flip(image)
        for operation in drawn.order[i].tolist():
            adjust = getattr(functional, f"adjust_{OPERATIONS[operation]}")
            image = adjust(image, drawn.factors[i, operation].item())
        if drawn.grey[i]:
            image = functional.rgb_to_grayscale(image, num_output_channels=len(image))
        if drawn.blur[i]:
            image = functional.gaussian_blur(image, [taps, taps], [drawn.sigma[i].item()])
        if drawn.solarise[i]:
            image = functional.solarize(image, 0.5)
        results.append(image)
    return torch.stack(results)


@pytest.mark.parametrize(
    ("batch", "channels", "height", "width", "size"),
    [(64, 3, 32, 32, 32), (32, 1, 28, 28, 28), (16, 3, 50, 40, 64), (10, 3, 130, 150, 128), (16, 1, 8, 8, 8)],
)
def test_a_view_is_what_torchvision_makes_of_the_drawn_parameters(
    functional: Any, batch: int, channels: int, height: int, width: int, size: int
) -> None:
    images, ids = images_of(batch, channels, height, width), torch.arange(batch)
    drawn = draw_parameters(ids, (FULL,), height, width, ((1, 2, 3),))
    got = view(images, ids, FULL, size, 1, 2, 3)
    assert got.shape == (batch, channels, size, size) and got.dtype == torch.float32
    assert got.min() >= 0 and got.max() <= 1
    torch.testing.assert_close(got, one_by_one(functional, images, drawn, size), atol=2e-5, rtol=0)


@pytest.mark.parametrize("size", [32, 128])
def test_views_do_not_depend_on_the_batch(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    images, ids = images_of(24, 3, size, size), torch.arange(24) + 1000
    whole = view(images, ids, FULL, size, 0, 1, 0)
    some = torch.tensor([17, 3, 22, 4, 5])
    assert torch.equal(view(images[some], ids[some], FULL, size, 0, 1, 0), whole[some])
    monkeypatch.setattr(views, "PARTS", 5)  # not a divisor: the last part is smaller
    assert torch.equal(view(images, ids, FULL, size, 0, 1, 0), whole)


@pytest.mark.parametrize("size", [32, 128])
def test_the_number_of_threads_changes_nothing(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(views, "ALONE", 0)  # otherwise, so few pixels use one thread
    images, ids, threads = images_of(20, 3, size, size), torch.arange(20), torch.get_num_threads()
    results = []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            results.append(view(images, ids, FULL, size, 0, 1, 0))
            assert torch.get_num_threads() == count  # the workers' setting of one core stays in the workers
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


def test_the_key_and_the_image_decide() -> None:
    images, ids = images_of(1).repeat(8, 1, 1, 1), torch.arange(8)
    first = view(images, ids, FULL, 32, 0, 1, 0)
    assert torch.equal(first, view(images, ids, FULL, 32, 0, 1, 0))
    for key in ((1, 1, 0), (0, 2, 0), (0, 1, 1)):
        other = view(images, ids, FULL, 32, *key)
        assert ((other - first).abs().amax((1, 2, 3)) > 0.01).all(), key
    assert len({tuple(row.flatten()[:50].tolist()) for row in first}) == 8  # one picture, eight ids, eight views


def test_two_views_are_two_keys_and_two_configs() -> None:
    images, ids = images_of(8), torch.arange(8)
    config = Views(first=FULL, second=dataclasses.replace(FULL, grey=1.0))
    first, second = two_views(images, ids, config, 32, seed=5, epoch=6)
    assert torch.equal(first, view(images, ids, config.first, 32, 5, 6, 0))
    assert torch.equal(second, view(images, ids, config.second, 32, 5, 6, 1))
    assert torch.equal(second[:, 0], second[:, 2]) and not torch.equal(first[:, 0], first[:, 2])


def test_a_view_with_nothing_to_do_is_the_image() -> None:
    images = images_of(4)
    torch.testing.assert_close(view(images, torch.arange(4), NOTHING, 32, 0), images / 255, atol=1e-6, rtol=0)
    flipped = view(images, torch.arange(4), dataclasses.replace(NOTHING, flip=1.0), 32, 0)
    torch.testing.assert_close(flipped, (images / 255).flip(3), atol=1e-6, rtol=0)


@pytest.fixture(scope="module")
def many() -> Parameters:
    config = dataclasses.replace(FULL, flip=0.3, jitter=0.8, grey=0.2, blur=0.1, solarise=0.2)
    return draw_parameters(torch.arange(20_000), (config,), 32, 32, ((0, 0, 0),))


def test_chances_are_as_asked(many: Parameters) -> None:
    jittered = (many.factors != torch.tensor([1.0, 1.0, 1.0, 0.0])).any(1)
    events = {0.3: [many.flip], 0.8: [jittered], 0.2: [many.grey, many.solarise], 0.1: [many.blur]}
    for chance, outcomes in events.items():
        error = math.sqrt(chance * (1 - chance) / 20_000)
        for outcome in outcomes:
            assert abs(outcome.float().mean().item() - chance) < 4 * error


def test_chances_are_independent(many: Parameters) -> None:
    events = torch.stack([many.flip, many.grey, many.solarise, many.blur, many.sigma > 1.05]).float()
    correlation = torch.corrcoef(events) - torch.eye(5)
    assert correlation.abs().max() < 4.5 / math.sqrt(20_000)


def test_the_24_orders_are_equally_likely(many: Parameters) -> None:
    code = (many.order * torch.tensor([64, 16, 4, 1])).sum(1)
    counts = torch.unique(code, return_counts=True)[1].double()
    assert len(counts) == 24
    chi_square = ((counts - 20_000 / 24) ** 2 / (20_000 / 24)).sum()
    assert chi_square < 49.7  # the chi-square with 23 degrees of freedom exceeds it with probability .001


def test_factors_fill_their_ranges(many: Parameters) -> None:
    jittered = (many.factors != torch.tensor([1.0, 1.0, 1.0, 0.0])).any(1)
    strength = torch.tensor([FULL.brightness, FULL.contrast, FULL.saturation, FULL.hue])
    uniform = (many.factors[jittered] - torch.tensor([1.0, 1.0, 1.0, 0.0])) / strength
    count = len(uniform)
    assert uniform.abs().max() <= 1 + 1e-6
    assert (uniform.mean(0).abs() < 4 / math.sqrt(3 * count)).all()  # variance 1/3
    assert ((uniform**2).mean(0) - 1 / 3).abs().max() < 4 * math.sqrt(4 / 45 / count)  # its square's: 1/5 - 1/9
    assert many.sigma.min() >= 0.1 and many.sigma.max() <= 2.0
    assert abs(many.sigma.mean().item() - 1.05) < 4 * 1.9 / math.sqrt(12 * 20_000)


@pytest.mark.parametrize("size", [64, 224])
def test_an_open_blur_is_the_same_share_of_any_image(size: int) -> None:
    """BYOL's range is 0.1 to 2 pixels of 224."""
    images, ids, still = images_of(3), torch.arange(3), dataclasses.replace(NOTHING, blur=1.0)
    given_range = dataclasses.replace(still, blur_sigma=(0.1 * size / 224, 2 * size / 224))
    open_range = dataclasses.replace(still, blur_sigma=None)
    expected = view(images, ids, given_range, size, 0)
    assert torch.equal(view(images, ids, open_range, size, 0), expected)
    both = Views(first=open_range, second=still)
    first, second = two_views(images, ids, both, size, 0, 0)
    assert torch.equal(first, view(images, ids, given_range, size, 0, 0, 0))
    assert torch.equal(second, view(images, ids, still, size, 0, 0, 1))


@settings(max_examples=60, deadline=None)
@given(
    height=st.integers(1, 300),
    width=st.integers(1, 300),
    low=st.floats(0.01, 1.0),
    ratio=st.floats(0.3, 1.0),
    seed=st.integers(0, 1000),
)
def test_boxes_lie_in_the_image(height: int, width: int, low: float, ratio: float, seed: int) -> None:
    config = dataclasses.replace(FULL, crop_area=(low, 1.0), crop_ratio=(ratio, 1 / ratio))
    top, left, box_height, box_width = draw_parameters(torch.arange(200), (config,), height, width, ((seed,),)).boxes
    assert (top >= 0).all() and (left >= 0).all() and (box_height >= 1).all() and (box_width >= 1).all()
    assert (top + box_height <= height).all() and (left + box_width <= width).all()


def test_boxes_have_the_areas_and_ratios_asked_for() -> None:
    config = dataclasses.replace(FULL, crop_area=(0.2, 0.5))
    top, left, height, width = (
        x.double() for x in draw_parameters(torch.arange(5_000), (config,), 1000, 1000, ((0,),)).boxes
    )
    area, ratio = height * width / 1e6, width / height
    assert 0.198 < area.min() < 0.202 and 0.498 < area.max() < 0.502
    assert 0.745 < ratio.min() < 0.76 and 1.32 < ratio.max() < 1.34
    assert abs(area.mean().item() - 0.35) < 4 * 0.3 / math.sqrt(12 * 5_000)
    assert abs(ratio.log().mean().item()) < 4 * 2 * math.log(4 / 3) / math.sqrt(12 * 5_000)
    for start, free in ((top, 1001 - height), (left, 1001 - width)):
        assert abs((start / free).mean().item() - 0.5) < 4 / math.sqrt(12 * 5_000) + 0.002  # .002: whole pixels


@pytest.mark.parametrize(("height", "width", "box"), [(10, 100, (0, 43, 10, 13)), (100, 10, (43, 0, 13, 10))])
def test_where_no_try_fits_the_centre_is_taken(height: int, width: int, box: tuple[int, ...]) -> None:
    """torchvision's get_params with area (1, 1): no box in a 10 x 100 image has its whole area and a ratio <= 4/3."""
    config = dataclasses.replace(FULL, crop_area=(1.0, 1.0))
    boxes = draw_parameters(torch.arange(5), (config,), height, width, ((0,),)).boxes
    assert all((field == value).all() for field, value in zip(boxes, box, strict=True))


def test_no_images_give_no_views() -> None:
    assert view(images_of(0), torch.arange(0), FULL, 32, 0).shape == (0, 3, 32, 32)


@pytest.mark.parametrize(
    ("images", "ids"),
    [
        (torch.rand(2, 3, 8, 8), torch.arange(2)),
        (images_of(2)[0], torch.arange(3)),
        (images_of(2, channels=4), torch.arange(2)),
        (images_of(2), torch.arange(3)),
    ],
)
def test_what_is_no_batch_of_images_is_bad_input(images: Tensor, ids: Tensor) -> None:
    with pytest.raises(BadInput, match="give"):
        view(images, ids, FULL, 8, 0)


@pytest.mark.parametrize("field", ["flip", "blur"])
def test_an_unresolved_config_is_bad_input(field: str) -> None:
    with pytest.raises(BadInput, match="resolve"):
        view(images_of(2), torch.arange(2), dataclasses.replace(FULL, **{field: None}), 32, 0)
