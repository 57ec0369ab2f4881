"""Figure 4, left: what the claims read, and one whole study."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import handmade
from byov.data.images import ImageSet
from byov.evaluation.probe import Labelled, Subject
from byov.inference.run import Run
from byov.studies.framework.lab import Lab
from byov.studies.paper import fig4_pruning
from byov.studies.paper.fig4_pruning import (
    ARMS,
    CLAIMS,
    SPARSER,
    SPARSITIES,
    compare_pruning,
    draw,
    largest,
    pruning_curve,
)


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


def test_pruning_has_as_much_room_as_the_other_score_has_lost() -> None:
    tops = {0.0: 0.9, 0.25: 0.88, 0.5: 0.8, 0.75: 0.4, 0.95: 0.1}
    rows = [
        row(0, s, 0.0, arm) | {"top1": top}
        for arm in ("snr", "magnitude", "byol", "variance")
        for s, top in tops.items()
    ]
    rooms = [claim.room(rows)[0].value for claim in CLAIMS if claim.room is not None]
    assert rooms == pytest.approx([80, 10, 10, 10, 10])  # the sparser model is compared up to .5 only


def test_the_figure_has_a_line_for_each_arm() -> None:
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
    assert all(r["random_start"] and 0.5 < r["start_correlation"] < 1 for r in rows)  # one epoch
    assert len({r["start_correlation"] for r in rows}) == 2  # of two runs
    assert fig4_pruning.results(lab) == rows
    assert draw(rows, "micro").axes


FEW = (0.0, 0.25, 0.5)


def subject(run: Run) -> Subject:
    images, labels = handmade.images(60, seed=5), torch.arange(60) % 3
    train, test = ImageSet(images[:30], labels[:30]), ImageSet(images[30:], labels[30:])
    labelled = Labelled("made", train, test, torch.arange(30), True, None)
    return Subject(run, run.encoder, labelled, handmade.SIDE, lambda *what: None)


def test_a_point_is_the_encoder_without_its_lowest_weights(tmp_path: Path) -> None:
    whom = subject(handmade.student_run(tmp_path))
    curve = pruning_curve(whom, "magnitude", FEW)
    assert list(curve) == list(FEW) and curve[0.5].refitted is None
    assert torch.equal(curve[0.0].kept, whom.probe.probabilities(whom.test_features))
    linear = whom.run.encoder.unwrapped().linear
    weight = linear.weight.detach().clone()
    weight[weight.abs() <= weight.abs().flatten().sort().values[weight.numel() // 2 - 1]] = 0
    features = handmade.pixels(whom.test_images) @ weight.T + linear.bias.detach()
    assert torch.allclose(curve[0.5].kept, whom.probe.probabilities(features), atol=1e-6)


def test_equal_sigmas_make_snr_magnitude_and_a_refitted_probe_differs(tmp_path: Path) -> None:
    whom = subject(handmade.student_run(tmp_path))  # one sigma for all weights
    snr, magnitude = (pruning_curve(whom, by, FEW, refit=True) for by in ("snr", "magnitude"))
    assert torch.equal(snr[0.5].kept, magnitude[0.5].kept)
    assert snr[0.0].refitted is not None and torch.equal(snr[0.0].refitted, snr[0.0].kept)
    assert snr[0.5].refitted is not None and not torch.allclose(snr[0.5].refitted, snr[0.5].kept)


def test_differences_are_of_the_same_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fig4_pruning, "subject_of", subject)
    monkeypatch.setattr(fig4_pruning, "start_of", lambda run: {})  # it has no resolved config
    run, baseline = handmade.student_run(tmp_path / "a"), handmade.student_run(tmp_path / "b", sigma=0.2)
    rows = {(row["arm"], row["sparsity"]): row for row in compare_pruning(run, baseline, FEW)}
    assert {arm for arm, _ in rows} == {"snr", "magnitude", "variance", "random", "byol"}
    for (_, sparsity), row in rows.items():
        assert row["top1.difference"] == pytest.approx(rows["snr", sparsity]["top1"] - row["top1"])
    apart = rows["snr", 0.25]["top1"] - rows["random", 0.0]["top1"]
    assert rows["random", 0.0]["sparser.difference"] == pytest.approx(apart)
    assert rows["random", 0.5]["sparser.difference"] is None  # there is no .75
    assert rows["magnitude", 0.5]["top1.error"] == 0  # the same as SNR, with one sigma for all
    found = rows["random", 0.5]
    apart = abs(found["top1.difference"])  # the mean d of +-1 and 0: their variance is between |d| - d^2 and 1 - d^2
    assert (apart - apart**2) / 29 <= found["top1.error"] ** 2 * (1 + 1e-9) and found["top1.error"] > 0
    assert found["top1.error"] ** 2 <= (1 - apart**2) / 29 and found["refitted.top1"] is None
