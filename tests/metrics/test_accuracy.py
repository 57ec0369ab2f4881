"""Top-k accuracy against torchmetrics, by hand, and what must hold for any input."""

from __future__ import annotations

import contextlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from byov.backbones._torchvision import import_torchvision
from byov.metrics import top_k_accuracy

with contextlib.suppress(ImportError):
    import_torchvision()  # torchmetrics imports torchvision wherever it is installed
from torchmetrics.functional.classification import multiclass_accuracy


def predictions(seed: int, images: int = 200, classes: int = 7) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, classes, (images,), generator=g)
    logits = 2 * torch.randn(images, classes, generator=g) + torch.eye(classes)[labels]
    return logits.softmax(1), labels


@pytest.mark.parametrize("k", [1, 2, 5])
def test_equals_torchmetrics(k: int) -> None:
    p, y = predictions(0)
    theirs = multiclass_accuracy(p, y, num_classes=7, top_k=k, average="micro")
    assert top_k_accuracy(p, y, k) == pytest.approx(float(theirs), abs=1e-6)


def test_by_hand() -> None:
    p = torch.tensor([[0.5, 0.3, 0.2], [0.5, 0.3, 0.2], [0.5, 0.3, 0.2], [0.1, 0.1, 0.8]])
    y = torch.tensor([0, 1, 2, 2])
    assert [top_k_accuracy(p, y, k) for k in (1, 2, 3, 5)] == [0.5, 0.75, 1.0, 1.0]


def test_ties_rank_as_argmax_does() -> None:
    p = torch.full((4, 4), 0.25)
    y = torch.arange(4)
    assert [top_k_accuracy(p, y, k) for k in (1, 2, 3, 4)] == [0.25, 0.5, 0.75, 1.0]


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**31), images=st.integers(1, 60), classes=st.integers(2, 9), k=st.integers(1, 9))
def test_properties(seed: int, images: int, classes: int, k: int) -> None:
    p, y = predictions(seed, images, classes)
    value = top_k_accuracy(p, y, k)
    assert 0 <= value <= top_k_accuracy(p, y, k + 1) <= 1
    order = torch.randperm(images, generator=torch.Generator().manual_seed(seed))
    assert top_k_accuracy(p[order], y[order], k) == pytest.approx(value, abs=1e-12)
    names = torch.randperm(classes, generator=torch.Generator().manual_seed(seed))
    assert top_k_accuracy(p[:, names], names.argsort()[y], k) == value  # no ties here
    assert top_k_accuracy(torch.eye(classes)[y], y, 1) == 1


@pytest.mark.parametrize(
    ("p", "y", "says"),
    [
        (torch.rand(4), torch.zeros(4, dtype=torch.int64), "shape"),
        (torch.eye(3), torch.zeros(3), "int64"),
        (torch.eye(3), torch.zeros(2, dtype=torch.int64), "do not go with"),
        (torch.eye(3)[:0], torch.zeros(0, dtype=torch.int64), "do not go with"),
        (torch.randn(3, 3) * 5, torch.zeros(3, dtype=torch.int64), "softmax"),
        (torch.full((3, 3), torch.nan), torch.zeros(3, dtype=torch.int64), "softmax"),
        (torch.eye(3), torch.tensor([0, 1, 3]), "classes 0 to 2"),
        (torch.eye(3), torch.tensor([0, 1, -1]), "classes 0 to 2"),
    ],
)
def test_bad_inputs_get_a_sentence(p: torch.Tensor, y: torch.Tensor, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        top_k_accuracy(p, y, 1)


def test_k_below_one() -> None:
    with pytest.raises(ValueError, match="k is 0"):
        top_k_accuracy(torch.eye(3), torch.arange(3), 0)
