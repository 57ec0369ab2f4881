"""Streaming moments and the predictive over draws against all draws at once; merging; how many draws are needed."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributions import Categorical

from byov.metrics import Predictive
from byov.metrics.over_draws import OverDraws, predictive_over_draws


@pytest.mark.parametrize("parts", [(3, 4), (0, 7), (7, 0), (1, 6)])
def test_parts_of_the_draws_join_to_the_whole(parts: tuple[int, int]) -> None:
    outputs = 1000 + torch.randn(7, 5, 2, generator=torch.Generator().manual_seed(0)).double()
    halves = [OverDraws(5, 2), OverDraws(5, 2)]
    for i, one in enumerate(outputs):
        halves[i >= parts[0]].update(one)
    whole = halves[0].merge(OverDraws.from_state(halves[1].state()))
    assert whole.draws == 7
    torch.testing.assert_close(whole.mean, outputs.mean(0), rtol=1e-13, atol=0)
    torch.testing.assert_close(whole.variance, outputs.var(0), rtol=1e-9, atol=0)


PER_IMAGE = ("entropy", "expected_entropy", "mutual_information", "predictive_std", "predictive_std_classes")


def draws_of(seed: int, draws: int = 7, images: int = 20, classes: int = 4) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    return (2 * torch.randn(draws, images, classes, generator=g, dtype=torch.float64)).softmax(2)


def seen(draws: Tensor) -> Predictive:
    predictive = Predictive(*draws.shape[1:])
    for p in draws:
        predictive.update(p)
    return predictive


def same(a: Predictive, b: Predictive) -> bool:
    """But for rounding; a square root makes of a rounding in a variance of 0 some 1e-8."""
    return a.draws == b.draws and all(
        torch.allclose(getattr(a, name), getattr(b, name), rtol=1e-10, atol=1e-12)
        for name in ("mean", "squares", "expected_entropy", "entropy", "mutual_information")
    )


def test_equals_all_draws_at_once() -> None:
    draws = draws_of(0)
    found = seen(draws)
    mean, std = draws.mean(0), draws.std(0)
    assert torch.allclose(found.mean, mean) and torch.allclose(found.std, std)
    assert torch.allclose(found.entropy, Categorical(mean).entropy())
    assert torch.allclose(found.expected_entropy, Categorical(draws).entropy().mean(0))
    information = (draws * (draws / mean).log()).sum(2).mean(0)  # the mean KL of a draw to their mean
    assert torch.allclose(found.mutual_information, information)
    top = mean.argmax(1)
    assert torch.allclose(found.predictive_std, draws[:, torch.arange(20), top].std(0))
    assert torch.allclose(found.predictive_std_classes, std.mean(1))


def test_by_hand() -> None:
    """Two draws, sure of different classes: nothing is hard for a draw, a whole bit is unknown to both together."""
    found = seen(torch.tensor([[[1.0, 0.0], [0.5, 0.5]], [[0.0, 1.0], [0.5, 0.5]]]))
    assert found.entropy.tolist() == pytest.approx([math.log(2)] * 2)
    assert found.expected_entropy.tolist() == pytest.approx([0, math.log(2)])
    assert found.mutual_information.tolist() == pytest.approx([math.log(2), 0])
    assert found.predictive_std.tolist() == pytest.approx([math.sqrt(0.5), 0])
    assert found.predictive_std_classes.tolist() == pytest.approx([math.sqrt(0.5), 0])


def test_one_draw_has_no_spread() -> None:
    found = seen(draws_of(1, draws=1))
    assert not found.std.any()
    assert found.mutual_information.max() < 1e-14


def test_draws_that_agree_have_no_information_rather_than_a_negative_one() -> None:
    found = seen(draws_of(4, draws=1, images=500) + 1e-15 * torch.arange(9)[:, None, None])
    assert (found.entropy < found.expected_entropy).any()  # by rounding
    assert 0 <= found.mutual_information.min() <= found.mutual_information.max() < 1e-14


def test_a_tiny_spread_is_not_lost() -> None:
    """1e-9 about .5: a sum of squares in float64 would leave a variance of 1e-18 to rounding."""
    step = torch.tensor([-1.0, 1.0, -1.0, 1.0], dtype=torch.float64)[:, None] * 1e-9
    draws = torch.stack([0.5 + step, 0.5 - step], 2)
    halves = seen(draws[:1]).merge(seen(draws[1:]))
    for found in (seen(draws), halves):
        assert found.predictive_std.tolist() == pytest.approx([1e-9 * math.sqrt(4 / 3)], rel=1e-6)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**31), parts=st.lists(st.integers(0, 5), min_size=1, max_size=4), images=st.integers(1, 9))
def test_merged_parts_equal_all_at_once(seed: int, parts: list[int], images: int) -> None:
    draws = draws_of(seed, sum(parts), images)
    merged = Predictive(images, 4)
    for part in draws.split(parts):
        merged.merge(seen(part))
    assert same(merged, seen(draws))


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**31), draws=st.integers(1, 6), images=st.integers(1, 9), classes=st.integers(2, 6))
def test_properties(seed: int, draws: int, images: int, classes: int) -> None:
    p = draws_of(seed, draws, images, classes)
    found = seen(p)
    assert torch.allclose(found.mean.sum(1), torch.ones(images, dtype=torch.float64))
    assert (found.entropy <= math.log(classes) + 1e-12).all()
    assert (found.expected_entropy <= found.entropy + 1e-12).all()  # Jensen
    assert (found.mutual_information >= 0).all()
    assert (found.mutual_information <= math.log(min(draws, classes)) + 1e-12).all()
    # the most that numbers in [0, 1] can spread: half at either end
    assert (found.std <= math.sqrt(draws / max(draws - 1, 1)) / 2 + 1e-12).all()
    assert same(seen(p.flip(0)), found)
    order = torch.randperm(images, generator=torch.Generator().manual_seed(seed))
    shuffled = seen(p[:, order])
    for name in PER_IMAGE:
        assert torch.equal(getattr(shuffled, name), getattr(found, name)[order])


def test_state_survives_a_file_and_goes_on(tmp_path: Path) -> None:
    draws = draws_of(2)
    half = seen(draws[:3])
    save_file(half.state(), tmp_path / "partial.safetensors")
    again = Predictive.from_state(load_file(tmp_path / "partial.safetensors"))
    twin = Predictive.from_state(half.state())
    for p in draws[3:]:
        again.update(p)
        twin.update(p)
    whole = seen(draws)
    for found in (again, twin):
        assert found.draws == 7
        assert all(torch.equal(found.state()[name], tensor) for name, tensor in whole.state().items())
    assert half.draws == 3 and same(half, seen(draws[:3]))  # what the twin was made of is left alone


def test_float32_is_summed_in_float64() -> None:
    draws = draws_of(3)
    found = seen(draws.float())
    assert found.mean.dtype == torch.float64
    assert torch.allclose(found.mean, draws.mean(0), atol=1e-7)


def test_bad_inputs_get_a_sentence() -> None:
    found = Predictive(3, 3)
    with pytest.raises(ValueError, match="softmax"):
        found.update(torch.randn(3, 3))
    with pytest.raises(ValueError, match="do not match"):
        found.update(torch.eye(2))
    with pytest.raises(ValueError, match="do not match"):
        found.merge(Predictive(2, 3))
    assert found.draws == 0


def test_the_std_falls_with_the_root_of_the_draws() -> None:
    """Of two classes one always leads, so the predictive is the mean of K values: its std is theirs / sqrt(K)."""
    lead = 0.8 + 0.1 * torch.randn(50, generator=torch.Generator().manual_seed(0), dtype=torch.float64).clamp(-1.5, 1.5)
    p = torch.stack([lead, 1 - lead], 1)[:, None].expand(-1, 3, -1)  # three images, alike
    own = float(lead.std(correction=0))
    for found in predictive_over_draws(p, (1, 5, 50), bootstraps=4000):
        assert found.mean == pytest.approx(float(lead.mean()), abs=5 * own / math.sqrt(found.draws * 4000))
        assert found.std == pytest.approx(own / math.sqrt(found.draws), rel=0.06)
        assert found.image_std == pytest.approx(found.std)


def test_few_draws_overstate_what_they_do_not_agree_on() -> None:
    """Half of the draws say one class, half the other: one draw is certain, many are not."""
    p = torch.eye(2, dtype=torch.float64).repeat(10, 1)[:, None]
    one, two, many = predictive_over_draws(p, (1, 2, 400), bootstraps=2000)
    assert (one.mean, one.std) == (1.0, 0.0)
    assert two.mean == pytest.approx(0.75, abs=0.03)  # both agree half of the time
    assert 0.5 < many.mean < 0.53


def test_images_that_waver_together_do_not_average_out() -> None:
    g = torch.Generator().manual_seed(1)
    together = (0.7 + 0.2 * torch.rand(50, 1, generator=g)).expand(-1, 200)
    apart = 0.7 + 0.2 * torch.rand(50, 200, generator=g)
    found = [predictive_over_draws(torch.stack([p, 1 - p], 2), [4], 200)[0] for p in (together, apart)]
    assert found[0].std == pytest.approx(found[0].image_std)
    assert found[1].std < 0.25 * found[1].image_std


def test_bad_input_is_named() -> None:
    with pytest.raises(ValueError, match="counts of at least 1"):
        predictive_over_draws(torch.ones(2, 2, 2) / 2, [0])
    with pytest.raises(ValueError, match="draws, images, classes"):
        predictive_over_draws(torch.ones(2, 2) / 2, [1])
