"""Recall@1 and R-AUROC against scikit-learn and by hand; blocks change nothing."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import roc_auc_score
from sklearn.neighbors import NearestNeighbors
from torch import Tensor

from byov.metrics import neighbours, r_auroc, recall_at_1, retrieval_hits


def clusters(seed: int, images: int = 150, classes: int = 4, width: int = 6) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, classes, (images,), generator=g)
    return torch.randn(images, width, generator=g) + 1.5 * torch.eye(classes, width)[labels], labels


@pytest.mark.parametrize("block", [1, 1000, 1 << 24])
def test_equals_sklearn_whatever_the_block(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(neighbours, "BLOCK", block)
    x, y = clusters(0)
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
    x, y = clusters(seed, images)
    hits = retrieval_hits(x, y)
    g = torch.Generator().manual_seed(seed)
    order = torch.randperm(images, generator=g)
    assert torch.equal(retrieval_hits(x[order], y[order]), hits[order])
    assert torch.equal(retrieval_hits(x * torch.rand(images, 1, generator=g).add(0.5), y), hits)
    assert retrieval_hits(torch.cat([x, x]), torch.cat([y, y])).all()  # each image's twin is another image
    assert recall_at_1(x, y * 0) == 1 and recall_at_1(x, torch.arange(images)) == 0


def test_bad_inputs_get_a_sentence() -> None:
    x, y = clusters(1, 10)
    for arguments, says in (
        ((x, y.float()), "int64"),
        ((x, y[:9]), "as many"),
        ((x[:1], y[:1]), "at least two"),
        ((x / 0, y), "not finite"),
        ((x[0], y), "shape"),
    ):
        with pytest.raises(ValueError, match=says):
            recall_at_1(*arguments)
