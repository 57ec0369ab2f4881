"""Bootstraps over draws: against closed forms."""

import math

import pytest
import torch

from byov.metrics.convergence import predictive_over_draws


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
    with pytest.raises(ValueError, match="counts from 1 on"):
        predictive_over_draws(torch.ones(2, 2, 2) / 2, [0])
    with pytest.raises(ValueError, match="draws, images, classes"):
        predictive_over_draws(torch.ones(2, 2) / 2, [1])
