"""The baseline uncertainties against scipy and scikit-learn, and what must hold for any features."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.spatial.distance import cdist
from scipy.stats import entropy as scipy_entropy
from sklearn.covariance import LedoitWolf
from sklearn.neighbors import NearestNeighbors
from torch import Tensor

from byov.metrics import energy, entropy, knn_distance, mahalanobis, max_softmax, representation


def features(seed: int, images: int, width: int = 5) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(images, width, generator=g) * torch.arange(1, width + 1) + 2


def test_of_a_classifiers_output() -> None:
    p = torch.tensor([[0.7, 0.2, 0.1], [0.0, 1.0, 0.0], [1 / 3, 1 / 3, 1 / 3]], dtype=torch.float64)
    assert max_softmax(p).tolist() == pytest.approx([0.3, 0, 2 / 3])
    assert entropy(p).tolist() == pytest.approx(scipy_entropy(p.numpy(), axis=1).tolist())
    logits = torch.tensor([[0.0, 0.0, 0.0, 0.0], [2.0, 1.0, 0.0, -torch.inf], [1000.0, 0.0, 0.0, 0.0]])
    assert energy(logits).tolist() == pytest.approx([-math.log(4), -math.log(math.e**2 + math.e + 1), -1000])


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**31), images=st.integers(1, 30), classes=st.integers(2, 8))
def test_properties_of_a_classifiers_output(seed: int, images: int, classes: int) -> None:
    logits = 3 * features(seed, images, classes)
    p = logits.softmax(1)
    assert ((max_softmax(p) >= 0) & (max_softmax(p) <= 1 - 1 / classes + 1e-6)).all()
    assert ((entropy(p) >= 0) & (entropy(p) <= math.log(classes) + 1e-6)).all()
    names = torch.randperm(classes, generator=torch.Generator().manual_seed(seed))
    assert torch.allclose(entropy(p[:, names]), entropy(p))
    assert torch.allclose(energy(logits + 1.0), energy(logits) - 1)  # what max softmax and entropy cannot see


@pytest.mark.parametrize("block", [1, 1 << 24])
@pytest.mark.parametrize("k", [1, 10, 60])
def test_knn_distance_equals_sklearn(k: int, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(representation, "BLOCK", block)
    x, bank = features(0, 40), features(1, 50)
    near = NearestNeighbors(n_neighbors=min(k, 50), metric="cosine", algorithm="brute").fit(bank)
    theirs = near.kneighbors(x)[0].mean(1)
    assert knn_distance(x, bank, k).tolist() == pytest.approx(theirs.tolist(), abs=1e-6)


def test_mahalanobis_equals_sklearn_without_labels() -> None:
    x, bank = features(2, 30), features(3, 80)
    theirs = LedoitWolf().fit(bank.double().numpy()).mahalanobis(x.double().numpy())
    assert mahalanobis(x, bank).square().tolist() == pytest.approx(theirs.tolist(), rel=1e-6)


def test_mahalanobis_equals_scipy_with_labels() -> None:
    x, bank = features(4, 30).double(), features(5, 120).double()
    labels = torch.arange(120) % 3 * 2  # classes 0, 2, 4: a number that no image has does no harm
    bank += labels[:, None] * 3
    means = torch.stack([bank[labels == c].mean(0) for c in (0, 2, 4)])
    within = (bank - means.repeat(40, 1)).numpy()
    precision = LedoitWolf(assume_centered=True).fit(within).precision_
    theirs = cdist(x.numpy(), means.numpy(), "mahalanobis", VI=precision).min(1)
    assert mahalanobis(x, bank, labels).tolist() == pytest.approx(theirs.tolist(), rel=1e-6)


def test_mahalanobis_of_few_images_and_of_a_collapsed_bank() -> None:
    assert mahalanobis(features(6, 10, 50), features(7, 12, 50)).isfinite().all()  # fewer images than features
    same = torch.ones(10, 3)
    assert mahalanobis(same, same).tolist() == [0.0] * 10
    assert mahalanobis(same + torch.tensor([3.0, 4.0, 0.0]), same).tolist() == pytest.approx([5.0] * 10)


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**31))
def test_rigid_motions_of_the_space_change_nothing(seed: int) -> None:
    x, bank = features(seed, 10).double(), features(seed + 1, 30).double()
    g = torch.Generator().manual_seed(seed)
    turn = torch.linalg.qr(torch.randn(5, 5, generator=g, dtype=torch.float64)).Q
    labels = torch.randint(0, 3, (30,), generator=g)
    for kind in (None, labels):
        value = mahalanobis(x, bank, kind)
        assert torch.allclose(mahalanobis(7 * x @ turn + 1, 7 * bank @ turn + 1, kind), value, rtol=1e-6)
    order = torch.randperm(30, generator=g)
    assert torch.allclose(mahalanobis(x, bank[order], labels[order]), mahalanobis(x, bank, labels))
    assert torch.allclose(knn_distance(7 * x @ turn, bank @ turn), knn_distance(x, bank), atol=1e-6)
    assert torch.allclose(knn_distance(x, bank[order]), knn_distance(x, bank), atol=1e-6)
    assert ((knn_distance(x, bank) >= -1e-6) & (knn_distance(x, bank) <= 2 + 1e-6)).all()


def test_bad_inputs_get_a_sentence() -> None:
    x = features(8, 10)
    for score in (max_softmax, entropy):
        with pytest.raises(ValueError, match="softmax"):
            score(x)
    for bad in (torch.tensor([[torch.nan, 0.0]]), torch.tensor([[torch.inf, 0.0]]), torch.tensor([[-torch.inf] * 2])):
        with pytest.raises(ValueError, match="finite"):
            energy(bad)
    for score in (knn_distance, mahalanobis):
        for arguments, says in (
            ((x, x[:, :3]), "must agree"),
            ((x, x[:0]), "reference must be"),
            ((x / 0, x), "finite"),
        ):
            with pytest.raises(ValueError, match=says):
                score(*arguments)
    with pytest.raises(ValueError, match="k is 0"):
        knn_distance(x, x, 0)
    with pytest.raises(ValueError, match="int64 labels"):
        mahalanobis(x, x, torch.zeros(10))
