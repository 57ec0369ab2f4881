"""Estimates of memory against what processes take; what does not fit is refused before any work."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from byov._core import memory
from byov._core.errors import BadInput
from byov.config import Config, Model, Optim, read_config, read_recipe
from byov.inference.estimate import estimate_export, estimate_use
from byov.training import estimate
from byov.training.prepare import plan, prepare
from byov.training.resolve import resolve
from commands import SMALL, run

FACTOR = 2  # between estimate and measurement, either way
MEASURED = """
import atexit, sys
import torch
from byov.cli.main import main
from byov.training.monitors import peak_memory_mib  # of this process; getrusage would count the one that started it
atexit.register(lambda: print("peak", int(2**20 * peak_memory_mib(torch.device("cpu")))))
main(sys.argv[1:])
"""
WIDE = ["--model.width", "384", "--model.depth", "4", "--model.heads", "6", "--image-size", "16"]
SIZES = {
    "small": ["--images", "64", "--optim.batch-size", "32"],
    "many weights": [*WIDE, "--images", "16", "--optim.batch-size", "8"],
    "a large batch": [
        "--model.backbone",
        "resnet-18",
        "--image-size",
        "32",
        "--images",
        "48",
        "--optim.batch-size",
        "48",
    ],
    "byol": ["--method", "byol", *WIDE, "--images", "16", "--optim.batch-size", "8"],
}


@pytest.mark.parametrize("size", SIZES)
def test_the_memory_of_training_is_estimated_within_the_factor(tmp_path: Path, size: str) -> None:
    arguments = [
        "train",
        "digits",
        *SIZES[size],
        "--optim.epochs",
        "1",
        "--threads",
        "1",
        "--out",
        str(tmp_path / "run"),
    ]
    told = subprocess.run([sys.executable, "-c", MEASURED, *arguments], capture_output=True, text=True, check=True)
    peak = int(told.stdout.split()[-1])
    config = read_config(tmp_path / "run" / "config.yaml")
    found = estimate.training(config, (1, 8, 8), 1442, in_memory=True).memory
    assert peak / FACTOR < found < peak * FACTOR, f"{found / peak:.2f}"


def test_the_size_of_a_network_is_known_without_building_it() -> None:
    def size(**changes: object) -> estimate.NetworkSize:
        config = resolve(Config(calibration=0, **changes), (3, 32, 32), 1000, flips=True)
        return estimate.network_size(config, (3, 32, 32))

    micro, deep = size(), size(model=Model(depth=8))
    assert deep.weights > 1.5 * micro.weights and deep.stored > 1.5 * micro.stored
    assert micro.features == 128 and micro.largest > 0
    assert size(method="posthoc", init="x").weights < micro.weights  # no heads


def photos(folder: Path, count: int) -> str:
    folder.mkdir()
    for i in range(count):
        pixels = np.random.default_rng(i).integers(0, 256, (24, 24, 3), np.uint8)
        Image.fromarray(pixels).save(folder / f"{i}.png")
    return f"folder:{folder}"


def test_a_recipe_for_clusters_is_refused_before_anything_is_decoded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "available", lambda: 12 << 30)
    config = replace(read_recipe("imagenet-vit-b16-byov"), data=photos(tmp_path / "photos", 300))
    monkeypatch.setattr("byov.data.image_folder.read_cached", None)
    with pytest.raises(
        BadInput, match=r"this takes about [\d.]+ GiB of memory, and [\d.]+ GiB are there: use a smaller"
    ):
        prepare(config, tmp_path / "run")
    with pytest.raises(BadInput, match="this takes about"):
        plan(config)
    assert not (tmp_path / "run").exists()


def test_a_plan_neither_decodes_nor_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("byov.data.image_folder.read_cached", None)
    small = Config(data=photos(tmp_path / "photos", 30), image_size=32, optim=Optim(epochs=10, batch_size=8))
    found = plan(small)
    assert found.seconds is not None and found.seconds > 0
    assert plan(replace(small, optim=Optim(epochs=1000, batch_size=8))).seconds > found.seconds
    assert plan(replace(small, image_size=64)).disk > found.disk


def test_what_is_unknown_is_not_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available", lambda: None)
    estimate.Estimate(1e18, 0).check("no way")


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(5, "a minute or less"), (600, "10 minutes"), (36_000, "10 hours"), (864_000, "10 days")],
)
def test_durations_in_words(seconds: float, words: str) -> None:
    assert words in estimate.duration(seconds)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("estimate") / "run"
    assert run("train", "digits", "--out", out, *SMALL) == 0
    return out


def test_every_long_command_has_a_dry_run(tmp_path: Path, trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = sorted(path for path in trained.rglob("*"))
    for arguments in (
        ("train", "digits", "--out", tmp_path / "new"),
        ("train", "--out", trained, "--resume"),
        ("evaluate", trained, "--draws", 8),
        ("score", trained, "digits", "--out", tmp_path / "odd.csv"),
        ("prune", trained, "--by", "snr", "--sparsity", 0.5, "--out", tmp_path / "pruned"),
        ("export", trained, "--format", "safetensors"),
        ("study", "table1", "--out", tmp_path / "studies"),
    ):
        capsys.readouterr()
        assert run(*arguments, "--dry-run") == 0
        printed = capsys.readouterr().out
        assert "estimate: " in printed and "of memory" in printed and "on this machine" in printed, arguments
    assert sorted(path for path in trained.rglob("*")) == before and not list(tmp_path.iterdir())


def test_more_images_take_longer(tmp_path: Path, trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(estimate, "seconds_per_image", lambda config, shape: 1e-3)
    few, many = (estimate_use(trained, photos(tmp_path / f"{n}", n)[7:], 1) for n in (10, 40))
    assert many.seconds > few.seconds and many.disk > few.disk
    assert estimate_export(trained, posterior=True).disk == 2 * estimate_export(trained, posterior=False).disk
    with pytest.raises(BadInput, match="there is no run"):
        estimate_use(tmp_path / "none", None, 1)
