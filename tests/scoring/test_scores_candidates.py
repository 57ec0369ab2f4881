"""The candidates: each against its plain definition, and which reference images an image is compared with."""

from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.stats import entropy
from sklearn.covariance import shrunk_covariance
from sklearn.neighbors import NearestNeighbors

import handmade
from byov.inference.run import ReferenceSet, Run, at_draw
from byov.scoring.scores import (
    CANDIDATES,
    NEIGHBOURS,
    TERMS,
    Candidate,
    OneDraw,
    Scorer,
    TermSums,
    neighbour_count,
    reference_scores,
    usual_images,
)
from byov.studies.beyond.score import candidate_scores

IMAGES = handmade.images(7, seed=1)
DRAWS = 4


@pytest.fixture
def run(tmp_path: Path) -> Run:
    torch.manual_seed(0)
    return handmade.run(tmp_path / "run", handmade.Affine(6), sigma=0.3)


def of_draw(run: Run, k: int | None) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Raw features of the images, aligned and centred features of images and reference set; by the formula."""
    reference = ReferenceSet(run)
    with at_draw(run.encoder, run.config.seed, k):
        raw, known = (run.encoder(images).double().numpy() for images in (IMAGES, reference.images))
    with torch.no_grad():
        spread = run.encoder(reference.images).double().numpy().std(0)
    mean, std = known.mean(0), known.std(0)
    return raw, (raw - mean) / std * spread, (known - mean) / std * spread


def still_centre(run: Run) -> np.ndarray:
    """The centre of the reference set at the means."""
    with torch.no_grad():
        centre: np.ndarray = run.encoder(ReferenceSet(run).images).double().numpy().mean(0)
    return centre


def expected_scores(run: Run) -> dict[str, np.ndarray]:
    """Every candidate written out plainly, with all draws in memory, by other libraries where possible."""
    draws = [of_draw(run, k) for k in range(DRAWS)]
    spread = of_draw(run, None)[2].std(0)
    raw, images = np.stack([d[0] for d in draws]), np.stack([d[1] for d in draws])

    def distances(images: np.ndarray, reference: np.ndarray) -> np.ndarray:
        return NearestNeighbors(n_neighbors=10).fit(reference).kneighbors(images)[0].mean(1)

    def whitened(images: np.ndarray, reference: np.ndarray) -> np.ndarray:
        scaled = reference / spread
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
        """Sorted, most similar first: features at the means, or aligned to them; not centred."""
        _, images, reference = of_draw(run, k)
        return 1 - np.sort(unit(images + centre) @ unit(reference + centre).T, axis=1)[:, ::-1]

    own = unit(still[2] + centre) @ unit(still[2] + centre).T - 2 * np.eye(len(still[2]))
    oddness = 1 - np.sort(own, axis=1)[:, -10]
    lower, upper = np.quantile(oddness, [0.25, 0.75])
    usual = np.flatnonzero(oddness <= 1.5 * upper - 0.5 * lower)

    def near(k: int | None) -> np.ndarray:
        """Mean cosine distance to the 10 nearest usual images, centred."""
        _, images, reference = of_draw(run, k)
        return 1 - np.sort(unit(images) @ unit(reference[usual]).T, axis=1)[:, ::-1][:, :10].mean(1)

    def consistent(chosen: np.ndarray) -> np.ndarray:
        """The share of the 10 most similar that two draws have in common."""
        votes = []
        for k in range(DRAWS):
            _, images, reference = of_draw(run, k)
            order = np.argsort(-(unit(images + centre) @ unit(reference[chosen] + centre).T), axis=1)
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
        assert values.std() > 1e-3 * values.mean(), f"{name} is the same for all images"


def test_draws_that_only_shift_and_stretch_add_no_uncertainty(tmp_path: Path) -> None:
    """Once aligned, they all equal the means: no spread, no disagreement, and the distance is that at the means."""
    torch.manual_seed(0)
    run = handmade.run(tmp_path / "run", handmade.ShiftedAndStretched(6), sigma=0.2)
    found = candidate_scores(run, IMAGES, DRAWS)
    for name in ("aligned_variance", "assignment", "disagreement", "product"):
        assert float(found[name].abs().max()) < 1e-5, name
    for drawn, still in (("neighbours", "knn"), ("mahalanobis", "mahalanobis_at_means")):
        torch.testing.assert_close(found[drawn], found[still], rtol=1e-4, atol=1e-4)
    assert float(found["variance"].min()) > 1e-3


def test_reference_images_are_their_own_nearest_neighbour(run: Run) -> None:
    reference = ReferenceSet(run)
    draw = OneDraw(reference, reference.means.features, None)
    distances, which = draw.nearest
    assert torch.equal(which[:, 0], torch.arange(len(reference.images)))
    assert float(distances[:, 0].max()) < 2e-3 * float(distances[:, 1:].mean())  # rounding, under a square root


def test_a_reference_image_is_compared_with_the_others(run: Run) -> None:
    """Otherwise it would look more certain than similar images: with itself at distance 0, by a tenth."""
    reference = ReferenceSet(run)
    places = torch.arange(len(reference.images))
    assert torch.equal(reference.own(reference.images), places)
    assert torch.equal(reference.own(reference.images / 255), places)
    assert (reference.own(reference.calibration_images()) == -1).all()
    draw = OneDraw(reference, reference.means.features, None, places)
    apart = torch.cdist(draw.images.double(), draw.reference.double()).fill_diagonal_(torch.inf)
    expected = apart.topk(NEIGHBOURS, largest=False).values.mean(1)
    found = candidate_scores(run, reference.images, DRAWS, ["knn", "assignment"])
    torch.testing.assert_close(found["knn"], expected, rtol=1e-3, atol=1e-4)
    assert found["assignment"].isfinite().all() and float(draw.assignment.diagonal().max()) == 0
    torch.testing.assert_close(draw.assignment.sum(1), torch.ones(len(places)))


class Directions(torch.nn.Module):
    """Features that are the pixels: only the direction of an image matters."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(()))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return handmade.pixels(images) * self.scale


