"""Keyed randomness: the distribution, the independence of keys, and what must not matter."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from byov._core import randomness
from byov._core.threads import for_each


def test_fold_equals_splitmix64_by_hand() -> None:
    # splitmix64's first output from seed 0 is a published constant; fold(0) is its upper 63 bits.
    assert randomness.fold(0) == 0xE220A8397B1DCDAF >> 1


def test_tensor_hash_equals_the_integer_hash() -> None:
    ids = torch.tensor([0, 1, 7, 12345, 2**40])
    got = randomness._mix(ids * randomness._signed(randomness.GAMMA) + randomness._signed(99))
    for i, value in zip(ids.tolist(), got.tolist(), strict=True):
        state = (i * randomness.GAMMA + 99) & randomness._MASK64
        for shift, multiplier in randomness.MIX:
            state = (state ^ (state >> shift)) * multiplier & randomness._MASK64
        assert value & randomness._MASK64 == state ^ (state >> 31)


@given(st.lists(st.integers(0, 2**63 - 1), min_size=1, max_size=4), st.integers(0, 3))
def test_fold_hangs_on_every_part(key: list[int], which: int) -> None:
    other = list(key)
    other[which % len(key)] ^= 1
    assert randomness.fold(*key) != randomness.fold(*other)
    assert 0 <= randomness.fold(*key) < 2**63


def test_uniforms_are_uniform_and_uncorrelated() -> None:
    u = randomness.uniforms(torch.arange(50_000), 6, 1, 2)
    assert u.min() >= 0 and u.max() < 1
    for column in u.T:
        assert stats.kstest(column.numpy(), "uniform").pvalue > 1e-4
    other = randomness.uniforms(torch.arange(50_000), 6, 1, 3)  # the next epoch
    together = torch.cat([u, other, u.roll(1, 0)], dim=1)  # columns, epochs, neighbouring images
    correlation = torch.corrcoef(together.T).fill_diagonal_(0)
    assert correlation.abs().max() < 5 / math.sqrt(50_000)


def test_uniforms_of_an_image_do_not_hang_on_the_batch() -> None:
    ids = torch.tensor([5, 900, 3])
    whole = randomness.uniforms(ids, 4, 7)
    assert torch.equal(whole[1:2], randomness.uniforms(ids[1:2], 4, 7))
    assert torch.equal(whole[:, :2], randomness.uniforms(ids, 2, 7))


@pytest.mark.parametrize("size", [1, 100, randomness.CHUNK, 5 * randomness.CHUNK + 3])
def test_normal_is_the_same_for_any_number_of_threads(size: int) -> None:
    torch.set_num_threads(1)
    one = randomness.normal_(torch.empty(size), 3)
    torch.set_num_threads(4)
    assert torch.equal(one, randomness.normal_(torch.empty(size), 3))


def test_normal_is_normal_and_fresh_in_every_chunk_and_key() -> None:
    n = 8 * randomness.CHUNK
    first, second = randomness.normal_(torch.empty(n), 1), randomness.normal_(torch.empty(n), 2**20)
    assert stats.kstest(first.numpy(), "norm").pvalue > 1e-4
    assert abs(float(first.double().pow(4).mean()) - 3) < 5 * math.sqrt(96 / n)
    rows = torch.cat([first.view(8, -1), second.view(8, -1), first.roll(1).view(8, -1)])  # chunks, keys, neighbours
    correlation = torch.corrcoef(rows).fill_diagonal_(0)
    assert correlation.abs().max() < 5 / math.sqrt(randomness.CHUNK)
    assert first.unique().numel() > 0.9 * n  # no recycled table


def test_permutation_is_keyed() -> None:
    assert torch.equal(randomness.permutation(50, 1, 2), randomness.permutation(50, 1, 2))
    assert not torch.equal(randomness.permutation(50, 1, 2), randomness.permutation(50, 1, 3))
    assert sorted(randomness.permutation(50, 1).tolist()) == list(range(50))


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("inference", [False, True])
def test_workers_work_without_autograd_and_in_the_callers_inference_mode(threads: int, inference: bool) -> None:
    before, seen = torch.get_num_threads(), []
    try:
        torch.set_num_threads(threads)
        with torch.inference_mode(inference):
            for_each(lambda _: seen.append((torch.is_grad_enabled(), torch.is_inference_mode_enabled())), range(4))
    finally:
        torch.set_num_threads(before)
    assert set(seen) == {(False, inference)}


def test_workers_use_one_core_each() -> None:
    seen = []
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        for_each(lambda _: seen.append((torch.ones(200_000).sum(), torch.get_num_threads())), range(6))
        assert {threads for _, threads in seen} == {1} and torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


def test_no_two_chunks_of_a_draw_share_a_seed() -> None:
    seeds = {randomness.chunk_generator(2**40 - 3, i).initial_seed() for i in range(5000)}
    assert len(seeds) == 5000 and max(seeds) < 2**32


def test_no_two_streams_share_a_value_and_stored_runs_keep_theirs() -> None:
    values = {stream.name: int(stream) for stream in randomness.RandomStream}
    assert len(set(values.values())) == len(values) == len(randomness.RandomStream.__members__)
    stored = {"INIT": 0, "ORDER": 1, "VIEWS": 2, "NOISE": 3, "DROPOUT": 4, "SIGNS": 5, "DRAWS": 6, "SPLIT": 10}
    assert stored.items() <= values.items()
    assert randomness.fold(randomness.RandomStream.ORDER, 10) == randomness.fold(1, 10)
