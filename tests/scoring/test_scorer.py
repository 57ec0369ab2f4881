"""The label-free scores: each candidate by hand, percentiles, and that all come from one pass over the same draws."""

from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.stats import entropy, percentileofscore
from sklearn.covariance import shrunk_covariance
from sklearn.neighbors import NearestNeighbors

import handmade
from byov._core.errors import BadInput
from byov.inference.load import Run
from byov.inference.reference import ReferenceSet, at_draw
from byov.scoring.scorer import (
    CANDIDATES,
    NEIGHBOURS,
    TERMS,
    Candidate,
    OneDraw,
    Scorer,
    candidate_scores,
    part_of,
    reference_scores,
    usual_images,
)

IMAGES = handmade.images(7, seed=1)
DRAWS = 4
AT_MEANS = {name for name, candidate in CANDIDATES.items() if not candidate.least_draws}


@pytest.fixture
def run(tmp_path: Path) -> Run:
    torch.manual_seed(0)
    return handmade.run(tmp_path / "run", handmade.Affine(6), sigma=0.3)


@pytest.fixture
def deterministic(tmp_path: Path) -> Run:
    torch.manual_seed(0)
    return handmade.run(tmp_path / "run", handmade.Affine(6), where="none")


def of_draw(run: Run, k: int | None) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Raw features of the images, aligned and centred features of images and bank; by the formula."""
    bank = ReferenceSet(run)
    with at_draw(run.encoder, run.config.seed, k):
        raw, reference = (run.encoder(images).double().numpy() for images in (IMAGES, bank.images))
    with torch.no_grad():
        spread = run.encoder(bank.images).double().numpy().std(0)
    mean, std = reference.mean(0), reference.std(0)
    return raw, (raw - mean) / std * spread, (reference - mean) / std * spread


def still_centre(run: Run) -> np.ndarray:
    """Where the bank is at the means."""
    with torch.no_grad():
        centre: np.ndarray = run.encoder(ReferenceSet(run).images).double().numpy().mean(0)
    return centre


def expected_scores(run: Run) -> dict[str, np.ndarray]:
    """Every candidate written out plainly, draws all in memory, by other libraries where they have it."""
    draws = [of_draw(run, k) for k in range(DRAWS)]
    spread = of_draw(run, None)[2].std(0)
    raw, images = np.stack([d[0] for d in draws]), np.stack([d[1] for d in draws])

    def distances(images: np.ndarray, bank: np.ndarray) -> np.ndarray:
        return NearestNeighbors(n_neighbors=10).fit(bank).kneighbors(images)[0].mean(1)

    def whitened(images: np.ndarray, bank: np.ndarray) -> np.ndarray:
        scaled = bank / spread
        inverse = np.linalg.inv(shrunk_covariance(scaled.T @ scaled / len(scaled), 0.1))
        return np.sqrt(np.einsum("ni,ij,nj->n", images / spread, inverse, images / spread))

    unit = lambda x: x / np.linalg.norm(x, axis=-1, keepdims=True)  # noqa: E731
    p = np.stack([np.exp(unit(d[1]) @ unit(d[2]).T / 0.1) for d in draws])
    p /= p.sum(2, keepdims=True)
    information = entropy(p, p.mean(0, keepdims=True), axis=2).mean(0)  # mean KL of a draw to all draws together
    near = [NearestNeighbors(n_neighbors=10).fit(d[2]).kneighbors(d[1])[1] for d in draws]
    pairs = [(a, b) for a in range(DRAWS) for b in range(a)]
    common = [np.mean([len(set(near[a][i]) & set(near[b][i])) / 10 for a, b in pairs]) for i in range(len(IMAGES))]
    neighbours = np.mean([distances(d[1], d[2]) for d in draws], axis=0)
    still = of_draw(run, None)
    centre = still_centre(run)

    def cosines(k: int | None) -> np.ndarray:
        """Sorted, most alike first: features as they are at the means, or brought there; not centred."""
        _, images, bank = of_draw(run, k)
        return 1 - np.sort(unit(images + centre) @ unit(bank + centre).T, axis=1)[:, ::-1]

    own = unit(still[2] + centre) @ unit(still[2] + centre).T - 2 * np.eye(len(still[2]))
    oddness = 1 - np.sort(own, axis=1)[:, -10]
    lower, upper = np.quantile(oddness, [0.25, 0.75])
    usual = np.flatnonzero(oddness <= 1.5 * upper - 0.5 * lower)

    def near(k: int | None) -> np.ndarray:
        """Mean cosine distance to the 10 nearest usual images, centred."""
        _, images, bank = of_draw(run, k)
        return 1 - np.sort(unit(images) @ unit(bank[usual]).T, axis=1)[:, ::-1][:, :10].mean(1)

    def consistent(bank_images: np.ndarray) -> np.ndarray:
        """The part of the 10 most alike that two draws have in common."""
        votes = []
        for k in range(DRAWS):
            _, images, bank = of_draw(run, k)
            order = np.argsort(-(unit(images + centre) @ unit(bank[bank_images] + centre).T), axis=1)
            votes.append([set(row[:10].tolist()) for row in order])
        return np.array([np.mean([len(votes[a][i] & votes[b][i]) / 10 for a, b in pairs]) for i in range(len(IMAGES))])

    return {
        "variance": raw.var(0, ddof=1).mean(1),
        "direction": 1 - np.linalg.norm(unit(raw).mean(0), axis=1),
        "aligned_variance": (images / spread).var(0, ddof=1).mean(1),
        "assignment": information,
        "neighbours": neighbours,
        "disagreement": 1 - np.array(common),
        "consistency": 1 - consistent(np.arange(len(oddness))),
        "combined": np.mean([near(k) for k in range(DRAWS)], axis=0) * (1 - consistent(usual)),
        "neighbours_cosine": np.mean([near(k) for k in range(DRAWS)], axis=0),
        "mahalanobis": np.mean([whitened(d[1], d[2]) for d in draws], axis=0),
        "product": neighbours * information,
        "knn": distances(still[1], still[2]),
        "knn_cosine": near(None),
        "kth_cosine": cosines(None)[:, 9],  # 6% of 100 are fewer than 10
        "mahalanobis_at_means": whitened(still[1], still[2]),
    }


def test_every_candidate_against_its_plain_definition(run: Run) -> None:
    found, expected = candidate_scores(run, IMAGES, DRAWS), expected_scores(run)
    assert found.keys() == CANDIDATES.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_allclose(found[name], values, rtol=2e-4, atol=1e-6, err_msg=name)
        assert values.std() > 1e-3 * values.mean(), f"{name} says the same of all images"


def test_draws_that_only_shift_and_stretch_say_nothing(tmp_path: Path) -> None:
    """Once aligned, they all equal the means: no spread, no disagreement, and the distance is that at the means."""
    torch.manual_seed(0)
    run = handmade.run(tmp_path / "run", handmade.ShiftedAndStretched(6), sigma=0.2)
    found = candidate_scores(run, IMAGES, DRAWS)
    for name in ("aligned_variance", "assignment", "disagreement", "product"):
        assert float(found[name].abs().max()) < 1e-5, name
    for drawn, still in (("neighbours", "knn"), ("mahalanobis", "mahalanobis_at_means")):
        torch.testing.assert_close(found[drawn], found[still], rtol=1e-4, atol=1e-4)
    assert float(found["variance"].min()) > 1e-3


def test_bank_images_have_themselves_for_a_neighbour(run: Run) -> None:
    bank = ReferenceSet(run)
    draw = OneDraw(bank, bank.means.features, None)
    distances, which = draw.nearest
    assert torch.equal(which[:, 0], torch.arange(len(bank.images)))
    assert float(distances[:, 0].max()) < 2e-3 * float(distances[:, 1:].mean())  # rounding, under a square root


def test_a_bank_image_is_compared_with_the_others_of_the_bank(run: Run) -> None:
    """Or it would be surer than its like: with itself at distance 0, by a tenth of its distance."""
    bank = ReferenceSet(run)
    places = torch.arange(len(bank.images))
    assert torch.equal(bank.own(bank.images), places) and torch.equal(bank.own(bank.images / 255), places)
    assert (bank.own(bank.calibration_images()) == -1).all()
    draw = OneDraw(bank, bank.means.features, None, places)
    apart = torch.cdist(draw.images.double(), draw.bank.double()).fill_diagonal_(torch.inf)
    expected = apart.topk(NEIGHBOURS, largest=False).values.mean(1)
    found = candidate_scores(run, bank.images, DRAWS, ["knn", "assignment"])
    torch.testing.assert_close(found["knn"], expected, rtol=1e-3, atol=1e-4)
    assert found["assignment"].isfinite().all() and float(draw.assignment.diagonal().max()) == 0
    torch.testing.assert_close(draw.assignment.sum(1), torch.ones(len(places)))


class Directions(torch.nn.Module):
    """Features that are the pixels themselves: the direction of an image is all that counts."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(()))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return handmade.pixels(images) * self.scale


