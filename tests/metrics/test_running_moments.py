"""Streaming moments over draws, against those of all draws at once."""

from __future__ import annotations

import pytest
import torch

from byov.metrics.running_moments import OverDraws


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
