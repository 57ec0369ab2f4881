"""Pruned encoders off the training distribution."""

from __future__ import annotations

from typing import Any

import pytest

from byov.studies.beyond import off_distribution
from byov.studies.beyond.off_distribution import CLAIMS
from byov.studies.framework.checklist import sections
from byov.studies.framework.lab import OOD_SOURCES, Lab


def row(method: str, pruned: str, probe: str, difference: float = 0.0) -> dict[str, Any]:
    found = {"method": method, "seed": 0, "pruned": pruned, "probe": probe, "top1": 0.9, "ece": 0.05}
    found |= {"shifted.top1": 0.6, "shifted.ece": 0.2, "shifted.top1.difference": difference}
    return found | {"shifted.top1.error": 0.01, "ood.cifar10.softmax": 0.8, "ood.cifar10.knn": 0.9}


ROWS = [
    row("byov", "unpruned", "kept", 0.3),
    row("byov", "snr", "kept", 0.05),
    row("byov", "snr", "refitted", 0.02),
    row("byov", "magnitude", "kept"),
    row("byol", "unpruned", "kept"),
]


def test_claims_of_readers_are_not_counted_as_the_papers() -> None:
    assert [sections(claim.where) for claim in CLAIMS] == [[]] * len(CLAIMS)


def test_the_claim_is_of_snr_against_magnitude_through_the_old_probe() -> None:
    (effect,) = CLAIMS[0].effects(ROWS)
    assert effect.value == pytest.approx(5.0) and effect.error == pytest.approx(1.0)


def test_the_figure_has_only_what_was_measured() -> None:
    figure = off_distribution.draw(ROWS, "test")
    labels = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert labels == ["BYOV, unpruned", "BYOV, by snr", "BYOV, by magnitude", "BYOL, unpruned"]
    assert figure.axes[-1].get_xlabel() == "AUROC, cifar10"


def test_the_study_from_runs_to_figure(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(OOD_SOURCES, "digits", ("digits@test",))
    monkeypatch.setattr("byov.studies.beyond.off_distribution.SEVERITIES", (5,))
    lab.seeds = 1
    lab.train(off_distribution.runs(lab))
    rows = {(r["method"], r["pruned"], r["probe"]): r for r in off_distribution.results(lab)}
    assert len(rows) == 2 * (3 + 2)
    unpruned = [rows["byov", "unpruned", probe] for probe in ("kept", "refitted")]
    assert unpruned[0]["shifted.ece"] == unpruned[1]["shifted.ece"]  # one and the same probe
    for (_, pruned, _), r in rows.items():
        assert r["ood.digits-test.knn"] == r["ood.digits-test.softmax"] == pytest.approx(0.5)  # the same images
        assert pruned != "magnitude" or r["shifted.top1.difference"] == r["shifted.top1.error"] == 0
    snr, magnitude = (rows["byov", by, "kept"] for by in ("snr", "magnitude"))
    difference = snr["shifted.top1"] - magnitude["shifted.top1"]
    assert snr["shifted.top1.difference"] == pytest.approx(difference)
    off_distribution.draw(list(rows.values()), lab.name)
    monkeypatch.setattr(off_distribution, "robustness_rows", lambda: None)  # a call with arguments fails
    assert off_distribution.results(lab) == list(rows.values())  # from the cache
    monkeypatch.setattr("byov.studies.beyond.off_distribution.SEVERITIES", (4,))
    with pytest.raises(TypeError):  # it would be measured again
        off_distribution.results(lab)
