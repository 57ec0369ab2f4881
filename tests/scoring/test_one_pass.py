"""Both scores from one forward pass: exact oddness, and an uncertainty that is learned from the reference images."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

import handmade
from byov._core.errors import BadInput
from byov.inference.run import ReferenceSet, Run
from byov.metrics.correlation import spearman
from byov.scoring import one_pass
from byov.scoring.one_pass import FastScorer, OnePass, fit, percentiles
from byov.scoring.scores import ODD_SHARE, Scorer, neighbour_count, reference_scores
from byov.scoring.table import identity
from byov.studies.beyond.score import candidate_scores

IMAGES = handmade.images(30, seed=1)
DRAWS = 4


def close(found: Tensor | None, expected: Tensor | None) -> None:
    """But for the rounding of float32."""
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=2e-6)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """With a bank of 380 images."""
    torch.manual_seed(0)
    return handmade.run(tmp_path / "run", handmade.Affine(6), sigma=0.1, source=handmade.images(400))


def test_the_head_learns_a_known_function_and_says_how_well() -> None:
    g = torch.Generator().manual_seed(0)
    inputs = torch.randn(300, 4, generator=g).double() * torch.tensor([1, 10, 0.1, 0])  # the last is constant
    targets = inputs @ torch.tensor([1, 0.1, -5, 3]).double() + 7
    head = fit(inputs, targets, penalty=1e-9)
    torch.testing.assert_close((inputs - head.centre) / head.scale @ head.weights + head.level, targets)
    noisy = targets + torch.randn(300, generator=g).double()
    found = fit(inputs, noisy)
    for i in (0, 17, 299):  # as if fitted without it
        others = torch.arange(300) != i
        centred = (inputs[others] - found.centre) / found.scale
        level, mean = noisy[others].mean(), centred.mean(0)
        gram = (centred - mean).T @ (centred - mean) + one_pass.PENALTY * 300 * torch.eye(4).double()
        weights = torch.linalg.solve(gram, (centred - mean).T @ (noisy[others] - level))
        without = ((inputs[i] - found.centre) / found.scale - mean) @ weights + level
        torch.testing.assert_close(found.left_out[i], without, rtol=1e-6, atol=1e-6)


def test_oddness_and_embedding_are_the_scorers_also_of_reference_images(run: Run) -> None:
    bank = ReferenceSet(run)
    for images in (IMAGES, IMAGES / 255, bank.images[:20], bank.calibration_images()):
        fast, full = FastScorer(run, draws=DRAWS).scores(images), Scorer(run, draws=DRAWS).scores(images)
        for name in ("oddness", "oddness_percentile", "embedding"):
            close(getattr(fast, name), getattr(full, name))


def test_the_uncertainty_follows_that_over_draws_on_images_never_seen(run: Run) -> None:
    scorer = FastScorer(run, draws=8)
    images = handmade.images(300, seed=2)
    found = scorer.scores(images)
    reached = float(spearman(found.uncertainty, Scorer(run, draws=8).scores(images).uncertainty))
    assert scorer.model.agreement is not None and reached > 0.5
    assert abs(reached - scorer.model.agreement) < 0.1 and f"{scorer.model.agreement:.2f}" in scorer.sentence()
    usual = scorer.scores(scorer.reference.calibration_images())
    assert usual.uncertainty_percentile is not None
    assert sorted(usual.uncertainty_percentile.tolist()) == pytest.approx([5 * i + 2.5 for i in range(20)])


def test_targets_are_the_scores_of_the_reference_images(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    bank = ReferenceSet(run)
    expected = candidate_scores(run, bank.images, DRAWS, ["combined", "knn_cosine"])
    monkeypatch.setattr("byov.scoring.scores.BLOCK", 100)
    for name, values in expected.items():
        torch.testing.assert_close(reference_scores(bank, name, DRAWS), values, rtol=1e-5, atol=1e-5)


def test_the_same_twice_and_kept_with_the_run(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    first = FastScorer(run, draws=DRAWS).scores(IMAGES)
    monkeypatch.setattr(one_pass, "reference_scores", None)  # would fail if called
    again = FastScorer(run, draws=DRAWS)
    monkeypatch.setattr(run.encoder, "sampled", None)
    ours = again.scores(IMAGES)
    for name in set(first._fields) - {"paths"}:
        assert torch.equal(getattr(ours, name), getattr(first, name))
    parts = [again.scores(part) for part in torch.split(IMAGES, 7)]
    close(torch.cat([part.uncertainty for part in parts]), first.uncertainty)


def test_without_places_an_image_is_recognised_by_its_features(run: Run) -> None:
    bank = ReferenceSet(run)
    for most in (None, 100):
        model = OnePass(bank, "combined", DRAWS, most)
        features = torch.cat([bank.means.features, run.features(IMAGES)])
        own = torch.cat([torch.arange(len(bank.images)), torch.full((len(IMAGES),), -1)])
        for found, expected in zip(model(features), model(features, own), strict=True):
            torch.testing.assert_close(found, expected)


def test_some_of_the_reference_images_and_the_same_part_of_them(run: Run) -> None:
    bank, few = ReferenceSet(run), 200
    model = OnePass(bank, "combined", DRAWS, few)
    assert len(model.reference) == few and model.odd == neighbour_count(few, ODD_SHARE) == 12
    cosines = torch.nn.functional.cosine_similarity(run.features(IMAGES)[:, None], bank.means.features[None], dim=2)
    chosen = torch.arange(few) * len(bank.images) // few
    expected = 1 - cosines[:, chosen].sort(dim=1, descending=True).values[:, 11]
    close(FastScorer(run, draws=DRAWS, most=few).scores(IMAGES).oddness, expected.double())


def test_a_run_without_random_weights_needs_no_head(tmp_path: Path) -> None:
    torch.manual_seed(0)
    run = handmade.run(tmp_path / "run", handmade.Affine(6), where="none")
    fast, full = FastScorer(run), Scorer(run)
    ours, theirs = fast.scores(IMAGES), full.scores(IMAGES)
    for name in ("oddness", "oddness_percentile", "uncertainty", "embedding"):
        close(getattr(ours, name), getattr(theirs, name))
    assert not fast.model.predicts and "no weight draws" in fast.sentence()


@pytest.mark.parametrize("count", [2, 5, 14, 40])
def test_few_reference_images_and_none_to_calibrate(tmp_path: Path, count: int) -> None:
    torch.manual_seed(0)
    run = handmade.run(tmp_path / "run", handmade.Affine(6), source=handmade.images(count), calibration=0)
    said: list[str] = []
    scorer = FastScorer(run, draws=2, say=said.append)
    found = scorer.scores(IMAGES)
    assert found.uncertainty.isfinite().all() and found.uncertainty_percentile is None is found.oddness_percentile
    assert len(said) == 1 and scorer.calibration == {}


def test_percentiles_are_the_scorers() -> None:
    usual, values = torch.tensor([1.0, 2, 2, 3]), torch.tensor([0.0, 1, 2, 2.5, 3, 4])
    expected = Scorer._percentiles(values, usual)
    assert expected is not None and torch.equal(percentiles(values, usual), expected)


def test_tables_tell_which_it_was(run: Run) -> None:
    from byov.data.sources import open_stream

    stream = open_stream(run.config.data, 4)
    assert identity(FastScorer(run), stream) == identity(Scorer(run), stream) | {"fast": True}
    with pytest.raises(BadInput, match="no score"):
        FastScorer(run, "nearness")
