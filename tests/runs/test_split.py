"""Which images are trained on, which are the reference set, and which the calibration set."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import tiny
from byov._core.errors import BadInput
from byov._core.randomness import RandomStream
from byov.config import Config, Model, Monitor, Optim, read_config
from byov.data.sources import open_source
from byov.data.transforms import resized
from byov.runs import split
from byov.runs.folder import RunFolder
from byov.runs.split import BANK, divide, read_pixels, write_pixels
from byov.training.loop import Trainer, subset
from byov.training.prepare import pixel_statistics, prepare
from byov.training.resolve import resolve

SMALL = Config(
    threads=1,
    device="cpu",
    model=Model(width=16, depth=1, heads=2, head_hidden=16, head_output=8),
    optim=Optim(epochs=1, batch_size=64),
    monitor=Monitor(tensorboard=False, checkpoint_steps=7, knn_every=0),
)


@given(total=st.integers(2, 3 * BANK), data=st.data())
def test_a_division(total: int, data: st.DataObject) -> None:
    calibration = data.draw(st.integers(0, total - 2))
    images = data.draw(st.integers(2, total - calibration))
    trained, bank, aside = (set(part.tolist()) for part in divide(total, images, calibration))
    assert (len(trained), len(bank), len(aside)) == (images, min(images, BANK), calibration)
    assert bank <= trained and not trained & aside and trained | aside <= set(range(total))


def test_the_part_trained_on_is_the_one_it_always_was() -> None:
    data = tiny.images(30)
    assert torch.equal(subset(data, 10).images, data.images[divide(30, 10, 5).trained])
    assert set(divide(9000, 4500, 0).bank.tolist()) == set(divide(9000, 8000, 100).bank.tolist())
    assert BANK == 4000 == len(divide(9000, 4500, 0).bank)


# ----------------------------------------------------------------------------------------------------------- resolving


@pytest.mark.parametrize(
    ("total", "images", "calibration", "resolved"),
    [
        (100, None, None, (95, 5)),
        (100, None, 0, (100, 0)),
        (100, None, 30, (70, 30)),
        (100, 50, None, (50, 5)),  # from the rest
        (100, 98, None, (95, 5)),  # from the rest first
        (19, None, None, (19, 0)),
        (50_000, None, None, (49_000, 1000)),
        (50_000, 10_000, None, (10_000, 1000)),
        (100, None, 98, (2, 98)),
    ],
)
def test_what_is_set_aside(total: int, images: int | None, calibration: int | None, resolved: tuple[int, int]) -> None:
    config = resolve(Config(images=images, calibration=calibration), (1, 8, 8), total, flips=True)
    assert (config.images, config.calibration) == resolved
    assert resolve(config, (1, 8, 8), total, flips=True) == config


@pytest.mark.parametrize("calibration", [-1, 99])
def test_what_leaves_nothing_to_train_on_is_refused(calibration: int) -> None:
    with pytest.raises(BadInput, match="calibration="):
        resolve(Config(calibration=calibration), (1, 8, 8), 100, flips=True)


# ------------------------------------------------------------------------------------------------------------ training


def test_a_run_trains_on_its_part_and_says_which_images_are_what(tmp_path: Path) -> None:
    trainers = [prepare(replace(SMALL, method=m), tmp_path / m) for m in ("byov", "byol")]
    source = open_source("digits").load("train")
    parts = divide(1442, 1370, 72)
    for trainer in trainers:
        assert trainer.images == trainer.config.images == 1370 and trainer.config.calibration == 72
        batches = [batch for k in range(trainer.steps_per_epoch) for batch in trainer.batches(k)]
        ids = torch.cat([batch.ids for batch in batches])
        places = parts.trained[ids]
        assert len(set(places.tolist())) == len(ids) == 21 * 64
        assert torch.equal(torch.cat([batch.images for batch in batches]), source.images[places])
        assert torch.equal(torch.cat([batch.labels for batch in batches]), source.labels[places])
        encoder = trainer.learner.posterior.module.encoder
        pixels = source.images[parts.trained].double() / 255
        torch.testing.assert_close(encoder.pixel_mean.flatten(), pixels.mean(dim=(0, 2, 3)).float())
        told = json.loads(RunFolder(trainer.folder).reference_images.read_text())
        assert told["bank"] == parts.bank.tolist() and told["calibration"] == parts.calibration.tolist()
        assert (told["source"], told["split"], told["images"]) == ("digits", "train", 1442)
        assert told["fingerprint"] == source.fingerprint() and told["draw_key"] == [RandomStream.DRAWS, 0, "k"]
        for part in ("bank", "calibration"):
            assert torch.equal(read_pixels(trainer.folder, part), source.images[getattr(parts, part)])


def test_many_pixels_are_not_kept_and_a_damaged_file_is_as_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    images, parts = tiny.images(30).images, divide(30, 20, 5)
    write_pixels(tmp_path, images, parts, 8)
    kept = RunFolder(tmp_path).reference_pixels
    assert torch.equal(read_pixels(tmp_path, "bank"), images[parts.bank])
    kept.write_bytes(kept.read_bytes()[:40])
    assert read_pixels(tmp_path, "bank") is None
    monkeypatch.setattr(split, "MOST_PIXELS", images[:25].nbytes - 1)
    write_pixels(tmp_path, images, parts, 8)
    assert read_pixels(tmp_path, "bank") is not None and read_pixels(tmp_path, "calibration") is None
    write_pixels(tmp_path, images, parts, 4)  # a quarter of the pixels
    assert read_pixels(tmp_path, "bank") is not None and read_pixels(tmp_path, "calibration") is not None


@pytest.mark.parametrize(("side", "kept"), [(4, 4), (8, 8), (16, 8)])
def test_pixels_are_kept_at_the_networks_side_or_their_own(tmp_path: Path, side: int, kept: int) -> None:
    images, parts = tiny.images(30, channels=3).images, divide(30, 20, 5)
    write_pixels(tmp_path, images, parts, side)
    for part in ("bank", "calibration"):
        found = read_pixels(tmp_path, part)
        assert found.dtype == torch.uint8 and torch.equal(found, resized(images[getattr(parts, part)], kept))


def test_pixel_statistics_of_a_part() -> None:
    images = tiny.images(30, channels=3).images
    chosen = torch.tensor([3, 7, 20])
    torch.testing.assert_close(pixel_statistics(images, chosen), pixel_statistics(images[chosen]))


class PlugPulled(Exception):
    pass


def stopped_after(trainer: Trainer, step: int) -> None:
    def pull(at: int, row: dict[str, object]) -> None:
        if at == step:
            raise PlugPulled

    trainer.on_step = pull
    with pytest.raises(PlugPulled):
        trainer.run()


def end_of(trainer: Trainer) -> dict[str, torch.Tensor]:
    trainer.run()
    return {name: tensor.clone() for name, tensor in trainer.tensors().items()}


def test_a_run_with_images_set_aside_goes_on_exactly(tmp_path: Path) -> None:
    whole = end_of(prepare(SMALL, tmp_path / "whole"))
    stopped_after(prepare(SMALL, tmp_path / "cut"), 10)
    again = prepare(read_config(tmp_path / "cut" / "config.yaml"), tmp_path / "cut", resume=True)
    assert (again.step, again.images) == (7, 1370)
    for name, tensor in end_of(again).items():
        assert torch.equal(tensor, whole[name]), name
