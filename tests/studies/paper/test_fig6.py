"""Figure 6's rows, and its claims on profiles made by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest

from byov.studies.framework.claims import verdict
from byov.studies.framework.lab import Lab
from byov.studies.paper import fig6
from byov.studies.paper.fig6 import SCHEDULES

ENCODER, PROJECTOR, PREDICTOR = "encoder.stem.weight", "projector.0.weight", "predictor.0.weight"


def rows(encoder: float, heads: float, maximum: float = 2.0) -> list[dict[str, Any]]:
    """SNR at the end falls by these factors from the lowest beta to the highest; the maximum's more by `maximum`."""
    falls = {ENCODER: encoder, PROJECTOR: heads, PREDICTOR: heads}
    part = {"0->0.1": 0.0, "0->0.3": 0.5, "0->1": 1.0, "1->1": 1.0}
    return [
        {
            "schedule": schedule,
            "seed": seed,
            "layer": layer,
            "epoch": epoch,
            "snr_mean": 10 * (fall * (1 + 0.001 * seed)) ** (-part[schedule] * epoch),
            "snr_max": 99 * (maximum * fall * (1 + 0.001 * seed)) ** (-part[schedule] * epoch),
        }
        for schedule in SCHEDULES
        for seed in range(3)
        for layer, fall in falls.items()
        for epoch in (0, 1)
    ]


def words(found: list[dict[str, Any]]) -> list[str]:
    return [verdict(claim, found).word for claim in fig6.CLAIMS]


def test_the_claims_are_shown_where_beta_changes_the_heads_a_little() -> None:
    assert words(rows(encoder=1.0, heads=1.3)) == ["shown"] * 4


def test_the_opposite_is_found_where_beta_changes_much_and_the_heads_rise() -> None:
    assert words(rows(encoder=4.0, heads=0.5, maximum=1.5)) == ["opposite"] * 4


def test_effects_are_the_logarithms_of_the_falls() -> None:
    small, maximum, heads, more = [claim.effects(rows(1.1, 1.3, 2.0))[0].value for claim in fig6.CLAIMS]
    assert small == pytest.approx((math.log(1.1) + 2 * math.log(1.3)) / 3)
    assert maximum == pytest.approx(math.log(2))
    assert heads == pytest.approx(math.log(1.3))
    assert more == pytest.approx(math.log(1.3) - math.log(1.1))


def test_a_maximum_that_varies_with_the_seed_as_much_does_not_count() -> None:
    found = [row | {"snr_max": row["snr_max"] * 3 ** (row["seed"] % 2)} for row in rows(1.1, 1.3, 2.0)]
    values = {effect.seed: effect.value for effect in fig6.CLAIMS[1].effects(found)}
    beyond = math.log(2) - math.log(3)  # seeds 0 and 1, 1 and 2; seeds 2 and 0 are alike
    assert values == pytest.approx({0: beyond, 1: beyond, 2: math.log(2)}, abs=0.005)
    assert fig6.CLAIMS[1].effects([row for row in found if row["seed"] == 0]) == []


def test_the_study_from_runs_to_figure(lab: Lab) -> None:
    lab.seeds = 1
    configs = fig6.runs(lab)
    assert [(c.posterior.beta_start, c.posterior.beta_end) for c in configs] == list(SCHEDULES.values())
    assert lab.path(configs[2]) == lab.path(lab.config("byov", 0))  # the scale's own BYOV
    lab.train(configs)
    found = fig6.results(lab)
    assert {row["schedule"] for row in found} == set(SCHEDULES)
    assert len({row["snr_mean"] for row in found if row["layer"].startswith("predictor.0") and row["epoch"] == 1}) == 4
    assert len(fig6.draw(found, "tiny").axes) == 8
