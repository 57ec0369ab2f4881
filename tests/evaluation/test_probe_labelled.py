"""Images as a run takes them: channels, sides, and a fair part of them."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

import handmade
from byov._core.errors import BadInput
from byov.data.images import ImageSet
from byov.data.transforms import resized
from byov.evaluation.probe import load_labelled
from byov.inference.inputs import at_side, in_channels, spread
from byov.inference.run import Run


def run(folder: Path, channels: int) -> Run:
    made = handmade.run(folder, handmade.Affine(3))
    return Run(made.folder, made.config, made.learner, made.encoder, 1, (channels, 4, 4), None)


def test_grey_is_repeated_and_rgb_made_grey_as_pil_does(tmp_path: Path) -> None:
    grey = handmade.images(3)
    colour, said = in_channels(run(tmp_path, 3), grey)
    assert torch.equal(colour, grey.repeat(1, 3, 1, 1)) and colour.is_contiguous() and "repeating" in str(said)
    rgb = torch.randint(0, 256, (6, 3, 5, 5), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    made, said = in_channels(run(tmp_path, 1), rgb)
    expected = [np.asarray(Image.fromarray(image.permute(1, 2, 0).numpy()).convert("L")) for image in rgb]
    assert (
        said == "RGB made grey"
        and int((made[:, 0].int() - torch.from_numpy(np.stack(expected)).int()).abs().max()) <= 1
    )
    fraction, _ = in_channels(run(tmp_path, 1), rgb / 255)
    torch.testing.assert_close(fraction, made / 255, atol=0.5 / 255 + 1e-6, rtol=0)
    same, said = in_channels(run(tmp_path, 1), grey)
    assert same is grey and said is None


def test_a_side_is_changed_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    images = torch.randint(0, 256, (7, 1, 9, 9), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    monkeypatch.setattr("byov.inference.inputs.BLOCK", 3)
    assert torch.equal(at_side(images, 4), resized(images, 4)) and at_side(images, 9) is images


@given(st.integers(1, 5000), st.integers(1, 5000))
def test_a_part_is_spread_over_all(total: int, most: int) -> None:
    chosen = spread(total, most)
    gaps = torch.cat([chosen, torch.tensor([total])]).diff()
    assert len(chosen) == min(total, most) and int(chosen[0]) == 0
    assert int(gaps.min()) >= 1 and int(gaps.max() - gaps.min()) <= 1  # no class of a sorted set is left out


def test_the_probe_sees_the_images_that_the_encoder_saw(tmp_path: Path) -> None:
    made = run(tmp_path / "run", 1)
    pixels, labels = handmade.images(120)[:, 0].numpy(), np.arange(120) % 2
    path = Path(made.config.data.removeprefix("npz:"))
    np.savez(path, x_train=pixels, y_train=labels, x_test=pixels[:10], y_test=labels[:10])
    own = load_labelled(made, made.config.data, lambda *what: None)
    assert len(own.train) == 100 and torch.equal(own.train.images, handmade.images(120)[own.train_ids])
    assert torch.equal(own.train_labels, own.train_ids % 2) and own.classes == 2
    np.savez(tmp_path / "other.npz", x_train=pixels, y_train=labels, x_test=pixels[:10], y_test=labels[:10])
    other = load_labelled(made, f"npz:{tmp_path / 'other.npz'}", lambda *what: None)
    assert len(other.train) == 120 and torch.equal(other.train_ids, torch.arange(120))


def test_images_that_have_changed_since_the_training_are_told_of(tmp_path: Path) -> None:
    made, said = run(tmp_path / "run", 1), list[str]()
    pixels, labels = handmade.images(120)[:, 0].numpy(), np.arange(120) % 2
    path = Path(made.config.data.removeprefix("npz:"))
    for seen, expected in ((pixels, 0), (pixels[:110], 1)):
        np.savez(path, x_train=seen, y_train=labels[: len(seen)], x_test=pixels[:10], y_test=labels[:10])
        trained = replace(made, fingerprint=ImageSet(handmade.images(120)).fingerprint())
        load_labelled(trained, made.config.data, lambda *what: None, said.append)
        assert len(said) == expected
    assert "has changed since" in said[0]


def test_images_that_are_not_square_are_refused(tmp_path: Path) -> None:
    wide = np.zeros((4, 8, 9, 3), dtype=np.uint8)
    np.savez(tmp_path / "x.npz", x_train=wide, x_test=wide, y_train=[0, 1, 0, 1], y_test=[0, 1, 0, 1])
    with pytest.raises(BadInput, match="squares"):
        load_labelled(run(tmp_path / "run", 1), f"npz:{tmp_path / 'x.npz'}", lambda *what: None)
