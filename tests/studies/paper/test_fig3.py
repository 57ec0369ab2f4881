"""Figure 3's rows, and its claims on profiles made by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest

from byov.studies.framework.claims import verdict
from byov.studies.framework.compare import PRIORS
from byov.studies.framework.lab import Lab
from byov.studies.measurements.layer_history import beyond_seeds, distances, profiles, seed_distances
from byov.studies.paper import fig3

LAYERS = ("encoder.stem.weight", "projector.0.weight")


def rows(sigma: dict[str, float], snr: dict[str, float], seeds: int = 3) -> list[dict[str, Any]]:
    """All priors are the same at first; at the end each layer has its prior's factor, nearly the same for each seed."""
    return [
        {
            "prior": prior,
            "seed": seed,
            "layer": layer,
            "epoch": epoch,
            **{f"sigma_{s}": 0.01 * (sigma[prior] * (1 + 0.001 * seed)) ** epoch for s in ("mean", "max")},
            **{f"snr_{s}": 5 * (snr[prior] * (1 + 0.001 * seed)) ** epoch for s in ("mean", "max")},
        }
        for prior in PRIORS
        for seed in range(seeds)
        for layer in LAYERS
        for epoch in (0, 1)
    ]


def factors(*values: float) -> dict[str, float]:
    return dict(zip(PRIORS, values, strict=True))


def words(found: list[dict[str, Any]]) -> list[str]:
    return [verdict(claim, found).word for claim in fig3.CLAIMS]


def test_profiles_are_those_of_the_last_epoch() -> None:
    ends = profiles(rows(factors(1, 2, 4), factors(1, 1, 1)), "prior", "sigma_mean")
    assert ends["teacher_mean", 0] == pytest.approx(dict.fromkeys(LAYERS, 0.02))
    assert len(ends) == 9


def test_distances_average_the_pairs_and_need_both_of_a_seed() -> None:
    found = rows(factors(1, 2, 4), factors(1, 1, 1))
    pairs = fig3.PAIRS
    assert distances(found, "prior", pairs, "sigma_mean") == pytest.approx(dict.fromkeys(range(3), 4 / 3 * math.log(2)))
    some = [row for row in found if (row["prior"], row["seed"]) != ("teacher_moments", 1)]
    assert list(distances(some, "prior", pairs, "sigma_mean")) == [0, 2]


def test_the_claims_are_shown_where_sigma_differs_and_snr_does_not() -> None:
    """teacher_moments stands apart in SNR, as the paper has it."""
    assert words(rows(factors(1, 2, 5), factors(1, 1.05, 1.4))) == ["shown"] * 5


def test_the_opposite_is_found_where_snr_differs_and_sigma_does_not() -> None:
    """Sigma is as far apart between seeds, a thousandth, as between priors: a large difference would have shown."""
    assert words(rows(factors(1, 1, 1), factors(1, 5, 2))) == ["not shown"] + ["opposite"] * 4


def test_the_floor_is_the_distance_to_the_next_seed_and_unknown_of_one() -> None:
    found = rows(factors(1, 2, 4), factors(1, 1, 1))
    factor = [1, 1.001, 1.002]
    steps = {0: math.log(factor[1]), 1: math.log(factor[2] / factor[1]), 2: math.log(factor[2])}
    assert seed_distances(found, "prior", "standard", "sigma_mean") == pytest.approx(steps)
    apart = beyond_seeds(found, "prior", fig3.PAIRS, "standard", "sigma_mean")
    assert apart == pytest.approx({seed: 4 / 3 * math.log(2) - step for seed, step in steps.items()})
    alone = rows(factors(1, 2, 4), factors(1, 1, 1), seeds=1)
    assert seed_distances(alone, "prior", "standard", "sigma_mean") == {}
    assert fig3.CLAIMS[0].effects(alone) == [] and len(fig3.CLAIMS[1].effects(alone)) == 1


def test_the_size_of_a_difference_is_reported() -> None:
    large, similar, *_ = [verdict(claim, rows(factors(1, 2, 4), factors(1, 1, 1))) for claim in fig3.CLAIMS]
    assert large.estimate == pytest.approx(4 / 3 * math.log(2) - 2 / 3 * math.log(1.002))
    assert similar.estimate == pytest.approx(4 / 3 * math.log(2))


def test_the_study_from_runs_to_figure(lab: Lab) -> None:
    lab.seeds = 1
    configs = fig3.runs(lab)
    assert [c.posterior.prior for c in configs] == list(PRIORS)
    assert lab.path(configs[0]) == lab.path(lab.config("byov", 0))  # the scale's own BYOV
    lab.train(configs)
    found = fig3.results(lab)
    layers = {row["layer"] for row in found}
    assert len(found) == 3 * len(layers) * 2  # before the first step and after the one epoch
    assert {layer.split(".")[0] for layer in layers} == {"encoder", "projector", "predictor"}
    assert len(fig3.draw(found, "tiny").axes) == 12
    assert words(found) == ["cannot tell"] * 5  # of one seed
