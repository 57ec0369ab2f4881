"""One pass over the draws gives what the passes for probabilities and for label-free scores give."""

from pathlib import Path

import pytest
import torch

import handmade
from byov.data.images import ImageSet
from byov.evaluation import predictive
from byov.evaluation.predictive import LABEL_FREE, Drawn, pass_draws, predict_classes, scores_at_means
from byov.evaluation.probe import Labelled, Subject
from byov.inference.run import ReferenceSet, features_of
from byov.metrics import entropy, knn_distance, mahalanobis
from byov.scoring.scores import CANDIDATES
from byov.studies.beyond.score import candidate_scores

IMAGES = handmade.images(30, seed=1)


@pytest.fixture
def subject(tmp_path: Path) -> Subject:
    torch.manual_seed(0)
    run = handmade.run(tmp_path / "run", handmade.Affine(6))
    labels = torch.arange(80) % 3
    train = ImageSet(handmade.images(80, seed=2), labels)
    data = Labelled("made", train, ImageSet(IMAGES, labels[:30]), torch.arange(80), True, None)
    return Subject(run, run.encoder, data, handmade.SIDE, lambda *what: None, ReferenceSet(run))


def test_one_pass_equals_two(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("byov.scoring.scores.BLOCK", 7)
    drawn = pass_draws(subject, IMAGES, 4, "test")
    assert subject.reference is not None
    classes = predict_classes(subject.reference, subject.probe, IMAGES, 4)
    for ours, theirs in ((drawn.aligned, classes.aligned), (drawn.unaligned, classes.unaligned)):
        for name, value in theirs.state().items():
            torch.testing.assert_close(ours.state()[name], value, rtol=1e-5, atol=1e-7)
    expected = candidate_scores(subject.run, IMAGES, 4)
    found = drawn.label_free_scores() | scores_at_means(subject, IMAGES, subject.test_features)
    for name in CANDIDATES:
        torch.testing.assert_close(found[LABEL_FREE + name], expected[name], rtol=1e-4, atol=1e-5)
    assert {"draws_mutual_information", "draws_predictive_std"} < set(drawn.scores())
    assert not (subject.run.folder / "results").exists()  # what was for going on is gone


def test_one_draw_has_no_spread_to_score(subject: Subject) -> None:
    found = pass_draws(subject, IMAGES, 1, "test").label_free_scores()
    assert set(found) == {LABEL_FREE + name for name, c in CANDIDATES.items() if c.least_draws == 1}


def test_baselines_know_all_training_images_and_their_labels(subject: Subject) -> None:
    features = features_of(subject.run.encoder, IMAGES)
    known = features_of(subject.run.encoder, subject.data.train.images)
    found = scores_at_means(subject, IMAGES, features)
    assert torch.equal(found["knn_distance"], knn_distance(features, known))
    assert torch.equal(found["mahalanobis"], mahalanobis(features, known, subject.data.train_labels))
    probabilities = subject.probe.probabilities(features)
    torch.testing.assert_close(found["entropy"], entropy(probabilities), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found["energy"], -subject.probe.logits(features).exp().sum(1).log())


def test_halves_of_the_draws_make_the_whole(subject: Subject) -> None:
    bank, probe = subject.reference, subject.probe
    assert bank is not None
    whole, first, second = (Drawn.nothing(30, 3) for _ in range(3))
    for k in range(4):
        features = torch.randn(30, 6, generator=torch.Generator().manual_seed(k))
        for part in (whole, first if k < 2 else second):
            part.update(bank, probe, features, k)
    merged = Drawn.from_state(first.state()).merge(second)
    for name, value in whole.state().items():
        torch.testing.assert_close(merged.state()[name], value, rtol=1e-5, atol=1e-5)


def test_what_was_stopped_goes_on(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = pass_draws(subject, IMAGES, 5, "test").state()
    monkeypatch.setattr(predictive, "SAVE_SECONDS", 0.0)
    update, seen = Drawn.update, []

    def stop(self: Drawn, bank: ReferenceSet, probe: object, features: torch.Tensor, k: int, own: torch.Tensor) -> None:
        seen.append(k)
        if seen == [0, 1, 2, 3]:
            raise KeyboardInterrupt
        update(self, bank, probe, features, k, own)

    monkeypatch.setattr(Drawn, "update", stop)
    with pytest.raises(KeyboardInterrupt):
        pass_draws(subject, IMAGES, 5, "test")
    found = pass_draws(subject, IMAGES, 5, "test").state()
    assert seen == [0, 1, 2, 3, 3, 4]
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_sums_over_many_draws_lose_no_digits(subject: Subject) -> None:
    assert subject.reference is not None
    drawn, features, draws = Drawn.nothing(30, 3), torch.randn(30, 6, generator=torch.Generator().manual_seed(0)), 300
    for _ in range(draws):  # the same draw again and again: there is nothing that draws disagree about
        drawn.update(subject.reference, subject.probe, features, 0)
    assert all(total.dtype == torch.float64 for total in drawn.sums.totals.values())
    assert float(drawn.label_free_scores()[LABEL_FREE + "assignment"].max()) < 1e-6


def test_an_image_of_the_reference_set_is_compared_with_the_others(subject: Subject) -> None:
    """As by `byov score`: it would otherwise be its own nearest neighbour."""
    bank = subject.reference
    assert bank is not None
    images = torch.cat([bank.images[:5], IMAGES])
    expected = candidate_scores(subject.run, images, 3)
    found = pass_draws(subject, images, 3, "test").label_free_scores()
    found |= scores_at_means(subject, images, features_of(subject.run.encoder, images))
    for name in CANDIDATES:
        torch.testing.assert_close(found[LABEL_FREE + name], expected[name], rtol=1e-4, atol=1e-5)
    assert float(found[LABEL_FREE + "knn"].min()) > 0
