"""Specs, splits, digits, and the list of sources."""

import numpy as np
import pytest
import torch

from byov._core.errors import BadInput
from byov.config import SOURCE_KINDS
from byov.data import fetch
from byov.data.images import ImageSet
from byov.data.sources import KINDS, names, open_source, table


@pytest.fixture(autouse=True)
def _empty_data_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("BYOV_DATA", str(tmp_path / "data"))


@pytest.fixture
def npz(tmp_path):
    path = tmp_path / "some.npz"
    images = np.arange(4 * 25, dtype=np.uint8).reshape(4, 5, 5)
    np.savez(path, x_train=images, y_train=np.arange(4), x_test=images[:1])
    return path


def test_digits_split_is_the_same_for_ever():
    train, test = (open_source("digits").load(split) for split in ("train", "test"))
    assert (len(train), len(test)) == (1442, 355)
    assert train.images.shape[1:] == (1, 8, 8)
    assert train.images.max() == 255
    assert test.labels.bincount().tolist() == [35, 36, 35, 36, 36, 36, 36, 35, 34, 36]
    assert fetch.digest(train) == "7fa69e063a1f915ea22d195060e9cf48f5dcaf611a34b52dbac72bbd09d7c510"
    assert fetch.digest(test) == "c828ed8d66d4999368244a654a4bd17850508763dc9ee33f20f139ab0bb00a7d"


def test_digits_values_are_exact():
    from sklearn.datasets import load_digits

    bunch = load_digits()
    test = open_source("digits").load("test")
    zeros = np.flatnonzero(bunch.target == 0)
    expected = np.round(bunch.images[zeros[4::5]] * 255 / 16).astype(np.uint8)
    assert np.array_equal(test.images[test.labels == 0, 0].numpy(), expected)


@pytest.mark.parametrize("name", names())
def test_named_sources_have_both_splits_before_anything_is_read(name):
    source = open_source(name)
    assert source.name == name
    assert source.splits == ("train", "test")
    assert source.default == "test"
    assert source.flips == (name not in ("digits", "mnist"))


def test_suffix_leaves_one_split():
    source = open_source("digits@train")
    assert (source.name, source.splits, source.default) == ("digits@train", ("train",), "train")
    assert not source.flips
    assert len(source.load("train")) == 1442
    with pytest.raises(BadInput, match="digits@train has only train images, no test images; leave out its @ suffix"):
        source.load("test")


def test_npz_source(npz):
    source = open_source(f"npz:{npz}")
    assert source.splits == ("train", "test")
    assert source.flips
    assert source.load("train").labels.tolist() == [0, 1, 2, 3]
    assert open_source(f"npz:{npz}@test").load("test").images.shape == (1, 1, 5, 5)


def test_npz_with_one_set(tmp_path):
    np.savez(tmp_path / "one.npz", images=np.zeros((2, 5, 5), np.uint8))
    source = open_source(f"npz:{tmp_path}/one.npz")
    assert source.default == "train"
    with pytest.raises(BadInput, match="has only train images"):
        source.load("test")
    with pytest.raises(BadInput, match="leave out @test"):
        open_source(f"npz:{tmp_path}/one.npz@test")


def test_every_kind_with_a_path_is_known_to_the_config():
    assert set(KINDS) == set(SOURCE_KINDS)


def test_missing_npz_is_said_at_once():
    with pytest.raises(BadInput, match="there is no file nowhere"):
        open_source("npz:nowhere.npz")


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("cifar", "there is no source 'cifar'; did you mean cifar10?"),
        ("fashion-mnist", "did you mean fashion_mnist"),
        (
            "qqq",
            "there is no source 'qqq', nor a folder of that name; the sources are digits, cifar10, fashion_mnist, "
            "mnist, npz:PATH, folder:PATH.",
        ),
        ("", "the sources are digits"),
        ("tar:/x", "there is no source 'tar:/x'"),
        ("npz:", "there is no source 'npz:'"),
        ("some/file.npz", "did you mean npz:some/file.npz?"),
        ("cifar10@valid", "the suffix is @train or @test, as in cifar10@test"),
        ("cifar@test", "did you mean cifar10?"),
    ],
)
def test_unknown_source(spec, message):
    with pytest.raises(BadInput) as caught:
        open_source(spec)
    assert message in str(caught.value)


@pytest.mark.parametrize("name", fetch.PUBLISHED)
def test_not_fetched_yet(name, monkeypatch):
    monkeypatch.setattr(fetch, "_place", lambda published: None)  # this machine may have Debian's package
    with pytest.raises(BadInput, match=f"run `byov data get {name}`"):
        open_source(name).load("test")


def test_table(monkeypatch):
    monkeypatch.setattr(fetch, "_place", lambda published: None)
    rows = {row.name: row for row in table()}
    assert list(rows) == names()
    assert [row.there for row in rows.values()] == [True, False, False, False]
    digits = open_source("digits")
    assert (rows["digits"].train, rows["digits"].test) == (len(digits.load("train")), len(digits.load("test")))
    assert rows["cifar10"].size == "32x32x3"


def test_image_set_subset_and_checks():
    images = torch.arange(12, dtype=torch.uint8).reshape(3, 1, 2, 2)
    whole = ImageSet(images, torch.tensor([4, 5, 6]), ("a",))
    part = whole.subset(torch.tensor([2, 0]))
    assert len(part) == 2
    assert part.labels.tolist() == [6, 4]
    assert torch.equal(part.images[0], images[2])
    assert ImageSet(images).subset(torch.tensor([1])).labels is None
    for bad in (images.float(), images[0], images.transpose(0, 3)):
        with pytest.raises(ValueError, match="contiguous uint8"):
            ImageSet(bad)
    with pytest.raises(ValueError, match="labels must be int64"):
        ImageSet(images, torch.tensor([1, 2]))
