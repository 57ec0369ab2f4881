"""Bootstrap standard errors over images: against the closed form of a mean."""

import math

import pytest
import torch

from byov.metrics.resampling import resampled_counts, standard_errors


def test_counts_are_of_as_many_images() -> None:
    counts = torch.cat(list(resampled_counts(7, 50)))
    assert counts.shape == (50, 7) and bool((counts.sum(1) == 7).all()) and float(counts.std()) > 0.5


def test_the_error_of_a_mean_is_the_std_over_the_root_of_the_images() -> None:
    x = torch.randn(200, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found = standard_errors(lambda c: {"mean": c @ x / c.sum(1), "twice": 2 * c @ x / c.sum(1)}, 200, resamples=4000)
    assert found["mean"] == pytest.approx(float(x.std(correction=0)) / math.sqrt(200), rel=0.06)
    assert found["twice"] == pytest.approx(2 * found["mean"])


def test_one_resample_has_no_error() -> None:
    with pytest.raises(ValueError, match="at least two"):
        standard_errors(lambda counts: {"total": counts.sum(1)}, 5, resamples=1)
