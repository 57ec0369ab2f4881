"""Figure 4, centre and right: the signs of the claims, and one whole study."""

from __future__ import annotations

from typing import Any

import pytest

from byov.data.shifts import SHIFTS
from byov.studies.framework.claims import verdict
from byov.studies.framework.lab import Lab
from byov.studies.measurements.shift_comparison import CLEAN, SHARE, WORSE
from byov.studies.paper import fig4_shift
from byov.studies.paper.fig4_shift import CLAIMS, draw


def rows(better: float) -> list[dict[str, Any]]:
    """BYOV lower by `better` everywhere but in WORSE, where it is as much higher."""
    made = []
    for seed in (0, 1):
        for shift in (CLEAN, *SHIFTS):
            difference = (better if shift in WORSE else -better) + 1e-4 * seed
            made.append({"seed": seed, "shift": shift, "difference": difference})
        made.append({"seed": seed, "shift": SHARE, "difference": 0.5 if better > 0 else -0.5})
    measures = ("ece", "reliability", "brier")
    return [
        {"seed": row["seed"], "shift": row["shift"]}
        | {f"{m}.difference": row["difference"] for m in measures}
        | {f"{m}.error": 0.001 for m in measures}
        for row in made
    ]


def test_what_the_paper_says_is_shown_and_its_reverse_is_opposite() -> None:
    assert {verdict(claim, rows(0.03)).word for claim in CLAIMS} == {"shown"}
    assert {verdict(claim, rows(-0.03)).word for claim in CLAIMS} == {"opposite"}
    salt = CLAIMS[0].effects(rows(0.03))
    assert (salt[0].value, salt[0].error) == pytest.approx((3, 0.1))  # points


def test_the_picture_has_a_bar_for_each_shift_and_not_for_the_share() -> None:
    reliability, ece = draw(rows(0.02), "micro").axes
    assert [label.get_text() for label in reliability.get_yticklabels()][:2] == ["clean", "salt pepper"]
    assert len(ece.patches) == 1 + len(SHIFTS)


def test_a_study_from_runs_to_rows(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    few = ["salt_pepper", *WORSE, "blur"]
    monkeypatch.setattr("byov.studies.measurements.shift_comparison.shift_names", lambda subject: few)
    lab.seeds = 1
    found = fig4_shift.results(lab)
    assert [row["shift"] for row in found] == [CLEAN, *few, SHARE]
    at_means = lab.outcomes(lab.config("byov", 0))
    top1 = float((at_means.probabilities["means"].argmax(1) == at_means.labels).double().mean())
    assert found[0]["top1"] == pytest.approx(top1) and found[0]["ece.error"] > 0
    with monkeypatch.context() as patch:
        patch.setattr(fig4_shift, "compare_shifts", None)
        assert fig4_shift.results(lab) == found  # from what is kept
        patch.setattr(fig4_shift, "SEED", 1)
        with pytest.raises(TypeError):  # it would be measured anew
            fig4_shift.results(lab)
    assert all(len(claim.effects(found)) == 1 for claim in CLAIMS)
    assert draw(found, "micro").axes
