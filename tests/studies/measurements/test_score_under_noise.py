"""Growing noise, on an encoder made by hand: against scikit-learn's AUROC of the same scores."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.metrics import roc_auc_score

import handmade
from byov.data.shifts import shifted
from byov.data.sources import open_source
from byov.scoring.scorer import candidate_scores
from byov.studies.measurements import score_under_noise

DRAWS = 3


def test_auroc_and_growth_are_those_of_the_candidates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    run = handmade.run(tmp_path / "run", handmade.Affine(6), sigma=0.3)
    monkeypatch.setattr(score_under_noise, "IMAGES", 40)
    found = score_under_noise.noise_measures(run, DRAWS)
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
