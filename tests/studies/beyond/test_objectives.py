"""What the objective does to the uncertainty."""

from __future__ import annotations

from typing import Any

import pytest

from byov.studies.beyond import objectives
from byov.studies.beyond.objectives import BYOV, CLAIMS, LABELS, NEGATIVES, WEAK
from byov.studies.framework.compare import MEASURES
from byov.studies.framework.lab import OOD_SOURCES, Lab

ARMS = (BYOV, NEGATIVES, WEAK, LABELS)


def row(arm: str, at: str, top1: float) -> dict[str, Any]:
    found = dict.fromkeys(MEASURES, top1) | {f"{name}.difference": top1 - 0.9 for name in MEASURES}
    found |= {f"{name}.error": 0.02 for name in MEASURES}
    scores = {f"{task}.{score}": 0.7 for task in ("errors", "ood.cifar10") for score in ("label_free", "probe")}
    return {"arm": arm, "seed": 0, "at": at, "median_sigma": 0.02, **found, **scores, "errors.probe": None}


def test_the_claim_is_of_negatives_at_the_means() -> None:
    rows = [
        row(arm, at, 0.93 if (arm, at) == (NEGATIVES, "means") else 0.9) for arm in ARMS for at in ("means", "draws")
    ]
    (effect,) = CLAIMS[0].effects(rows)
    assert effect.value == pytest.approx(3.0) and effect.error == pytest.approx(2.0) and CLAIMS[0].equal


def test_the_figure_has_one_panel_per_source_and_allows_gaps() -> None:
    figure = objectives.draw([row(arm, "draws", 0.9) for arm in ARMS], "test")
    assert [axes.get_xlabel() for axes in figure.axes][:3] == [
        "top-1 over draws (%)",
        "AUROC, errors",
        "AUROC, cifar10",
    ]


def test_the_study_from_runs_to_figure(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(OOD_SOURCES, "digits", ("digits@test",))
    lab.seeds = 1
    configs = {arm: make(0) for arm, make in objectives.arms(lab).items()}
    assert configs[WEAK].views.second.crop_area == (0.9, 1.0) and configs[WEAK].views.first.jitter == 0
    assert configs[NEGATIVES].objective.name == "byol_negatives" and configs[LABELS].method == "supervised-bbb"
    lab.train(objectives.runs(lab))
    rows = objectives.results(lab)
    drawn = [r for r in rows if r["at"] == "draws"]
    assert [r["arm"] for r in drawn] == list(ARMS)
    for r in drawn:
        assert r["ood.digits-test.label_free"] == r["ood.digits-test.probe"] == pytest.approx(0.5)  # the same images
    objectives.draw(rows, lab.name)
    monkeypatch.setattr(objectives, "detection_measures", lambda: None)  # a call with arguments fails
    assert objectives.results(lab) == rows  # from the cache
    monkeypatch.setattr("byov.studies.beyond.objectives.DEFAULT", "spread")
    with pytest.raises(TypeError):  # it would be measured again
        objectives.results(lab)
