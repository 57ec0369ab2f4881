"""A posterior without training: noise around given weights, as wide as neighbourhoods allow."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import byov
from byov._core.errors import BadInput
from byov.backbones import build_encoder
from byov.backbones.resnet import ResNet
from byov.cli.main import main
from byov.config import Config, Model, Monitor
from byov.config import Posterior as PosteriorConfig
from byov.inference.run import load
from byov.posterior import Posterior
from byov.scoring import posthoc
from byov.scoring.posthoc import WIDEST, Neighbourhoods, bisect, fit_posthoc
from byov.training.loop import Trainer
from byov.training.prepare import prepare

MODEL = Model(width=16, depth=2, heads=2, patch=2)
STEPS = 12


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The state dict of a small ViT, as another program may have left it."""
    torch.manual_seed(3)
    path = tmp_path_factory.mktemp("weights") / "vit.pt"
    torch.save(build_encoder(MODEL, (1, 8, 8)).backbone.state_dict(), path)
    return path


def prepared(folder: Path, weights: Path, model: Model = MODEL, **posterior: object) -> Trainer:
    """A posthoc run on digits, not fitted yet."""
    config = Config(
        method="posthoc",
        init=str(weights),
        images=200,
        threads=1,
        device="cpu",
        model=model,
        posterior=PosteriorConfig(**posterior),  # type: ignore[arg-type]
        monitor=Monitor(tensorboard=False),
    )
    return prepare(config, folder, say=lambda text: None)


# -------------------------------------------------------------------------------------------------------- the bisection


@pytest.mark.parametrize("c", [0.002, 0.03, 0.5])
def test_bisection_finds_where_a_known_function_comes_down_to_the_level(c: float) -> None:
    reported: list[int] = []
    found = bisect(lambda x: 1 / (1 + x / c), 0.5, STEPS, reported.append)
    low, high = map(math.log, WIDEST)
    assert abs(math.log(found.c / c)) <= (high - low) / 2 ** (STEPS + 1)
    assert found.overlap == pytest.approx(0.5, abs=0.01) and reported == list(range(1, STEPS + 1))


@pytest.mark.parametrize(("overlap", "end"), [(1.0, WIDEST[1]), (0.0, WIDEST[0])])
def test_a_level_that_is_never_met_ends_at_an_edge(overlap: float, end: float) -> None:
    found = bisect(lambda c: overlap, 0.5, STEPS, lambda done: None)
    assert found.c == pytest.approx(end, rel=0.01) and found.overlap == overlap


def test_overlap_falls_with_the_noise_and_is_1_without() -> None:
    torch.manual_seed(0)
    encoder = Posterior(build_encoder(MODEL, (1, 8, 8)).eval())
    images = torch.randint(0, 256, (120, 1, 8, 8), dtype=torch.uint8)
    where = Neighbourhoods(encoder, images, seed=0)
    assert where.count == 10
    scales = posthoc._scales(encoder, images, "rms", 0.5, 0, lambda what, done, total: None)
    found = []
    for c in (0.001, 0.03, 0.1, 0.3, 1.0):
        posthoc._spread(encoder, scales, c)
        found.append(where.overlap())
        assert where.overlap() == found[-1]  # the same noise at every call
    assert found == sorted(found, reverse=True) and found[0] > 0.95 and found[-1] < 0.6
    posthoc._spread(encoder, [0.0] * len(scales), 1.0)
    assert where.overlap() == 1.0 and not encoder.sigma.any()


@pytest.mark.parametrize("how", ["std", "rms"])
def test_scales_are_the_size_of_each_tensor(how: str) -> None:
    torch.manual_seed(0)
    encoder = Posterior(build_encoder(MODEL, (1, 8, 8)).eval())
    scales = posthoc._scales(encoder, torch.empty(0), how, 0.5, 0, lambda what, done, total: None)
    posthoc._spread(encoder, scales, 0.25)
    sigma = encoder.segments.named(encoder.sigma)
    for name, mean in encoder.segments.named(encoder.means.detach()).items():
        root = max(float(mean.double().std(correction=0) if how == "std" else mean.square().mean().sqrt()), 1e-8)
        torch.testing.assert_close(sigma[name], torch.full_like(mean, 0.25 * root), rtol=1e-4, atol=0)


# -------------------------------------------------------------------------------------------------------------- the run