@pytest.mark.parametrize("alike", [1, 6, 12])
def test_a_group_of_alike_images_is_as_odd_as_one_of_them(tmp_path: Path, alike: int) -> None:
    """Up to 3% of 400: with the 10 nearest, a group of 12 would be the least odd of all."""
    usual = handmade.images(400 - alike)
    usual[:, :, 2:] //= 8
    group = torch.zeros(alike, 1, 4, 4, dtype=torch.uint8)
    group[:, :, 2:] = handmade.images(alike, seed=3)[:, :, 2:] // 64 + 180
    run = handmade.run(tmp_path / "run", Directions(), source=torch.cat([usual, group]), calibration=0, where="none")
    scores = run.score(torch.cat([usual, group]))
    for values in (scores.oddness, scores.uncertainty):
        assert float(values[-alike:].min()) > float(values[:-alike].max())


def test_odd_reference_images_are_not_among_the_usual(tmp_path: Path) -> None:
    """Twelve of 400, alike, beside the rest; and where all are alike, all are usual."""
    source = handmade.images(400)
    source[:, :, 2:] //= 8
    source[-12:] = 0
    source[-12:, :, 2:] = handmade.images(12, seed=3)[:, :, 2:] // 64 + 180
    run = handmade.run(tmp_path / "run", Directions(), source=source, calibration=0, where="none")
    bank = ReferenceSet(run)
    oddness = reference_scores(bank, "kth_cosine", 0)
    usual = usual_images(bank)
    odd = torch.ones(len(oddness), dtype=torch.bool)
    odd[usual] = False
    lower, upper = np.quantile(oddness, [0.25, 0.75])
    assert torch.equal(odd, oddness > 1.5 * upper - 0.5 * lower)
    assert int((bank.images[odd][:, :, :2] == 0).all(3).all(2).all(1).sum()) == 12
    same = handmade.run(
        tmp_path / "same", Directions(), source=source[:1].expand(30, -1, -1, -1).clone(), calibration=0
    )
    assert torch.equal(usual_images(ReferenceSet(same)), torch.arange(30))


