"""Figure 4, left: what the claims read, and one whole study."""

from __future__ import annotations

from typing import Any

import pytest

from byov.studies.framework.lab import Lab
from byov.studies.measurements.pruning_curves import SPARSER
from byov.studies.paper import fig4_pruning
from byov.studies.paper.fig4_pruning import ARMS, CLAIMS, SPARSITIES, draw, largest


def row(seed: int, sparsity: float, difference: float, arm: str = "magnitude") -> dict[str, Any]:
    return {
        "seed": seed,
        "arm": arm,
        "sparsity": sparsity,
        "top1": 0.5,
        "refitted.top1": None if arm == "random" else 0.9,
        "top1.difference": difference,
        "top1.error": 0.01,
        "sparser.difference": difference - 0.1 if sparsity <= 0.5 else None,
        "sparser.error": 0.02 if sparsity <= 0.5 else None,
    }


def test_the_largest_difference_is_sought_in_the_other_seeds() -> None:
    table = {0: {0.25: 0.01, 0.5: 0.05, 0.8: 0.30}, 1: {0.25: 0.02, 0.5: 0.10, 0.8: 0.01}}
    rows = [row(seed, s, d) for seed, of in table.items() for s, d in of.items()]
    found = {effect.seed: effect.value for effect in largest(rows)}
    assert found == pytest.approx({0: 5, 1: 1})  # seed 1 has it at .5, seed 0 at .8
    alone = [r for r in rows if r["seed"] == 0]
    assert [effect.value for effect in largest(alone)] == pytest.approx([30])


def test_a_sparser_model_is_sought_over_all_pairs_that_are_a_quarter_apart() -> None:
    table = {s: s for s in SPARSITIES if s > 0}
    rows = [row(seed, s, d) for seed in (0, 1) for s, d in table.items()]
    rows = [
        r | {"sparser.difference": r["sparsity"], "sparser.error": 0.02} if r["sparsity"] <= 0.7 else r for r in rows
    ]
    assert [effect.value for effect in CLAIMS[1].effects(rows)] == pytest.approx([70, 70])
    assert [s for s in SPARSITIES if s > 0 and round(s + SPARSER, 6) in SPARSITIES] == [0.25, 0.5, 0.6, 0.7]


def test_claims_are_at_half_of_the_weights_in_points() -> None:
    arms = {"magnitude": 0.04, "byol": 0.03, "variance": 0.2, "random": 0.4, "snr": 0.0}
    rows = [row(0, s, d if s == 0.5 else 0.0, arm) for arm, d in arms.items() for s in SPARSITIES]
    values = [claim.effects(rows)[0].value for claim in CLAIMS]
    assert values == pytest.approx([4, -6, 4, 3, 20])
    assert [claim.effects(rows)[0].error for claim in CLAIMS] == pytest.approx([1, 2, 1, 1, 1])


def test_the_picture_has_a_line_for_each_arm() -> None:
    rows = [row(seed, s, 0.0, arm) for seed in (0, 1) for arm in ARMS for s in SPARSITIES]
    kept, refitted = draw(rows, "micro").axes
    assert [line.get_label() for line in kept.lines] == list(ARMS.values())
    assert len(refitted.lines[0].get_xdata()) == len(SPARSITIES) and len(refitted.lines[-1].get_xdata()) == 0


def test_a_study_from_runs_to_rows(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fig4_pruning, "SPARSITIES", (0.0, 0.5, 0.75))
    lab.seeds = 1
    assert [c.method for c in fig4_pruning.runs(lab)] == ["byov", "byol"]
    rows = fig4_pruning.results(lab)
    assert len(rows) == len(ARMS) * 3
    table = {(r["arm"], r["sparsity"]): r for r in rows}
    sparser = table["snr", 0.75]["top1"] - table["magnitude", 0.5]["top1"]
    assert table["magnitude", 0.5]["sparser.difference"] == pytest.approx(sparser)
    assert table["snr", 0.0]["top1"] == table["random", 0.0]["top1"]
    assert fig4_pruning.results(lab) == rows
    assert draw(rows, "micro").axes