@pytest.mark.parametrize("alike", [1, 6, 12])
def test_a_group_of_similar_images_is_as_odd_as_one_of_them(tmp_path: Path, alike: int) -> None:
    """Up to 3% of 400: with the 10 nearest, a group of 12 would be the least odd of all."""
    usual = handmade.images(400 - alike)
    usual[:, :, 2:] //= 8
    group = torch.zeros(alike, 1, 4, 4, dtype=torch.uint8)
    group[:, :, 2:] = handmade.images(alike, seed=3)[:, :, 2:] // 64 + 180
    run = handmade.run(tmp_path / "run", Directions(), source=torch.cat([usual, group]), calibration=0, where="none")
    scores = Scorer(run).scores(torch.cat([usual, group]))
    for values in (scores.oddness, scores.uncertainty):
        assert float(values[-alike:].min()) > float(values[:-alike].max())


def test_odd_reference_images_are_not_among_the_usual(tmp_path: Path) -> None:
    """Twelve similar images among 400 are left out; if all images are the same, all are usual."""
    source = handmade.images(400)
    source[:, :, 2:] //= 8
    source[-12:] = 0
    source[-12:, :, 2:] = handmade.images(12, seed=3)[:, :, 2:] // 64 + 180
    run = handmade.run(tmp_path / "run", Directions(), source=source, calibration=0, where="none")
    reference = ReferenceSet(run)
    oddness = reference_scores(reference, "kth_cosine", 0)
    usual = usual_images(reference)
    odd = torch.ones(len(oddness), dtype=torch.bool)
    odd[usual] = False
    lower, upper = np.quantile(oddness, [0.25, 0.75])
    assert torch.equal(odd, oddness > 1.5 * upper - 0.5 * lower)
    assert int((reference.images[odd][:, :, :2] == 0).all(3).all(2).all(1).sum()) == 12
    same = handmade.run(
        tmp_path / "same", Directions(), source=source[:1].expand(30, -1, -1, -1).clone(), calibration=0
    )
    assert torch.equal(usual_images(ReferenceSet(same)), torch.arange(30))


def test_draws_that_agree_about_a_group_of_odd_images_do_not_make_it_certain(tmp_path: Path) -> None:
    """The images of a group are each other's neighbours at every draw; only usual images show that they are odd."""
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


def test_neighbour_count() -> None:
    assert [neighbour_count(images, 0.06) for images in (2, 8, 100, 1000, 4000)] == [1, 7, 10, 60, 240]


def test_sums_of_two_processes_merge_and_blocks_change_nothing(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    reference, names = ReferenceSet(run), ["combined", "variance"]

    def sums(draws: range) -> TermSums:
        found = TermSums(names)
        for k in draws:
            with at_draw(run.encoder, run.config.seed, k):
                features = run.encoder(IMAGES)
            found.add(reference, features, k)
        return found

    whole = sums(range(DRAWS)).scores(DRAWS)
    first, second = sums(range(1)), sums(range(1, DRAWS))
    first.merge(second.totals)
    torch.testing.assert_close(first.scores(DRAWS), whole)
    monkeypatch.setattr("byov.scoring.scores.BLOCK", 3)
    torch.testing.assert_close(sums(range(DRAWS)).scores(DRAWS), whole, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(candidate_scores(run, IMAGES, DRAWS, names), whole, rtol=1e-4, atol=1e-5)


def test_candidates_use_every_term() -> None:
    used = {term for candidate in CANDIDATES.values() for term in candidate.terms}
    assert used == set(TERMS)
    assert all(isinstance(candidate, Candidate) for candidate in CANDIDATES.values())


class Half(handmade.Affine):
    """One more feature, which is dead except for images that are nearly white."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        white = (handmade.pixels(images).mean(1, keepdim=True) - 0.9).relu() * self.linear.weight[:1, :1].abs() * 1e3
        return torch.cat([super().forward(images), white], dim=1)


def test_a_feature_that_is_dead_over_the_reference_set_makes_no_infinite_score(tmp_path: Path) -> None:
    torch.manual_seed(0)
    run = handmade.run(tmp_path / "run", Half(6), sigma=0.3)
    white = torch.full_like(IMAGES[:1], 255)
    for name, score in candidate_scores(run, torch.cat([IMAGES, white]), DRAWS).items():
        assert float(score.abs().max()) < 1e6, name
