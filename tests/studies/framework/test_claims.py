"""The rule of the verdicts, against intervals that scipy makes and cases by hand."""

from __future__ import annotations

import math

import pytest
from scipy import stats

from byov.studies.framework.claims import (
    CANNOT_TELL,
    NOT_SHOWN,
    OPPOSITE,
    SHOWN,
    Claim,
    Effect,
    best_of_other_seeds,
    judge,
    verdict,
)


def seeds(*values: float, error: float = 0.0) -> list[Effect]:
    return [Effect(seed, value, error) for seed, value in enumerate(values)]


def test_without_error_over_images_it_is_the_t_interval_of_the_mean() -> None:
    values = (1.0, 2.5, 0.5, 3.0)
    found = judge(seeds(*values), size=1)
    low, high = stats.t.interval(0.95, 3, loc=sum(values) / 4, scale=stats.sem(values))
    assert (found.estimate, found.low, found.high) == pytest.approx((1.75, low, high))
    assert found.half_width == pytest.approx((high - low) / 2)


def test_more_seeds_do_not_make_up_for_few_images() -> None:
    """All seeds agree: what is left is the error over the images that they share."""
    few, many = (judge(seeds(*[1.0] * count, error=0.5), size=1) for count in (3, 300))
    assert few.half_width == many.half_width == pytest.approx(stats.norm.ppf(0.975) * 0.5)
    mixed = judge([Effect(0, 1.0, 0.3), Effect(1, 1.0, 0.4)], size=1)
    assert mixed.image_error == pytest.approx(math.sqrt((0.09 + 0.16) / 2))


def test_only_the_seeds_part_is_known_from_few() -> None:
    """Satterthwaite by hand: 1/3 over seeds with 2 degrees of freedom, 1/4 over images with many."""
    found = judge(seeds(1.0, 2.0, 3.0, error=0.5), size=1)
    error = math.sqrt(1 / 3 + 1 / 4)
    assert found.half_width == pytest.approx(stats.t.ppf(0.975, 2 * (7 / 4) ** 2) * error)


@pytest.mark.parametrize(
    ("values", "word"),
    [
        ((2.0, 2.1, 1.9), SHOWN),
        ((-2.0, -2.1, -1.9), OPPOSITE),
        ((0.1, -0.1, 0.0), NOT_SHOWN),  # within +-0.25: an effect of 1 would have been seen
        ((3.0, -2.0, 0.5), CANNOT_TELL),
        ((2.0,), CANNOT_TELL),
        ((), CANNOT_TELL),
    ],
)
def test_directional(values: tuple[float, ...], word: str) -> None:
    assert judge(seeds(*values), size=1).word == word


@pytest.mark.parametrize(
    ("values", "word"),
    [
        ((0.1, -0.1, 0.0), SHOWN),
        ((0.6, 0.5, 0.4), SHOWN),  # it differs from 0, but by less than matters
        ((2.0, 2.1, 1.9), OPPOSITE),
        ((-2.0, -2.1, -1.9), OPPOSITE),
        ((0.9, 1.0, 1.1), CANNOT_TELL),
        ((0.0,), CANNOT_TELL),
    ],
)
def test_no_difference(values: tuple[float, ...], word: str) -> None:
    assert judge(seeds(*values), size=1, equal=True).word == word


def test_one_seed_has_an_estimate_and_no_interval() -> None:
    found = judge([Effect(0, 2.0, 0.5)], size=1)
    assert (found.estimate, found.image_error) == (2.0, 0.5)
    assert found.low is found.high is found.half_width is None


def test_a_claim_is_judged_by_the_rows_of_its_study() -> None:
    claim = Claim("4.1", "it grows", "no number", "points", 1.0, lambda rows: [Effect(r["seed"], r["x"]) for r in rows])
    assert verdict(claim, [{"seed": s, "x": 3.0 + 0.1 * s} for s in range(3)]).word == SHOWN
    with pytest.raises(ValueError, match="more than one effect per seed"):
        verdict(claim, [{"seed": 0, "x": 3.0}, {"seed": 0, "x": 3.1}])


def test_the_interval_holds_the_truth_as_often_as_it_claims() -> None:
    """Effects that differ by seed (s.d. 1): 19 of 20 intervals over 4 seeds hold 0; 2,000 tries, four errors wide."""
    table = stats.norm.rvs(size=(2000, 4), random_state=0)
    held = [(found := judge(seeds(*row), size=1)).low <= 0 <= found.high for row in table]
    assert sum(held) / 2000 == pytest.approx(0.95, abs=4 * math.sqrt(0.95 * 0.05 / 2000))


def test_the_best_option_is_sought_in_the_other_seeds() -> None:
    lucky, steady = [Effect(0, 30.0), Effect(1, 1.0), Effect(2, 0.0)], [Effect(s, 5.0, 0.1 * s) for s in range(3)]
    assert best_of_other_seeds([lucky, steady]) == [steady[0], lucky[1], lucky[2]]  # seed 0's luck is for others only
    assert best_of_other_seeds([lucky[:1], steady[:1]]) == lucky[:1]
    assert best_of_other_seeds([]) == []
