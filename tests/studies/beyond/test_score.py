"""The rule that chooses a score, on numbers made by hand."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.metrics import roc_auc_score

import handmade
from byov.data.shifts import shifted
from byov.data.sources import open_source
from byov.studies.beyond import score as score_study
from byov.studies.beyond.score import _task, candidate_scores, draw, ranking


def rows() -> list[dict]:
    table = {"errors": (0.6, 0.7, 0.9), "mnist": (0.9, 0.8, 0.99), "noise 3": (0.5, 0.6, 0.99)}
    names = ("label_free_a", "label_free_b", "max_softmax")
    return [
        {"method": "byov", "seed": seed, "task": task, "score": name, "auroc": value}
        for seed in (0, 1)
        for task, values in table.items()
        for name, value in zip(names, values, strict=True)
    ]


def test_the_best_average_rank_wins_and_baselines_with_labels_cannot() -> None:
    assert ranking(rows()) == {"label_free_b": 4 / 3, "label_free_a": 5 / 3}
    assert next(iter(ranking(rows()))) == "label_free_b"


def test_keys_of_the_evaluation_name_task_and_score() -> None:
    assert _task("selective.energy.error_auroc") == ("errors", "energy")
    assert _task("ood.mnist.label_free_knn.auroc") == ("mnist", "label_free_knn")
    assert _task("noise.knn.auroc.3") == ("noise 3", "label_free_knn")
    assert _task("noise.knn.auroc.1")[0] is None
    assert _task("noise.knn.mean.3")[0] is None
    assert _task("draws.top1")[0] is None


def test_the_figure_has_a_line_for_each_score() -> None:
    figure = draw(rows(), "micro")
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == [
        "BYOV, label-free: a",
        "BYOV, label-free: b",
        "BYOV, probe: max_softmax",
    ]


DRAWS = 3


def test_auroc_and_growth_are_those_of_the_candidates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    run = handmade.run(tmp_path / "run", handmade.Affine(6), sigma=0.3)
    monkeypatch.setattr(score_study, "IMAGES", 40)
    found = score_study.noise_measures(run, DRAWS)
    images = open_source(run.config.data).load("train").images  # the source has no test images
    ids = torch.arange(40) * 3
    clean = candidate_scores(run, images[ids], DRAWS)
    assert set(found) == set(clean)
    noisy = candidate_scores(run, shifted(images[ids], ids, "gaussian_noise", 5, seed=0), DRAWS)
    truth = np.repeat([0, 1], 40)
    for name in clean:
        want = roc_auc_score(truth, np.concatenate([clean[name], noisy[name]]))
        assert found[name]["auroc.5"] == pytest.approx(want, abs=1e-9)
        assert found[name]["mean.5"] == pytest.approx(float(noisy[name].mean() / clean[name].mean()), rel=1e-9)