def test_draws_that_agree_about_a_group_of_odd_images_do_not_make_it_certain(tmp_path: Path) -> None:
    """A group has itself for neighbours at every draw; only usual images tell."""
    torch.manual_seed(0)
    usual = handmade.images(388)
    usual[:, :, 2:] //= 8
    group = torch.zeros(12, 1, 4, 4, dtype=torch.uint8)
    group[:, :, 2:] = 180
    group[:, :, 2:] += handmade.images(12, seed=3)[:, :, 2:] // 64
    run = handmade.run(
        tmp_path / "run", handmade.Affine(6), sigma=0.05, source=torch.cat([usual, group]), calibration=0
    )
    found = candidate_scores(run, torch.cat([usual, group]), 8, ["consistency", "combined"])
    below = {name: float((scores[:-12] < scores[-12:].median()).double().mean()) for name, scores in found.items()}
    assert below["consistency"] < 0.2 and below["combined"] > 0.9


def test_parts_of_the_bank() -> None:
    assert [part_of(bank, 0.06) for bank in (2, 8, 100, 1000, 4000)] == [1, 7, 10, 60, 240]


def test_far_images_are_less_certain(run: Run) -> None:
    """Bright where the source's images are dark and the other way round, in blocks: nothing like uniform noise."""
    odd = torch.zeros(4, 1, 4, 4)
    odd[:2, :, :2], odd[2:, :, 2:] = 1, 1
    usual = ReferenceSet(run).calibration_images()
    for name in ("neighbours", "knn", "mahalanobis"):
        scorer = Scorer(run, name, DRAWS)
        assert scorer.scores(odd).uncertainty.min() > scorer.scores(usual).uncertainty.median(), name


