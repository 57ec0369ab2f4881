"""kNN against scikit-learn where all neighbours weigh alike, and by hand where they do not."""

from __future__ import annotations

import pytest
import torch
from sklearn.neighbors import KNeighborsClassifier

from byov.metrics import knn_accuracy, neighbours


def clusters(seed: int, images: int, classes: int = 4, width: int = 6) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, classes, (images,), generator=g)
    return torch.randn(images, width, generator=g) + 1.5 * torch.eye(classes, width)[labels], labels


@pytest.mark.parametrize("k", [1, 5, 21])
def test_equals_sklearn_where_all_weigh_alike(k: int) -> None:
    (x, y), (test_x, test_y) = clusters(0, 300), clusters(1, 200)
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
    (x, y), (test_x, test_y) = clusters(2, 150), clusters(3, 101)
    whole = knn_accuracy(x, y, test_x, test_y)
    scale = torch.rand(150, 1, generator=torch.Generator().manual_seed(0)) + 0.5
    assert knn_accuracy(x * scale, y, test_x * 3, test_y) == whole
    monkeypatch.setattr(neighbours, "BLOCK", 1000)
    assert knn_accuracy(x, y, test_x, test_y) == pytest.approx(whole)


def test_more_neighbours_than_images_and_collapsed_features() -> None:
    x, y = clusters(4, 5)
    assert 0 <= knn_accuracy(x, y, x, y, k=20) <= 1
    assert 0 <= knn_accuracy(x * 0, y, x * 0, y) <= 1


def test_bad_inputs_get_a_sentence() -> None:
    x, y = clusters(5, 10)
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
