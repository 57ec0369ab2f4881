"""The difference to another run, by hand and against the normal approximation."""

import pytest
import torch

from byov.evaluation.baseline import differences, intervals, without_draws
from byov.scoring.scores import CANDIDATES


def test_differences_of_what_both_have() -> None:
    own = {"top1": 0.75, "draws.top1": 0.5, "nll": None, "probe_converged": True, "probe_l2": 1.0, "mine": 1.0}
    own |= {"settings": {}, "bins": [[1]], "pixels.top1": 0.5}
    other = {"top1": 0.5, "nll": 1.0, "probe_converged": True, "probe_l2": 0.5, "theirs": 2.0, "bins": [[1]]}
    other |= {"settings": {}, "pixels.top1": 0.25}
    assert differences(own, other, still=False) == {"baseline.top1": 0.25}
    # of a run without random weights, the means stand in for draws
    assert differences(own, other, still=True) == {"baseline.top1": 0.25, "baseline.draws.top1": 0.0}
    assert differences(own, other | {"draws.top1": 0.25}, still=False)["baseline.draws.top1"] == 0.25


def test_draws_under_a_shift_are_set_beside_the_means_on_the_same_images() -> None:
    own = {"shifts.blur.1.top1": 0.5, "shifts.blur.1.draws.top1": 0.75, "shifts.blur.1.at_means.top1": 0.25}
    other = {"shifts.blur.1.top1": 0.25, "shifts.blur.1.at_means.top1": 0.5}
    expected = {"baseline.shifts.blur.1.top1": 0.25, "baseline.shifts.blur.1.at_means.top1": -0.25}
    assert differences(own, other, still=False) == expected
    assert differences(own, other, still=True) == expected | {"baseline.shifts.blur.1.draws.top1": 0.25}


def test_intervals_are_paired_by_image() -> None:
    """The two runs differ far less than the images do: paired, the interval is as narrow as the difference's spread."""
    g = torch.Generator().manual_seed(0)
    hard = 10 * torch.randn(1000, generator=g, dtype=torch.float64)
    off = 0.2 * torch.randn(1000, generator=g, dtype=torch.float64)
    own, other = {"means.nll": hard + off, "score.entropy": hard}, {"means.nll": hard, "score.entropy": hard}
    found = intervals(own, other, still=False)
    low, high = found.pop("baseline.nll_interval")
    assert not found
    error = float(off.std()) / 1000**0.5
    centre = float(off.mean())
    # quantiles of 2,000 resamples have a standard error of about .06 standard errors at 2.5%
    assert low == pytest.approx(centre - 1.96 * error, abs=0.3 * error)
    assert high == pytest.approx(centre + 1.96 * error, abs=0.3 * error)
    assert set(intervals(own | {"draws.nll": hard}, other, still=True)) == {
        "baseline.nll_interval",
        "baseline.draws.nll_interval",
    }
    assert intervals({"means.nll": hard[:5]}, other, still=False) == {}  # other images


def test_what_hangs_on_draws() -> None:
    still = {"selective.label_free_knn.aurc": 1, "score.label_free_mahalanobis_at_means": 1}
    still |= {"top1": 1, "selective.entropy.aurc": 1, "shifts.blur.1.top1": 1, "means.nll": 1, "settings": 1}
    drawn = ("draws.top1", "draws_unaligned.top1", "levels.encoder.raw.variance", "score.label_free_mahalanobis")
    more = ("shifts.blur.1.draws.top1", "ood.noise.draws_entropy.auroc", "score.draws_entropy")
    assert without_draws(still | dict.fromkeys(drawn + more, 1)) == still
    named = {f"ood.noise.label_free_{name}.auroc": candidate for name, candidate in CANDIDATES.items()}
    assert set(without_draws(named)) == {name for name, candidate in named.items() if not candidate.least_draws}