# -------------------------------------------------------------------------------------------------------------- scorer


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


def test_chunks_and_batches_change_nothing_and_calibration_is_kept(run: Run) -> None:
    whole = Scorer(run, draws=DRAWS).scores(IMAGES)
    (run.folder / "images.npz").unlink()  # bank and calibration are kept: the source is no longer needed
    scorer = Scorer(run, draws=DRAWS, batch_size=2)
    chunks = [scorer.scores(chunk) for chunk in torch.split(IMAGES, 3)]
    for i in range(len(whole)):
        torch.testing.assert_close(torch.cat([chunk[i] for chunk in chunks]), whole[i], rtol=1e-5, atol=1e-5)


def test_a_block_after_another(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, everything = Scorer(run, draws=DRAWS).scores(IMAGES), candidate_scores(run, IMAGES, DRAWS)
    monkeypatch.setattr("byov.scoring.scorer.BLOCK", 3)
    told: list[tuple[int, int]] = []
    again = candidate_scores(run, IMAGES, DRAWS, progress=lambda what, done, total: told.append((done, total)))
    assert told == [(3, 7), (6, 7), (7, 7)]
    torch.testing.assert_close(Scorer(run, draws=DRAWS).scores(IMAGES), whole, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(again, everything, rtol=1e-4, atol=1e-5)


def test_a_deterministic_run_has_its_distance_at_the_means(deterministic: Run) -> None:
    found = deterministic.score(IMAGES)
    assert torch.equal(found.uncertainty, Scorer(deterministic, "knn_cosine").scores(IMAGES).uncertainty)
    assert found.oddness_percentile is not None and found.uncertainty_percentile is not None
    assert candidate_scores(deterministic, IMAGES).keys() == AT_MEANS
    with pytest.raises(BadInput, match="nothing random: use knn"):
        Scorer(deterministic, "neighbours")


def test_run_score(run: Run) -> None:
    assert torch.equal(run.score(IMAGES, draws=3).uncertainty, Scorer(run, draws=3).scores(IMAGES).uncertainty)
    none = run.score(IMAGES[:0], draws=2)
    assert none.uncertainty.shape == (0,) and none.embedding.shape == (0, 6) and none.oddness_percentile.shape == (0,)


def test_without_calibration_images_there_are_no_percentiles_and_it_is_said_once(tmp_path: Path) -> None:
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


def test_candidates_name_terms_that_there_are() -> None:
    used = {term for candidate in CANDIDATES.values() for term in candidate.terms}
    assert used == set(TERMS)
    assert all(isinstance(candidate, Candidate) for candidate in CANDIDATES.values())


class Half(handmade.Affine):
    """One more feature, which is dead but for images that are nearly white."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        white = (handmade.pixels(images).mean(1, keepdim=True) - 0.9).relu() * self.linear.weight[:1, :1].abs() * 1e3
        return torch.cat([super().forward(images), white], dim=1)


def test_a_feature_that_is_dead_over_the_bank_makes_no_infinite_score(tmp_path: Path) -> None:
    torch.manual_seed(0)
    run = handmade.run(tmp_path / "run", Half(6), sigma=0.3)
    white = torch.full_like(IMAGES[:1], 255)
    for name, score in candidate_scores(run, torch.cat([IMAGES, white]), DRAWS).items():
        assert float(score.abs().max()) < 1e6, name
