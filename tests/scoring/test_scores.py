"""The scorer: scores as the candidates define them, percentiles, chunks, and what it refuses."""

from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.stats import percentileofscore

import handmade
from byov._core.errors import BadInput
from byov.inference.run import ReferenceSet, Run
from byov.scoring.scores import AT_MEANS, CANDIDATES, Scorer
from byov.studies.beyond.score import candidate_scores

IMAGES = handmade.images(7, seed=1)
DRAWS = 4


@pytest.fixture
def run(tmp_path: Path) -> Run:
    torch.manual_seed(0)
    return handmade.run(tmp_path / "run", handmade.Affine(6), sigma=0.3)


@pytest.fixture
def deterministic(tmp_path: Path) -> Run:
    torch.manual_seed(0)
    return handmade.run(tmp_path / "run", handmade.Affine(6), where="none")


def test_far_images_are_less_certain(run: Run) -> None:
    """Bright where the source's images are dark and the reverse, in blocks: unlike uniform noise."""
    odd = torch.zeros(4, 1, 4, 4)
    odd[:2, :, :2], odd[2:, :, 2:] = 1, 1
    usual = ReferenceSet(run).calibration_images()
    for name in ("neighbours", "knn", "mahalanobis"):
        scorer = Scorer(run, name, DRAWS)
        assert scorer.scores(odd).uncertainty.min() > scorer.scores(usual).uncertainty.median(), name


def test_a_scorer_gives_one_of_the_candidates_and_the_embedding(run: Run) -> None:
    everything = candidate_scores(run, IMAGES, DRAWS)
    for name in CANDIDATES:
        found = Scorer(run, name, DRAWS).scores(IMAGES)
        torch.testing.assert_close(found.uncertainty, everything[name], msg=name)
        assert torch.equal(found.embedding, run.features(IMAGES))
    torch.testing.assert_close(Scorer(run, draws=DRAWS).scores(IMAGES).uncertainty, everything["combined"])
    assert torch.equal(Scorer(run, draws=DRAWS).scores(IMAGES).oddness, everything["kth_cosine"])


def test_percentiles_are_those_among_the_calibration_images(run: Run) -> None:
    scorer = Scorer(run, draws=DRAWS)
    usual = ReferenceSet(run).calibration_images()
    among, found = scorer.scores(usual), scorer.scores(IMAGES)
    for scores in (found, among):
        for name in ("oddness", "uncertainty"):
            expected = [percentileofscore(getattr(among, name), u, "mean") for u in getattr(scores, name)]
            np.testing.assert_allclose(getattr(scores, f"{name}_percentile"), expected)
    assert sorted(among.oddness_percentile.tolist()) == [5 * i + 2.5 for i in range(20)]


def test_chunks_and_batches_change_nothing_and_calibration_is_cached(run: Run) -> None:
    whole = Scorer(run, draws=DRAWS).scores(IMAGES)
    (run.folder / "images.npz").unlink()  # features and calibration scores are cached: the source is not needed
    scorer = Scorer(run, draws=DRAWS, batch_size=2)
    chunks = [scorer.scores(chunk) for chunk in torch.split(IMAGES, 3)]
    for name in set(whole._fields) - {"paths"}:
        parts = torch.cat([getattr(chunk, name) for chunk in chunks])
        torch.testing.assert_close(parts, getattr(whole, name), rtol=1e-5, atol=1e-5)


def test_a_block_after_another(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, everything = Scorer(run, draws=DRAWS).scores(IMAGES), candidate_scores(run, IMAGES, DRAWS)
    monkeypatch.setattr("byov.scoring.scores.BLOCK", 3)
    monkeypatch.setattr("byov.studies.beyond.score.BLOCK", 3)
    reported: list[tuple[int, int]] = []
    again = candidate_scores(run, IMAGES, DRAWS, progress=lambda what, done, total: reported.append((done, total)))
    assert reported == [(3, 7), (6, 7), (7, 7)]
    torch.testing.assert_close(Scorer(run, draws=DRAWS).scores(IMAGES), whole, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(again, everything, rtol=1e-4, atol=1e-5)


def test_a_deterministic_run_has_its_distance_at_the_means(deterministic: Run) -> None:
    found = Scorer(deterministic).scores(IMAGES)
    assert torch.equal(found.uncertainty, Scorer(deterministic, "knn_cosine").scores(IMAGES).uncertainty)
    assert found.oddness_percentile is not None and found.uncertainty_percentile is not None
    assert tuple(candidate_scores(deterministic, IMAGES)) == AT_MEANS
    with pytest.raises(BadInput, match="no random weights: use knn"):
        Scorer(deterministic, "neighbours")


def test_no_images_have_no_scores(run: Run) -> None:
    none = Scorer(run, draws=2).scores(IMAGES[:0])
    assert none.uncertainty.shape == (0,) and none.embedding.shape == (0, 6) and none.oddness_percentile.shape == (0,)


def test_without_calibration_images_there_are_no_percentiles_and_it_is_reported_once(tmp_path: Path) -> None:
    torch.manual_seed(0)
    run = handmade.run(tmp_path / "run", handmade.Affine(6), calibration=0)
    said: list[str] = []
    scorer = Scorer(run, draws=2, say=said.append)
    for _ in range(2):
        found = scorer.scores(IMAGES)
        assert found.oddness_percentile is None and found.uncertainty_percentile is None
    assert len(said) == 1 and "--calibration" in said[0]


@pytest.mark.parametrize(
    ("score", "draws", "word"),
    [("nearness", 5, "no score"), ("variance", 1, "at least 2 draws"), ("neighbours", 0, "at least 1 draw,")],
)
def test_what_cannot_be_scored_is_one_sentence(run: Run, score: str, draws: int, word: str) -> None:
    with pytest.raises(BadInput, match=word):
        Scorer(run, score, draws)
    with pytest.raises(BadInput, match=word):
        candidate_scores(run, IMAGES, draws, [score])
    with pytest.raises(BadInput, match="shape"):
        Scorer(run).scores(torch.zeros(2, 1, 4, 5))
