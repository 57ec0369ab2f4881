"""Figure 2's rows, its figure, and the signs of its claims on rows made by hand."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from byov.studies.framework.claims import Claim, verdict
from byov.studies.framework.compare import MEASURES
from byov.studies.framework.lab import Lab
from byov.studies.paper import fig2
from byov.studies.paper.fig2 import BYOL, COMPARISONS, DRAWN, FIXED, MEAN, MOMENTS, SETTINGS

BASE = {"top1": 0.7, "top5": 0.9, "ece": 0.1, "brier": 0.4, "reliability": 0.1, "resolution": 0.5, "nll": 1.0}
PAPER = {
    "ece": -0.0283,
    "brier": -0.0103,
    "reliability": -0.0103,
    "top1": -0.004,
    "top5": -0.0022,
    "resolution": -0.0057,
}


def row(arm: str, at: str, against: str, seed: int, shift: dict[str, float], spike: float = 0.5) -> dict[str, Any]:
    shift = {m: shift.get(m, 0.0) * (1 + 0.001 * seed) for m in MEASURES}
    setting = SETTINGS.get(arm, {"prior": None, "beta": None})
    return {
        **{"arm": arm, "at": at, "against": against, "seed": seed, "gradient_spike": spike, **setting},
        **{m: BASE[m] + shift[m] for m in MEASURES},
        **{f"{m}.difference": shift[m] for m in MEASURES},
        **{f"{m}.error": 1e-5 for m in MEASURES},
    }


def rows(sign: int = 1) -> list[dict[str, Any]]:
    """As the paper has it, or, with sign -1, the other way round. beta 0.1 is best calibrated of all."""
    found = []
    for seed in range(3):
        found.append(row(BYOL, "means", BYOL, seed, {}))
        for arm, setting in SETTINGS.items():
            more = 2 if setting["beta"] == 0.1 and sign > 0 else 1
            found += [
                row(arm, at, BYOL, seed, {m: sign * more * v for m, v in PAPER.items()}) for at in ("means", "draws")
            ]
        found.append(row(DRAWN, "draws", DRAWN, seed, {"top1": sign * 0.0034}))
        found.append(row(DRAWN, "draws_unaligned", DRAWN, seed, {"top1": sign * 0.0017}))
        found.append(row(FIXED, "means", FIXED, seed, {}))
        found.append(row(MEAN, "means", FIXED, seed, {"top1": -sign * 0.002}))
        found.append(row(MOMENTS, "means", FIXED, seed, {"top1": -sign * 0.04}, spike=0.5 + sign * math.log(3)))
    return found


def claim(words: str) -> Claim:
    (found,) = [claim for claim in fig2.CLAIMS if words in claim.says]
    return found


def test_all_claims_are_shown_by_the_papers_own_numbers() -> None:
    assert [verdict(claim, rows()).word for claim in fig2.CLAIMS] == ["shown"] * len(fig2.CLAIMS)


def test_signs_turn_with_the_numbers_but_for_the_claims_of_no_difference() -> None:
    for claim in fig2.CLAIMS:
        assert verdict(claim, rows(-1)).word == ("shown" if claim.equal else "opposite"), claim.says


def test_effects_are_the_papers_points() -> None:
    for words, size in (
        ("BYOV has a better ECE", 2.83),
        ("Aligned draws", 0.34),
        ("Plain draws", 0.17),
        ("notably worse", 4.0),
    ):
        found = [c for c in fig2.CLAIMS if words in c.says and "best of nine" not in c.says]
        assert found[0].effects(rows())[0].value == pytest.approx(size)
    assert claim("unstable").effects(rows())[0].value == pytest.approx(math.log(3))


def test_the_best_of_nine_is_the_one_that_the_other_seeds_prefer() -> None:
    best = claim("The best BYOV has a better ECE")
    assert best.effects(rows())[0].value == pytest.approx(2 * 2.83)
    assert "chosen on the other seeds" in best.says
    assert best.effects([]) == []


def test_a_run_too_short_for_spikes_has_no_effect() -> None:
    found = [r | {"gradient_spike": None} if r["seed"] == 1 else r for r in rows()]
    assert [effect.seed for effect in claim("unstable").effects(found)] == [0, 2]


def test_one_panel_per_measure_with_one_line_per_prior_and_place() -> None:
    figure = fig2.draw(rows(), "micro")
    assert len(figure.axes) == 6
    byol, *lines = figure.axes[0].lines
    assert byol.get_ydata() == pytest.approx([70, 70])
    assert [line.get_linestyle() for line in lines] == ["-", "--"] * 3
    assert lines[0].get_ydata() == pytest.approx([69.1992, 69.5996, 69.5996], abs=1e-3)


def test_the_study_from_runs_to_figure(lab: Lab) -> None:
    lab.seeds = 1
    configs = fig2.runs(lab)
    assert len({lab.path(config) for config in configs}) == 10
    assert lab.path(fig2.arms(lab)[FIXED](0)) == lab.path(lab.config("byov", 0))  # the scale's own BYOV
    found = fig2.results(lab)
    places = [(r["arm"], r["at"]) for r in found if r["against"] == BYOL]
    assert len(places) == len(set(places)) == 1 + 3 * 9
    assert [r["top1.difference"] for r in found if r["arm"] == r["against"] and r["at"] == "means"] == [0, 0, 0]
    assert {r["against"] for r in found} == set(COMPARISONS)
    json.dumps(found, allow_nan=False)  # strict
    fig2.draw(found, "tiny")
    words = {claim.says: verdict(claim, found).word for claim in fig2.CLAIMS}
    assert set(words.values()) <= {"cannot tell", "no room"}  # of one seed
    byol = next(r for r in found if r["arm"] == BYOL)
    assert 0 < byol["ece.floor"] < byol["ece"] + 0.05 and byol["reliability.floor"] > 0
