"""SNR pruning taken apart: rows, signs and the picture; and all of it on tiny runs."""

from __future__ import annotations

from typing import Any

import pytest

from byov.studies.beyond import pruning_ablation
from byov.studies.beyond.pruning_ablation import CLAIMS, chosen
from byov.studies.framework.checklist import sections
from byov.studies.framework.lab import Lab
from byov.studies.measurements.snr_components import PARTS, SCOPES, SPARSITIES

SOME = (0.5, 0.9)


def row(by: str | None, top1: float, kind: str = "weights", scope: str = "layer", asked: float = 0.5) -> dict[str, Any]:
    found = {"method": "byov", "seed": 0, "kind": kind, "by": by, "scope": scope, "asked": asked, "sparsity": asked}
    found |= {"top1": top1, "top1.error": 0.03 if by == "snr" else 0.04, "refitted.top1": top1, "ece": 0.1}
    return found | {"compressed_bytes": 1024.0 * (100 - asked), "speed": 1.0}


def test_claims_of_readers_are_not_counted_as_the_papers() -> None:
    assert [sections(claim.where) for claim in CLAIMS] == [[]] * len(CLAIMS)


def test_claims_are_positive_where_sigma_helps() -> None:
    rows = [row("snr", 0.8), row("snr_shuffled", 0.7), row("magnitude", 0.75), row("variance", 0.6)]
    rows += [row("snr", 0.1, asked=0.9), row("snr", 0.2, scope="global")]  # not what is judged
    (shuffled,), (variance,) = (claim.effects(rows) for claim in CLAIMS)
    assert shuffled.value == pytest.approx(10.0) and shuffled.error == pytest.approx(5.0)  # 3 and 4 in squares
    assert variance.value == pytest.approx(-15.0)


def test_the_picture_has_a_line_a_part() -> None:
    rows = [row(by, 0.9 - asked / 2, "weights", s, asked) for by in PARTS for s in SCOPES for asked in SPARSITIES]
    rows += [row(None, 0.95, "none", asked=0.0), row("snr", 0.9, "units"), row("snr", 0.92, "retrained", asked=0.9)]
    figure = pruning_ablation.draw(rows, "test")
    layer = figure.axes[0]
    assert len(layer.get_lines()) == len(PARTS)
    assert list(layer.get_lines()[0].get_xdata()) == list(SPARSITIES)
    assert list(layer.get_lines()[0].get_ydata()) == pytest.approx([100 * (0.9 - s / 2) for s in SPARSITIES])


def test_all_of_it(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("byov.studies.measurements.snr_components.SPARSITIES", SOME)
    monkeypatch.setattr("byov.studies.measurements.snr_components.UNITS", (0.5,))
    monkeypatch.setattr("byov.studies.measurements.snr_components.IMAGES", 50)
    lab.seeds = 1
    lab.train(pruning_ablation.runs(lab))
    rows = pruning_ablation.results(lab)
    weights = chosen(rows, kind="weights", method="byov")
    assert len(weights) == len(PARTS) * len(SCOPES) * len(SOME)
    assert all(r["sparsity"] == pytest.approx(r["asked"], abs=0.01) for r in weights)
    for sparsity in SOME:  # a layer's factor changes no order within it
        same = [chosen(weights, by=by, scope="layer", asked=sparsity)[0] for by in ("magnitude", "magnitude_by_layer")]
        assert same[0]["top1"] == same[1]["top1"] and same[1]["top1.difference"] == 0
    assert [r["sparsity"] for r in chosen(rows, kind="retrained")] == pytest.approx([0.536, 0.785, 0.9], abs=0.02)
    unpruned = chosen(rows, kind="none", method="byov")[0]
    assert all(r["compressed_bytes"] < unpruned["compressed_bytes"] for r in chosen(rows, kind="units"))
    assert {r["by"] for r in chosen(rows, kind="weights", method="byol")} == {"magnitude"}
    assert all(len(claim.effects(rows)) == 1 for claim in CLAIMS)
    for r in rows:  # all of the same 50 images
        assert 50 * r["top1"] == pytest.approx(round(50 * r["top1"]))
    pruning_ablation.draw(rows, lab.name)
    monkeypatch.setattr(pruning_ablation, "apart_rows", None)
    assert pruning_ablation.results(lab) == rows  # from what is kept
    monkeypatch.setattr("byov.studies.measurements.snr_components.IMAGES", 60)
    with pytest.raises(TypeError):  # it would be measured anew
        pruning_ablation.results(lab)
