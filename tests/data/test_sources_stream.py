"""Streams yield the right images, with the pixels that evaluation sees."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from byov._core.errors import BadInput
from byov.data.image_folder import storage_side
from byov.data.sources import open_source, open_stream
from byov.data.transforms import resized

SIDE = 16


def test_a_stream_gives_the_pixels_that_evaluation_sees(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same as the source, which caches a folder."""
    monkeypatch.setenv("BYOV_DATA", str(tmp_path / "data"))
    photos = tmp_path / "photos"
    photos.mkdir()
    noise = np.random.default_rng(0)
    for i in range(40):
        Image.fromarray(noise.integers(0, 256, (50, 40 + i, 3), dtype=np.uint8)).save(photos / f"{i:02d}.jpg")
    kept = open_source(f"folder:{photos}", SIDE).load("train", say=lambda text: None).images
    assert kept.shape[-1] == storage_side(SIDE)
    chunk = open_stream(f"folder:{photos}", SIDE).chunk(3, 1000)
    assert chunk.positions == list(range(3, 40)) and not chunk.skipped
    assert torch.equal(chunk.images, resized(kept, SIDE)[3:])


def test_which_images_are_meant(tmp_path: Path) -> None:
    for name in ("train/0.png", "train/1.png", "test/2.png", "other/3.png"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        Image.new("L", (8, 8)).save(tmp_path / name)
    assert list(open_stream(str(tmp_path), 8).names) == ["other/3.png", "test/2.png", "train/0.png", "train/1.png"]
    assert list(open_stream(f"folder:{tmp_path}", 8).names) == ["2.png"]
    assert list(open_stream(f"folder:{tmp_path}@train", 8).names) == ["0.png", "1.png"]


def test_names_are_real_paths(tmp_path: Path) -> None:
    names = ["a\nb.png", "é.png"]
    for name in names:
        Image.new("L", (8, 8)).save(tmp_path / name)
    (tmp_path / "new\nline.heic").touch()
    stream = open_stream(str(tmp_path), 8)
    assert list(stream.names) == names and len(stream.chunk(0, 2).positions) == 2
    assert list(stream.unread) == [("new\\nline.heic", "the format heic is not read")]  # only displayed


def test_undecodable_bytes_in_names_are_escaped(tmp_path: Path) -> None:
    Image.new("L", (8, 8)).save(tmp_path / "a.png")
    try:
        (tmp_path / "a.png").rename(tmp_path / os.fsdecode(b"\xff\n.png"))
    except OSError:
        pytest.skip("this file system refuses such names")
    stream = open_stream(str(tmp_path), 8)
    assert list(stream.names) == ["\\udcff\n.png"]  # valid UTF-8, as tables need it
    assert stream.chunk(0, 1).positions == [0]


def test_a_source_in_memory() -> None:
    stream = open_stream("digits@test", 12)
    images = open_source("digits").load("test").images
    assert open_stream("digits", 12).names[:1] == ["digits@test#0"]
    assert len(stream) == 355 and stream.names[17] == "digits@test#17" and stream.channels == 1
    assert torch.equal(stream.chunk(300, 400).images, resized(images, 12)[300:])
    picture = stream.picture(17, 224)
    assert picture is not None and (picture == images[17].numpy()).all()


def test_a_stream_knows_that_its_files_have_changed(tmp_path: Path) -> None:
    Image.new("L", (8, 8)).save(tmp_path / "a.png")
    before = open_stream(str(tmp_path), 8)
    assert before.digest == open_stream(str(tmp_path), 8).digest
    Image.new("L", (8, 8)).save(tmp_path / "b.png")
    assert before.digest != open_stream(str(tmp_path), 8).digest
    (tmp_path / "a.png").unlink()
    assert before.picture(0, 8) is None


def test_no_images(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="there are no images in"):
        open_stream(str(tmp_path), 8)
    (tmp_path / "a.heic").touch()
    with pytest.raises(BadInput, match=r"but a.heic \(the format heic is not read\); give a folder"):
        open_stream(str(tmp_path), 8)  # the same message as in training
    with pytest.raises(BadInput, match="there is no folder"):
        open_stream(f"folder:{tmp_path / 'nowhere'}", 8)
    with pytest.raises(BadInput, match="there is no source"):
        open_stream(str(tmp_path / "nowhere"), 8)
