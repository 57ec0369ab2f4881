"""Curves of pruned encoders: the weights by hand, and differences on the same images."""

from pathlib import Path

import pytest
import torch

import handmade
from byov.data.images import ImageSet
from byov.evaluation.labelled import Labelled, Subject
from byov.inference.load import Run
from byov.studies.measurements import pruning_curves
from byov.studies.measurements.pruning_curves import compare_pruning, pruning_curve

SPARSITIES = (0.0, 0.25, 0.5)


def subject(run: Run) -> Subject:
    images, labels = handmade.images(60, seed=5), torch.arange(60) % 3
    train, test = ImageSet(images[:30], labels[:30]), ImageSet(images[30:], labels[30:])
    labelled = Labelled("made", train, test, torch.arange(30), True, None)
    return Subject(run, run.encoder, labelled, handmade.SIDE, lambda *what: None)


def test_a_point_is_the_encoder_without_its_lowest_weights(tmp_path: Path) -> None:
    whom = subject(handmade.student_run(tmp_path))
    curve = pruning_curve(whom, "magnitude", SPARSITIES)
    assert list(curve) == list(SPARSITIES) and curve[0.5].refitted is None
    assert torch.equal(curve[0.0].kept, whom.probe.probabilities(whom.test_features))
    linear = whom.run.encoder.unwrapped().linear
    weight = linear.weight.detach().clone()
    weight[weight.abs() <= weight.abs().flatten().sort().values[weight.numel() // 2 - 1]] = 0
    features = handmade.pixels(whom.test_images) @ weight.T + linear.bias.detach()
    assert torch.allclose(curve[0.5].kept, whom.probe.probabilities(features), atol=1e-6)


def test_equal_sigmas_make_snr_magnitude_and_a_probe_fitted_anew_is_another(tmp_path: Path) -> None:
    whom = subject(handmade.student_run(tmp_path))  # one sigma for all weights
    snr, magnitude = (pruning_curve(whom, by, SPARSITIES, refit=True) for by in ("snr", "magnitude"))
    assert torch.equal(snr[0.5].kept, magnitude[0.5].kept)
    assert snr[0.0].refitted is not None and torch.equal(snr[0.0].refitted, snr[0.0].kept)
    assert snr[0.5].refitted is not None and not torch.allclose(snr[0.5].refitted, snr[0.5].kept)


def test_differences_are_of_the_same_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pruning_curves, "subject_of", subject)
    run, baseline = handmade.student_run(tmp_path / "a"), handmade.student_run(tmp_path / "b", sigma=0.2)
    rows = {(row["arm"], row["sparsity"]): row for row in compare_pruning(run, baseline, SPARSITIES)}
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
