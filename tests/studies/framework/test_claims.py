"""The rule of the verdicts, against intervals that scipy makes and cases by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy import stats

from byov.metrics.resampling import replicates, resampled_counts
from byov.studies.framework.claims import (
    CANNOT_TELL,
    NO_ROOM,
    NOT_SHOWN,
    OPPOSITE,
    SHOWN,
    Claim,
    Effect,
    at_most,
    best_of_other_seeds,
    differences,
    judge,
    rooms,
    verdict,
)
from byov.studies.framework.replicates import packed, unpacked


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


# ------------------------------------------------------------------------------------------- crossed seeds and images

SEEDS, IMAGES, TRIES = 4, 100, 400
COUNTS = torch.cat(list(resampled_counts(IMAGES, 200)))


def crossed(table: np.ndarray) -> list[Effect]:
    """One effect per seed from a table (seeds, images), with replicates from the same resamples for all seeds."""
    rows = COUNTS.numpy() @ table.T / IMAGES
    return [
        Effect(seed, own.mean(), rows[:, seed].std(ddof=1), tuple(rows[:, seed] - own.mean()))
        for seed, own in enumerate(table)
    ]


@pytest.mark.parametrize(
    ("of_seeds", "of_images", "of_rest"), [(0.1, 1.0, 0.5), (0.0, 0.0, 2.0), (0.3, 0.5, 1.0), (0.0, 2.0, 0.2)]
)
def test_seeds_and_images_are_crossed(of_seeds: float, of_images: float, of_rest: float) -> None:
    """Known components: the variance is right on average, and 19 of 20 intervals hold the truth, which is 0."""
    g = np.random.default_rng(0)
    truth = of_seeds**2 / SEEDS + of_images**2 / IMAGES + of_rest**2 / (SEEDS * IMAGES)
    variances, held, old = [], 0, 0
    for _ in range(TRIES):
        table = of_seeds * g.normal(size=(SEEDS, 1)) + of_images * g.normal(size=(1, IMAGES))
        effects = crossed(table + of_rest * g.normal(size=(SEEDS, IMAGES)))
        found, bound = judge(effects, size=1), judge([Effect(e.seed, e.value, e.error) for e in effects], size=1)
        assert found.crossed and not bound.crossed and found.low is not None and bound.low is not None
        over_seeds = float(np.var([e.value for e in effects], ddof=1)) / SEEDS
        variances.append(over_seeds + found.image_error**2)
        held += found.low <= 0 <= found.high
        old += bound.low <= 0 <= bound.high
    assert 0.88 < np.mean(variances) / truth < 1.2  # a negative covariance counts as 0
    assert held / TRIES == pytest.approx(0.95, abs=0.035)
    assert old / TRIES > 0.93  # without replicates the interval is an upper bound


def test_without_replicates_the_rest_counts_twice() -> None:
    """Seeds that agree on nothing but chance: the shared part is 0, and the bound is not."""
    table = np.random.default_rng(1).normal(size=(SEEDS, IMAGES))
    effects = crossed(table)
    found, bound = judge(effects, size=1), judge([Effect(e.seed, e.value, e.error) for e in effects], size=1)
    assert found.image_error < 0.05 and bound.image_error == pytest.approx(0.1, rel=0.15)
    mixed = [effects[0], *(Effect(e.seed, e.value, e.error) for e in effects[1:])]
    assert judge(mixed, size=1) == bound  # one old row is enough


def test_replicates_survive_their_row() -> None:
    x = torch.randn(80, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    (found,) = replicates(lambda counts: {"mean": counts @ x / counts.sum(1)}, 80).values()
    row = {"seed": 3, "ece.difference": -0.02, "ece.error": float(found.std()), "ece.replicates": packed(found)}
    (effect,) = differences([row], "ece", sign=-1)
    assert effect.value == pytest.approx(2) and effect.replicates is not None
    expected = -100 * (found - found.mean())
    assert torch.allclose(torch.tensor(effect.replicates, dtype=torch.float64), expected, atol=effect.error / 60)
    assert unpacked(packed(torch.ones(5, dtype=torch.float64))) == [0.0] * 5
    assert len(packed(found)) < 700


# ------------------------------------------------------------------------------------------------- room and conditions


def claim_of_ece(**more: object) -> Claim:
    rule = {"measure": "ece", "sign": -1}
    return Claim("4.1", "better", "2.83 points", "points of ECE", 2.83, lambda rows: differences(rows, **rule), **more)


def row_of_ece(
    seed: int, difference: float, reference: float = 0.012, floor: float | None = 0.009
) -> dict[str, object]:
    row = {"seed": seed, "ece": reference + difference, "ece.difference": difference, "ece.error": 0.001}
    return row if floor is None else row | {"ece.floor": floor}


def test_where_the_papers_effect_is_impossible_there_is_no_room() -> None:
    claim = claim_of_ece(room=lambda rows: rooms(rows, "ece", -1))
    flat = [row_of_ece(seed, 0.0001 * seed) for seed in range(3)]
    assert verdict(claim_of_ece(), flat).word == NOT_SHOWN
    found = verdict(claim, flat)
    assert found.word == NO_ROOM and found.room == pytest.approx(0.3)
    assert verdict(claim, flat[:1]).word == NO_ROOM  # of one seed too
    better, worse = ([row_of_ece(s, d + 1e-5 * s) for s in range(3)] for d in (-0.01, 0.01))
    assert verdict(claim, better).word == SHOWN and verdict(claim, worse).word == OPPOSITE  # only what is not shown
    wide = [row_of_ece(seed, 0.0001 * seed, reference=0.08) for seed in range(3)]
    assert verdict(claim, wide).word == NOT_SHOWN and verdict(claim, wide).room == pytest.approx(7.1)
    old = [row_of_ece(seed, 0.0001 * seed, floor=None) for seed in range(3)]
    assert verdict(claim, old).room == pytest.approx(1.2)  # an upper bound


def test_the_room_upwards_ends_at_the_top() -> None:
    rows = [{"seed": 0, "top1": 0.83, "top1.difference": 0.03}]
    assert [effect.value for effect in rooms(rows, "top1", +1)] == pytest.approx([20])
    assert [effect.value for effect in rooms(rows, "top1", -1)] == pytest.approx([80])
    assert [effect.value for effect in at_most(50)([{"seed": 0}, {"seed": 0}, {"seed": 1}])] == [50, 50]


def test_caveats_stand_with_the_verdict_and_change_no_word() -> None:
    claim = claim_of_ece(caveats=lambda rows: ["mind the start"])
    found = verdict(claim, [row_of_ece(seed, -0.01) for seed in range(3)])
    assert found.caveats == ("mind the start",) and found.word == SHOWN
    assert verdict(claim, []).caveats == ()
