"""Two runs under shifts: the measures of `byov evaluate`, averaged over severities; a run ties with itself."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import handmade
from byov.data.images import ImageSet
from byov.data.shifts import SEVERITIES
from byov.evaluation.labelled import Labelled, Subject
from byov.evaluation.shift_robustness import shift_measures, shift_names
from byov.inference.load import Run
from byov.studies.measurements import shift_comparison
from byov.studies.measurements.shift_comparison import CLEAN, LOWER, SHARE, WORSE, compare_shifts


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


@pytest.fixture(autouse=True)
def by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shift_comparison, "subject_of", subject)
    monkeypatch.setattr(
        "byov.studies.measurements.shift_comparison.shift_names", lambda whom: [*WORSE, "salt_pepper", "blur"]
    )


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


def test_a_run_ties_with_itself(tmp_path: Path) -> None:
    run = handmade.run(tmp_path / "sees", handmade.Affine(4))
    *rows, share = compare_shifts(run, run, resamples=20)
    for row in rows:
        assert all(row[f"{measure}.{end}"] == 0 for measure in LOWER for end in ("difference", "error"))
    assert share["ece.difference"] == -0.5  # it is better nowhere


def test_all_shifts_that_change_the_images_are_taken(tmp_path: Path) -> None:
    assert set(WORSE) < set(shift_names(subject(handmade.run(tmp_path / "sees", handmade.Affine(4)))))
