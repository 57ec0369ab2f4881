"""The reference set: its images, its features at each draw, and that alignment undoes shifts and stretches."""

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import handmade
from byov._core.errors import BadInput
from byov.inference import run as inference
from byov.inference.run import Moments, ReferenceSet, aligned, at_draw, constant, features_of, moments_of
from byov.runs.split import divide


@pytest.fixture
def run(tmp_path: Path):
    torch.manual_seed(0)
    return handmade.run(tmp_path / "run", handmade.Affine(5))


# ----------------------------------------------------------------------------------------------------------- alignment


def test_alignment_by_hand() -> None:
    features = torch.tensor([[1.0, 12.0], [3.0, 28.0]])
    moments = moments_of(features)
    assert moments.mean.tolist() == [2.0, 20.0] and moments.std.tolist() == [1.0, 8.0]
    to = Moments(torch.tensor([5.0, 0.0], dtype=torch.float64), torch.tensor([2.0, 1.0], dtype=torch.float64))
    assert aligned(torch.tensor([[4.0, 20.0]]), moments, to).tolist() == [[9.0, 0.0]]  # (4 - 2) / 1 * 2 + 5


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**31), width=st.integers(1, 8))
def test_alignment_undoes_shifts_and_stretches(seed: int, width: int) -> None:
    g = torch.Generator().manual_seed(seed)
    known, features = torch.randn(40, width, generator=g).double(), torch.randn(7, width, generator=g).double()
    scale, shift = torch.rand(width, generator=g) * 5 + 0.1, torch.randn(width, generator=g) * 9
    moved = moments_of(known * scale + shift)
    torch.testing.assert_close(aligned(features * scale + shift, moved, moments_of(known)), features)


def test_a_feature_that_is_constant_over_the_reference_set_is_only_shifted() -> None:
    of = Moments(torch.tensor([3.0]).double(), torch.tensor([0.0]).double())
    to = Moments(torch.tensor([5.0]).double(), torch.tensor([2.0]).double())
    assert aligned(torch.tensor([[3.0], [4.0]]), of, to).tolist() == [[5.0], [6.0]]


# ----------------------------------------------------------------------------------------------------- the set at draws


def test_the_reference_set_at_a_draw(run) -> None:
    known = ReferenceSet(run)
    chosen = divide(120, 100, 20)
    assert torch.equal(known.images, handmade.images(120)[chosen.bank])
    assert torch.equal(known.calibration_images(), handmade.images(120)[chosen.calibration])
    with at_draw(run.encoder, 0, 3), torch.no_grad():
        expected = run.encoder(known.images)
    torch.testing.assert_close(known.at(3).features, expected)
    torch.testing.assert_close(known.at(None).features, features_of(run.encoder, known.images))
    torch.testing.assert_close(moments_of(known.aligned(expected, 3)), known.means.moments)


def test_a_draw_depends_on_seed_and_number_alone(run) -> None:
    def weights(seed: int, k: int | None) -> torch.Tensor:
        with at_draw(run.encoder, seed, k):
            return run.encoder.module.linear.weight.clone()

    first = weights(0, 1)
    weights(0, 5)
    assert torch.equal(weights(0, 1), first)
    others = [weights(0, 2), weights(1, 1), weights(0, None)]
    assert not any(torch.equal(other, first) for other in others)


def test_features_are_cached_and_the_source_is_then_not_needed(run) -> None:
    made = [ReferenceSet(run).at(k).features for k in (None, 0, 1)]
    (run.folder / "images.npz").unlink()
    for k, features in zip((None, 0, 1), made, strict=True):
        assert torch.equal(ReferenceSet(run).at(k).features, features)
    with pytest.raises(BadInput):
        ReferenceSet(run).at(2)


def test_a_file_cut_short_is_made_again(run) -> None:
    known = ReferenceSet(run)
    features = known.at(0).features
    file = known.folder / "draw-00000.safetensors"
    file.write_bytes(file.read_bytes()[:50])
    assert torch.equal(ReferenceSet(run).at(0).features, features)
    assert len(file.read_bytes()) > 50


def test_other_weights_do_not_find_the_old_features(run) -> None:
    old = ReferenceSet(run)
    features = old.at(0).features
    with torch.no_grad():
        run.encoder.means.add_(1)
    new = ReferenceSet(run)
    assert not torch.allclose(new.at(0).features, features)
    assert not old.folder.exists() and new.folder.is_dir(), "what is out of date is removed"


def test_the_cache_is_bounded(run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inference, "CACHE_BYTES", 2 * 100 * 5 * 4)  # two draws of 100 images with 5 features
    known = ReferenceSet(run)
    for k in range(4):
        known.at(k)
    cached = sorted(file.name for file in known.folder.iterdir())
    assert cached == ["draw-00000.safetensors", "draw-00001.safetensors", "means.safetensors"]


# --------------------------------------------------------------------------------------------------- which images


def test_other_images_than_those_trained_on_are_refused(run) -> None:
    import numpy as np

    np.savez(run.folder / "images.npz", images=handmade.images(120, seed=9)[:, 0].numpy())
    with pytest.raises(BadInput, match="restore them"):
        ReferenceSet(run).at(0)


def test_a_missing_or_damaged_list_is_named(run) -> None:
    path = run.folder / "reference" / "images.json"
    path.write_text('{"bank": []}')
    with pytest.raises(BadInput, match=r"images\.json is missing or damaged"):
        ReferenceSet(run)
    path.unlink()
    with pytest.raises(BadInput, match=r"images\.json is missing or damaged"):
        ReferenceSet(run)


def test_what_is_constant_but_for_rounding() -> None:
    features = torch.tensor([[0.0, 1.0, 1.0, 1e-20], [0.0, 1.0, 1 + 2**-23, 0.0]])
    assert constant(moments_of(features)).tolist() == [True, True, True, False]
