"""Figure 4, centre and right: the signs of the claims, and one whole study."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import handmade
from byov.data.images import ImageSet
from byov.data.shifts import SEVERITIES, SHIFTS
from byov.evaluation.measures import shift_measures, shift_names
from byov.evaluation.probe import Labelled, Subject
from byov.inference.run import Run
from byov.studies.framework.claims import verdict
from byov.studies.framework.compare import predictions
from byov.studies.framework.lab import Lab
from byov.studies.paper import fig4_shift
from byov.studies.paper.fig4_shift import CLAIMS, CLEAN, LOWER, SHARE, WORSE, compare_shifts, draw


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
        | dict.fromkeys(measures, 0.2 + row["difference"])
        for row in made
    ]


def test_what_the_paper_says_is_shown_and_its_reverse_is_opposite() -> None:
    assert {verdict(claim, rows(0.03)).word for claim in CLAIMS} == {"shown"}
    assert {verdict(claim, rows(-0.03)).word for claim in CLAIMS} == {"opposite"}
    assert CLAIMS[0].room is not None and CLAIMS[0].room(rows(0.03))[0].value == pytest.approx(20)
    salt = CLAIMS[0].effects(rows(0.03))
    assert (salt[0].value, salt[0].error) == pytest.approx((3, 0.1))  # points


def test_the_figure_has_a_bar_for_each_shift_and_not_for_the_share() -> None:
    reliability, ece = draw(rows(0.02), "micro").axes
    assert [label.get_text() for label in reliability.get_yticklabels()][:2] == ["clean", "salt pepper"]
    assert len(ece.patches) == 1 + len(SHIFTS)


def test_a_study_from_runs_to_rows(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    few = ["salt_pepper", *WORSE, "blur"]
    monkeypatch.setattr(fig4_shift, "shift_names", lambda subject: few)
    lab.seeds = 1
    found = fig4_shift.results(lab)
    assert [row["shift"] for row in found] == [CLEAN, *few, SHARE]
    at_means = predictions(lab, lab.config("byov", 0))
    top1 = float((at_means.probabilities["means"].argmax(1) == at_means.labels).double().mean())
    assert found[0]["top1"] == pytest.approx(top1) and found[0]["ece.error"] > 0
    with monkeypatch.context() as patch:
        patch.setattr(fig4_shift, "compare_shifts", None)
        assert fig4_shift.results(lab) == found  # from the cache
        patch.setattr(fig4_shift, "SHIFT_SEED", 1)
        with pytest.raises(TypeError):  # it would be measured again
            fig4_shift.results(lab)
    assert all(len(claim.effects(found)) == 1 for claim in CLAIMS)
    assert draw(found, "micro").axes


class Blind(nn.Module):
    """Sees the first pixels only."""

    def forward(self, images: Tensor) -> Tensor:
        return handmade.pixels(images)[:, :5]


def subject(run: Run) -> Subject:
    images = handmade.images(50, seed=2)
    data = ImageSet(images, (images[:, 0, 0, 0] > 128).long())
    labelled = Labelled("made", data, data, torch.arange(50), True, None)
    encoder = Blind() if "blind" in run.folder.name else nn.Flatten()
    return Subject(run, encoder, labelled, handmade.SIDE, lambda *what: None)


@pytest.fixture
def by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fig4_shift, "subject_of", subject)
    monkeypatch.setattr(fig4_shift, "shift_names", lambda whom: [*WORSE, "salt_pepper", "blur"])


@pytest.mark.usefixtures("by_hand")
def test_numbers_are_the_evaluations_averaged_over_severities(tmp_path: Path) -> None:
    runs = [handmade.run(tmp_path / name, handmade.Affine(4)) for name in ("sees", "blind")]
    rows = {row["shift"]: row for row in compare_shifts(*runs, resamples=20)}
    assert list(rows) == [CLEAN, *WORSE, "salt_pepper", "blur", SHARE]
    for run, end in zip(runs, ("", ".baseline"), strict=True):
        found = shift_measures(subject(run), "salt_pepper", 0, lambda severity: None)
        for measure in (*LOWER, "top1"):
            average = sum(found[f"shifts.salt_pepper.{severity}.{measure}"] for severity in SEVERITIES) / 5
            assert rows["salt_pepper"][measure + end] == pytest.approx(average)
    row = rows["blur"]
    assert row["brier.difference"] == pytest.approx(row["brier"] - row["brier.baseline"]) and row["brier.error"] > 0
    better = sum(rows[shift]["ece.difference"] < 0 for shift in ("salt_pepper", "blur"))
    assert rows[SHARE]["ece.difference"] == better / 2 - 0.5
    assert "top1.difference" not in rows[SHARE]


@pytest.mark.usefixtures("by_hand")
def test_a_run_ties_with_itself(tmp_path: Path) -> None:
    run = handmade.run(tmp_path / "sees", handmade.Affine(4))
    *rows, share = compare_shifts(run, run, resamples=20)
    for row in rows:
        assert all(row[f"{measure}.{end}"] == 0 for measure in LOWER for end in ("difference", "error"))
    assert share["ece.difference"] == -0.5  # it is better nowhere


@pytest.mark.usefixtures("by_hand")
def test_all_shifts_that_change_the_images_are_taken(tmp_path: Path) -> None:
    assert set(WORSE) < set(shift_names(subject(handmade.run(tmp_path / "sees", handmade.Affine(4)))))