@pytest.mark.parametrize(("scales", "level"), [("std", 0.7), ("rms", 0.6), ("rms", 0.8), ("tensors", 0.7)])
def test_the_level_is_reached(tmp_path: Path, weights: Path, scales: str, level: float) -> None:
    trainer = prepared(tmp_path / "run", weights, scales=scales, overlap=level)
    posterior = trainer.learner.posterior
    means = posterior.means.detach().clone()
    reported: list[str] = []
    fitted = fit_posthoc(trainer, lambda what, done, total: reported.append(what))
    assert fitted.overlap == pytest.approx(level, abs=0.05) and WIDEST[0] < fitted.c < WIDEST[1]
    assert torch.equal(posterior.means, means) and posterior.log_variances.isfinite().all()
    assert ("one tensor at a time" in reported) == (scales == "tensors") and "fitting sigma" in reported
    summary = trainer.finish(1.0)
    run = load(tmp_path / "run")
    assert run.step == trainer.total == 1 and summary["random_weights"] == means.numel()
    # what is saved is what was fitted: the overlap, measured again on the run that is loaded
    reference = run.encoder, trainer.data.images[torch.tensor(_reference(run.folder))], run.config.seed
    assert Neighbourhoods(*reference).overlap() == pytest.approx(fitted.overlap, abs=1e-3)


def _reference(folder: Path) -> list[int]:
    return json.loads((folder / "reference" / "images.json").read_text())["bank"]  # type: ignore[no-any-return]


def test_frozen_weights_have_no_noise(tmp_path: Path, weights: Path) -> None:
    trainer = prepared(tmp_path / "run", weights, replace(MODEL, frozen_until="blocks.0"))
    fit_posthoc(trainer)
    trainer.finish(1.0)
    run = load(tmp_path / "run")
    random = {segment.name for segment in run.encoder.segments}
    assert random and all(name.startswith(("backbone.blocks.1.", "backbone.norm.")) for name in random)
    images, trunks, features = torch.rand(4, 1, 8, 8), [], []
    given = torch.load(weights, weights_only=True)
    for seed in (1, 2):
        with torch.no_grad(), run.encoder.sampled(torch.Generator().manual_seed(seed)):
            assert torch.equal(run.encoder.module.backbone.stem.weight, given["stem.weight"])
            trunks.append(run.encoder.module.trunk(images))
            features.append(run.encoder(images))
    assert torch.equal(*trunks) and not torch.allclose(*features)


def test_a_run_that_trains_nothing_cannot_be_trained(tmp_path: Path, weights: Path) -> None:
    trainer = prepared(tmp_path / "run", weights)
    assert trainer.total == 1
    with pytest.raises(BadInput, match="no loss to train on: use --method byov"):
        trainer.run()


# ----------------------------------------------------------------------------------------------------- the command line


def test_from_a_state_dict_to_scores(tmp_path: Path) -> None:
    """`byov train --method posthoc --init FILE`, then `byov score`, in separate processes."""
    noise = np.random.default_rng(0)
    (tmp_path / "photos").mkdir()
    for i in range(60):
        coarse = Image.fromarray(noise.integers(0, 256, (4, 4, 3), dtype=np.uint8))
        coarse.resize((24, 24), Image.Resampling.BICUBIC).save(tmp_path / "photos" / f"{i:02d}.png")
    torch.manual_seed(0)
    torch.save(ResNet("18", width=4, stem="cifar").state_dict(), tmp_path / "weights.pth")

    def command(*arguments: object) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [sys.executable, "-m", "byov", *map(str, arguments), "--threads", "1"],
            capture_output=True,
            text=True,
            env=os.environ | {"BYOV_DATA": str(tmp_path / "data")},
        )
        assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
        return done

    run, table = tmp_path / "run", tmp_path / "odd.csv"
    network = ("--init", tmp_path / "weights.pth", "--model.backbone", "resnet-18", "--model.width", 4)
    data = ("--data", f"folder:{tmp_path / 'photos'}", "--image-size", 16)
    done = command("train", "--method", "posthoc", *network, *data, "--posterior.overlap", 0.5, "--out", run)
    assert "posthoc on " in done.stderr and "nothing is trained" in done.stderr and "overlap 0.5" in done.stderr
    printed = dict(line.split(maxsplit=1) for line in done.stdout.splitlines())
    assert float(printed["overlap"]) == pytest.approx(0.5, abs=0.06) and float(printed["noise"]) > 0
    done = command("score", run, tmp_path / "photos", "--out", table, "--no-page", "--draws", 3)
    rows = table.read_text().splitlines()
    assert rows[0].startswith("path,oddness,") and len(rows) == 61
    assert len({row.split(",")[3] for row in rows}) > 10  # draws disagree, about some images more
    opened = byov.load(run)
    state = torch.load(tmp_path / "weights.pth", weights_only=True)
    torch.testing.assert_close(opened.encoder.module.backbone.conv1.weight.detach(), state["conv1.weight"])


@pytest.mark.parametrize("recipe", [[], ["digits"]])
def test_without_weights_it_is_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], recipe: list[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["train", *recipe, "--data", "digits", "--method", "posthoc", "--out", str(tmp_path / "run")])
    said = capsys.readouterr().err
    assert stop.value.code == 2 and said.count("\n") == 1
    assert "posthoc puts noise around given weights: give them with --init" in said
    assert not (tmp_path / "run").exists()
