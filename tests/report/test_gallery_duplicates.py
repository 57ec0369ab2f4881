"""Near-duplicates against all pairs compared at once."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn.preprocessing import StandardScaler

from byov.report.gallery import RIDGE, near_duplicates


def embeddings(count: int = 100, width: int = 16, seed: int = 0) -> np.ndarray:
    """Far from the origin, as an encoder's are: not centred, all would have the same direction."""
    noise = np.random.default_rng(seed)
    return (noise.normal(size=(count, width)) * np.linspace(0.1, 3, width) + 20).astype(np.float32)


def cosines(rows: np.ndarray) -> np.ndarray:
    """Cosines of all pairs of whitened rows; -2 for a row with itself."""
    standard = StandardScaler().fit_transform(rows.astype(np.float64))
    metric = np.linalg.inv(np.corrcoef(rows.astype(np.float64), rowvar=False) + RIDGE * np.eye(rows.shape[1]))
    products = standard @ metric @ standard.T
    cosine = products / np.sqrt(np.outer(products.diagonal(), products.diagonal()))
    np.fill_diagonal(cosine, -2)
    return cosine


@pytest.mark.parametrize("block", [7, 32, 4096])
def test_planted_copies_are_found_whatever_the_block(block: int) -> None:
    rows = embeddings()
    rows[60] = rows[3]
    rows[99] = rows[3]
    rows[50] = rows[10] + 0.005
    groups = near_duplicates(rows, block=block)
    assert [group.rows for group in groups] == [[3, 60, 99], [10, 50]]
    cosine = cosines(rows)
    assert groups[0].cosine == pytest.approx(1, abs=1e-6)
    assert groups[1].cosine == pytest.approx(cosine[10, 50], abs=1e-5)


@pytest.mark.parametrize("seed", range(3))
def test_links_are_those_of_the_nearest_row(seed: int) -> None:
    """At a threshold that links many: the members of a group and its best cosine, from all pairs."""
    rows, threshold = embeddings(80, 4, seed), 0.9
    cosine = cosines(rows)
    groups = near_duplicates(rows, threshold, block=11)
    linked = {row for group in groups for row in group.rows}
    assert linked == set(np.flatnonzero(cosine.max(1) >= threshold))
    of = {row: i for i, group in enumerate(groups) for row in group.rows}
    assert all(of[row] == of[int(cosine[row].argmax())] for row in linked)
    for group in groups:
        assert group.cosine == pytest.approx(cosine[np.ix_(group.rows, group.rows)].max(), abs=1e-5)
    assert [group.cosine for group in groups] == sorted((group.cosine for group in groups), reverse=True)


def test_what_all_images_have_in_common_makes_no_duplicates() -> None:
    """Nearly all variance in one direction, which all columns share: only standardised, most rows would be similar."""
    noise = np.random.default_rng(0)
    rows = (noise.normal(size=(300, 1)) * 10 + noise.normal(size=(300, 32))).astype(np.float32)
    rows[7] = rows[250]
    standard = StandardScaler().fit_transform(rows)
    standard /= np.linalg.norm(standard, axis=1, keepdims=True)
    assert ((standard @ standard.T - np.eye(300)).max(1) > 0.97).mean() > 0.5
    assert [group.rows for group in near_duplicates(rows)] == [[7, 250]]


def test_nothing_to_compare() -> None:
    assert near_duplicates(embeddings(0)) == near_duplicates(embeddings(1)) == []
    assert near_duplicates(embeddings()) == []


def test_copies_of_one_image_are_one_group() -> None:
    copies = np.tile(np.float32([0.3, -1.7, 0.0]), (5, 1))
    assert [group.rows for group in near_duplicates(copies, block=2)] == [[0, 1, 2, 3, 4]]


def test_progress_ends_at_its_total() -> None:
    reported: list[tuple[str, int, int]] = []
    near_duplicates(embeddings(), block=30, progress=lambda *what: reported.append(what))
    assert [done for _, done, _ in reported] == list(range(1, 11)) and reported[-1][2] == 10


def test_a_constant_column_changes_nothing() -> None:
    rows = embeddings()
    with_constant = np.concatenate([rows, np.full((len(rows), 1), 7.1, np.float32)], 1)
    with_constant[42] = with_constant[41]
    assert [group.rows for group in near_duplicates(with_constant)] == [[41, 42]]
