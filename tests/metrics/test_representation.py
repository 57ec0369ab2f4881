"""kNN accuracy and retrieval against scikit-learn and by hand."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import roc_auc_score
from sklearn.neighbors import KNeighborsClassifier, NearestNeighbors
from torch import Tensor

from byov.metrics import knn_accuracy, r_auroc, recall_at_1, representation, retrieval_hits


def clusters_of_knn(seed: int, images: int, classes: int = 4, width: int = 6) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, classes, (images,), generator=g)
    return torch.randn(images, width, generator=g) + 1.5 * torch.eye(classes, width)[labels], labels


@pytest.mark.parametrize("k", [1, 5, 21])
def test_equals_sklearn_where_all_weigh_alike(k: int) -> None:
    (x, y), (test_x, test_y) = clusters_of_knn(0, 300), clusters_of_knn(1, 200)
    theirs = KNeighborsClassifier(k, metric="cosine", algorithm="brute").fit(x, y).score(test_x, test_y)
    assert knn_accuracy(x, y, test_x, test_y, k, temperature=float("inf")) == pytest.approx(theirs)


def test_weights_by_hand() -> None:
    # one neighbour of class 1 at cosine 1, two of class 0 at cosine .8: e^(1/t) against 2 e^(.8/t), even at t = .2/ln 2
    bank = torch.tensor([[1.0, 0.0], [0.8, 0.6], [0.8, -0.6]])
    labels, query = torch.tensor([1, 0, 0]), torch.tensor([[2.0, 0.0]])
    truth = torch.tensor([1])
    assert knn_accuracy(bank, labels, query, truth, k=3, temperature=0.25) == 1
    assert knn_accuracy(bank, labels, query, truth, k=3, temperature=0.35) == 0
    assert knn_accuracy(bank, labels, query, truth, k=3, temperature=1e-4) == 1  # no overflow


def test_scale_of_an_image_and_blocks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    (x, y), (test_x, test_y) = clusters_of_knn(2, 150), clusters_of_knn(3, 101)
    whole = knn_accuracy(x, y, test_x, test_y)
    scale = torch.rand(150, 1, generator=torch.Generator().manual_seed(0)) + 0.5
    assert knn_accuracy(x * scale, y, test_x * 3, test_y) == whole
    monkeypatch.setattr(representation, "BLOCK", 1000)
    assert knn_accuracy(x, y, test_x, test_y) == pytest.approx(whole)


def test_more_neighbours_than_images_and_collapsed_features() -> None:
    x, y = clusters_of_knn(4, 5)
    assert 0 <= knn_accuracy(x, y, x, y, k=20) <= 1
    assert 0 <= knn_accuracy(x * 0, y, x * 0, y) <= 1


def test_bad_inputs_get_a_sentence_of_knn() -> None:
    x, y = clusters_of_knn(5, 10)
    for arguments, says in (
        ((x, y[:9], x, y), "train: features"),
        ((x, y, x[:, :3], y), "columns"),
        ((x, y, x / 0, y), "test: some features are not finite"),
        ((x, y.float(), x, y), "int64"),
    ):
        with pytest.raises(ValueError, match=says):
            knn_accuracy(*arguments)
    with pytest.raises(ValueError, match="above 0"):
        knn_accuracy(x, y, x, y, k=0)


def clusters_of_retrieval(seed: int, images: int = 150, classes: int = 4, width: int = 6) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, classes, (images,), generator=g)
    return torch.randn(images, width, generator=g) + 1.5 * torch.eye(classes, width)[labels], labels


@pytest.mark.parametrize("block", [1, 1000, 1 << 24])
def test_equals_sklearn_whatever_the_block(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(representation, "BLOCK", block)
    x, y = clusters_of_retrieval(0)
    near = NearestNeighbors(n_neighbors=1, metric="cosine", algorithm="brute").fit(x)
    _, index = near.kneighbors()  # without an argument: an image is not its own neighbour
    hits = y[torch.from_numpy(index[:, 0])] == y
    assert torch.equal(retrieval_hits(x, y), hits)
    assert recall_at_1(x, y) == pytest.approx(float(hits.double().mean()))
    u = x.norm(dim=1)
    assert r_auroc(u, hits) == pytest.approx(roc_auc_score(~hits, u), abs=1e-12)


def test_by_hand() -> None:
    # by angle: 0, 10, 30, 90 degrees; the length of the third does not matter
    x = torch.tensor([[math.cos(math.radians(a)), math.sin(math.radians(a))] for a in (0, 10, 30, 90)])
    x[2] *= 100
    assert retrieval_hits(x, torch.tensor([0, 0, 1, 1])).tolist() == [True, True, False, True]
    assert r_auroc(torch.tensor([0.1, 0.5, 0.3, 0.2]), torch.tensor([True, True, False, True])) == pytest.approx(2 / 3)
    assert math.isnan(r_auroc(torch.rand(3), torch.ones(3, dtype=torch.bool)))


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**31), images=st.integers(2, 40))
def test_properties(seed: int, images: int) -> None:
    x, y = clusters_of_retrieval(seed, images)
    hits = retrieval_hits(x, y)
    g = torch.Generator().manual_seed(seed)
    order = torch.randperm(images, generator=g)
    assert torch.equal(retrieval_hits(x[order], y[order]), hits[order])
    assert torch.equal(retrieval_hits(x * torch.rand(images, 1, generator=g).add(0.5), y), hits)
    assert retrieval_hits(torch.cat([x, x]), torch.cat([y, y])).all()  # each image's twin is another image
    assert recall_at_1(x, y * 0) == 1 and recall_at_1(x, torch.arange(images)) == 0


def test_bad_inputs_get_a_sentence_of_retrieval() -> None:
    x, y = clusters_of_retrieval(1, 10)
    for arguments, says in (
        ((x, y.float()), "int64"),
        ((x, y[:9]), "as many"),
        ((x[:1], y[:1]), "at least two"),
        ((x / 0, y), "not finite"),
        ((x[0], y), "shape"),
    ):
        with pytest.raises(ValueError, match=says):
            recall_at_1(*arguments)


def test_class_numbers_may_have_gaps() -> None:
    features = torch.eye(4).repeat(2, 1)
    labels = torch.tensor([0, 7, 1 << 40, 3]).repeat(2)
    assert knn_accuracy(features[:4], labels[:4], features[4:], labels[4:], k=1) == 1
    assert knn_accuracy(features[:4], labels[:4], features[4:], labels[4:] + 1, k=1) == 0
