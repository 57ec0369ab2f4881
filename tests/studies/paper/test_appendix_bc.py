"""Each choice of the appendices, compared with its alternative."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from byov.runs.folder import read_log
from byov.studies.framework import compare
from byov.studies.framework.compare import MEASURES
from byov.studies.framework.lab import Lab
from byov.studies.paper import appendix_bc
from byov.studies.paper.appendix_bc import BYOL, CLAIMS, COLUMNS, FLIPPED, LARGE, RECIPE


def made(top1: dict[str, float], spikes: dict[str, float] | None = None) -> list[dict[str, Any]]:
    """Rows at the means, whose differences are to the recipe or to one draw at the large batch."""
    rows = []
    for arm in COLUMNS:
        for seed in (0, 1):
            row: dict[str, Any] = {"arm": arm, "seed": seed, "at": "means", "median_sigma": 0.02, **COLUMNS[arm]}
            row |= {"peak_memory_mib": 500.0, "gradient_spike": (spikes or {}).get(arm, 0.5)}
            reference = top1.get(LARGE if arm in (LARGE, FLIPPED) else RECIPE, 0.9)
            for name in MEASURES:
                row |= {name: top1.get(arm, 0.9), f"{name}.difference": top1.get(arm, 0.9) - reference}
                row[f"{name}.error"] = 0.01
            rows.append(row)
    return rows


@pytest.mark.parametrize(
    ("claim", "worse"),
    [(0, "weight decay"), (1, "constant beta"), (3, "softplus")],
    ids=["decay", "annealing", "scale"],
)
def test_a_claim_is_positive_where_the_other_choice_is_worse(claim: int, worse: str) -> None:
    found = CLAIMS[claim].effects(made({worse: 0.85}))
    assert [effect.value for effect in found] == pytest.approx([5.0, 5.0])
    assert [effect.error for effect in found] == pytest.approx([1.0, 1.0])


def test_flipout_is_compared_with_one_draw_at_the_same_batch() -> None:
    assert CLAIMS[4].equal
    found = CLAIMS[4].effects(made({RECIPE: 0.95, LARGE: 0.80, FLIPPED: 0.82}))
    assert [effect.value for effect in found] == pytest.approx([2.0, 2.0])


def test_softplus_is_less_stable_where_its_gradient_spikes_higher() -> None:
    found = CLAIMS[2].effects(made({}, {"softplus": 0.5 + math.log(3), "weight decay": 9.0}))
    assert [effect.value for effect in found] == pytest.approx([math.log(3)] * 2)


def test_the_arms_change_what_they_say(tmp_path: Path) -> None:
    lab = Lab(tmp_path, "micro")
    found = {arm: make(3) for arm, make in appendix_bc.arms(lab).items()}
    recipe = found[RECIPE]
    assert {config.seed for config in found.values()} == {3} and list(found) != list(COLUMNS)
    assert set(found) == set(COLUMNS)
    assert recipe == lab.config("byov", 3, {"optim.variances": "adam"}) and found[BYOL] == lab.config("byol", 3)
    assert found["weight decay"].optim.weight_decay == 0.05  # what `byov train --method byol` resolves to
    assert (found["constant beta"].posterior.beta_start, found["constant beta"].posterior.beta_end) == (1.0, 1.0)
    assert found["softplus"].posterior.scale == "softplus" and found["one draw per view"].posterior.draw == "view"
    large = found[FLIPPED].optim
    assert large.batch_size == 4 * recipe.optim.batch_size and large.epochs == recipe.optim.epochs
    assert large.lr == 2 * recipe.optim.lr and large.log_variance_lr is None  # 8 / steps
    assert large.tau == pytest.approx(recipe.optim.tau**4)


def test_the_figure_shows_differences_in_points() -> None:
    figure = appendix_bc.draw(made({"softplus": 0.85}), "test")
    top1 = figure.axes[0]
    labels = [label.get_text() for label in top1.get_yticklabels()]
    means = dict(zip(labels, top1.get_lines()[2].get_xdata(), strict=True))  # after the line at 0 and the seeds
    assert means["softplus"] == pytest.approx(-5.0) and means["Flipout"] == 0
    assert len(figure.axes) == 4


def test_the_study_from_runs_to_figure(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    some = {
        arm: make for arm, make in appendix_bc.arms(lab).items() if arm in (RECIPE, BYOL, "softplus", LARGE, FLIPPED)
    }
    monkeypatch.setattr(appendix_bc, "arms", lambda lab: some)
    # one epoch is too short for a spike: what matters is whose folder is read
    monkeypatch.setattr(compare, "gradient_spike", lambda folder: float(len(read_log(folder / "metrics.jsonl").rows)))
    lab.seeds = 1
    lab.train(appendix_bc.runs(lab))
    rows = appendix_bc.results(lab)
    assert {row["arm"] for row in rows} == set(some)
    assert all(row["peak_memory_mib"] > 0 and row["question"] and row["choice"] for row in rows)
    assert [row["top1.difference"] for row in rows if row["arm"] in (RECIPE, LARGE) and row["at"] == "means"] == [0, 0]
    assert all(row["gradient_spike"] > 0 for row in rows)
    assert all(len(claim.effects(rows)) == 1 for claim in CLAIMS[2:])
    appendix_bc.draw(rows, lab.name)
