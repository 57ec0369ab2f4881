"""A pruned run: a run like any other, and an honest account of what it cost."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import byov
from byov._core import cache, files
from byov._core.errors import BadInput
from byov._core.files import without_prefix
from byov.config import Config, Model, Monitor, Optim, Posterior, read_config
from byov.data.sources import open_source
from byov.evaluation.evaluate import evaluate
from byov.evaluation.probe import fit_probe
from byov.inference.run import features_of
from byov.metrics import top_k_accuracy
from byov.pruning.criteria import Pruning
from byov.pruning.prune import encoder_masks, encoder_of, prune
from byov.pruning.structured import compact
from byov.report.page import write_report
from byov.report.plots.run_figures import draw_pruning
from byov.runs import checkpoints
from byov.training.loop import Interrupted, subset
from byov.training.prepare import prepare

SMALL = Config(
    images=64,
    threads=1,
    device="cpu",
    model=Model(width=16, depth=1, heads=2, head_hidden=16, head_output=8),
    optim=Optim(epochs=1, batch_size=16),
    monitor=Monitor(tensorboard=False),
)
LAST = Path("checkpoints") / "last.safetensors"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("runs") / "byov"
    prepare(SMALL, folder).run()
    return byov.load(folder)


def masks_of(folder: Path) -> dict[str, torch.Tensor]:
    return without_prefix(checkpoints.load(folder / LAST)[0], "mask.")


def zeros(run) -> float:
    values = [
        m
        for s, m in zip(run.encoder.segments, run.encoder.segments.views(run.encoder.means), strict=True)
        if s.kind == "weight"
    ]
    return float(torch.cat([v.flatten() for v in values]).eq(0).float().mean())


def test_a_pruned_run_is_a_run_like_any_other(run, tmp_path: Path) -> None:
    out = tmp_path / "pruned"
    results = prune(run, out, Pruning("snr", 0.6), curve=(0.3,))
    assert json.loads((out / "results" / "pruning.json").read_text()) == json.loads(json.dumps(results))
    opened = byov.load(out)
    assert zeros(opened) == pytest.approx(0.6, abs=0.01) and zeros(run) == 0
    with opened.encoder.sampled(torch.Generator().manual_seed(0)):
        for name, mask in encoder_masks(masks_of(out)).items():
            owner, _, attribute = name.rpartition(".")
            drawn = getattr(opened.encoder.module.get_submodule(owner), attribute)
            assert torch.equal(drawn != 0, mask)
    assert evaluate(opened)["top1"] == results["refitted.top1"]
    assert not (out / "reference" / "draws").exists() and read_config(out / "config.yaml") == run.config
    write_report([out], tmp_path / "page.html")
    summary, sigma = json.loads((out / "summary.json").read_text()), opened.learner.posterior.sigma
    assert summary["random_weights"] == int((sigma > 0).sum()) < sigma.numel()
    assert summary["median_sigma"] == pytest.approx(float(sigma[sigma > 0].median()))
    longer = prepare(read_config(out / "config.yaml"), out, extend=1)
    longer.run()
    assert zeros(byov.load(out)) == zeros(opened) and longer.step == 2 * run.step
    assert draw_pruning(results, tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")


def test_the_curve_is_the_probes_own(run, tmp_path: Path) -> None:
    """The unpruned probe on pruned features, done by hand."""
    results = prune(run, tmp_path / "pruned", Pruning("magnitude", 0.5, "global"), curve=(0.25,))
    assert [row["sparsity"] for row in results["curve"]] == pytest.approx([0, 0.25, 0.5], abs=1e-3)
    source = open_source("digits")
    train, test = subset(source.load("train"), 64), source.load("test")
    plain = run.encoder.unwrapped()
    probe = fit_probe(features_of(plain, train.images), train.labels, classes=10)
    weights = [p for name, p in plain.named_parameters() if name.endswith("weight") and "norm" not in name]
    threshold = torch.cat([w.detach().abs().flatten() for w in weights]).quantile(0.5)
    before = features_of(plain, test.images)
    with torch.no_grad():
        for w in weights:
            w.mul_(w.abs() > threshold)
    after = features_of(plain, test.images)
    last = results["curve"][-1]
    assert last["top1"] == top_k_accuracy(probe.probabilities(after), test.labels, 1) == results["top1"]
    cosine = torch.nn.functional.cosine_similarity(after.double(), before.double()).mean()
    assert last["cosine"] == pytest.approx(float(cosine), abs=1e-6)
    first = results["curve"][0]
    assert first["top1"] == first["refitted.top1"] and first["cosine"] == pytest.approx(1)
    assert sum(row["pruned"] for row in results["layers"]) == round(0.5 * sum(w.numel() for w in weights))
    assert results["bytes"]["pruned"] == results["bytes"]["unpruned"] and "not faster" in results["note"]
    assert results["bytes"]["pruned_compressed"] < 0.75 * results["bytes"]["unpruned_compressed"]


def test_rounds_of_pruning_and_training(run, tmp_path: Path) -> None:
    out = tmp_path / "pruned"
    seen = []

    def train(trainer) -> None:
        before = masks_of(out)
        trainer.run()
        assert all(torch.equal(before[name], mask) for name, mask in masks_of(out).items())
        seen.append(zeros(byov.load(out)))

    results = prune(run, out, Pruning("snr", 0.75, rounds=2, epochs=1), curve=(), train=train)
    assert seen == pytest.approx([0.5, 0.75], abs=0.01)
    assert [row["sparsity"] for row in results["rounds"]] == pytest.approx([0.5, 0.75], abs=0.01)
    assert byov.load(out).step == run.step and results["top1"] == results["rounds"][-1]["top1"]
    with pytest.raises(BadInput, match="75% of these weights pruned already"):
        prune(byov.load(out), tmp_path / "less", Pruning("snr", 0.7))
    more = prune(byov.load(out), tmp_path / "more", Pruning("magnitude", 0.9), curve=(0.5,))
    assert [row["sparsity"] for row in more["curve"]] == pytest.approx([0.75, 0.9], abs=0.01)


def test_whole_units_make_a_smaller_encoder(run, tmp_path: Path) -> None:
    out = tmp_path / "pruned"
    results = prune(run, out, Pruning("snr", 0.5, structured=True), curve=())
    opened = byov.load(out)
    smaller = compact(encoder_of(opened), encoder_masks(masks_of(out)))
    images = open_source("digits").load("test").images[:20]
    torch.testing.assert_close(features_of(smaller, images), opened.features(images), rtol=1e-4, atol=1e-5)
    assert results["weights"]["pruned"] == sum(p.numel() for p in smaller.parameters()) < results["weights"]["unpruned"]
    assert results["bytes"]["pruned"] < results["bytes"]["unpruned"] and "smaller dense" in results["note"]
    assert {row["sparsity"] for row in results["layers"] if "mlp" in row["layer"]} == {0.5}


def test_a_deterministic_run(run, tmp_path: Path) -> None:
    prepare(replace(SMALL, method="byol", posterior=Posterior(where="none")), tmp_path / "byol").run()
    plain = byov.load(tmp_path / "byol")
    with pytest.raises(BadInput, match="--by magnitude"):
        prune(plain, tmp_path / "no", Pruning("snr", 0.5))
    assert not (tmp_path / "no").exists()
    results = prune(plain, tmp_path / "pruned", Pruning("magnitude", 0.5, part="all", epochs=1), curve=())
    assert any(row["layer"].startswith("predictor") for row in results["layers"])
    tensors, _ = checkpoints.load(tmp_path / "pruned" / LAST)
    for name, mask in masks_of(tmp_path / "pruned").items():
        assert torch.equal(tensors[f"student.other.{name}"] != 0, mask)


def test_without_labels_features_are_compared(run, tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (30, 8, 8), dtype=np.uint8)
    np.savez(tmp_path / "x.npz", x_train=pixels)
    results = prune(run, tmp_path / "pruned", Pruning("random", 0.5), f"npz:{tmp_path / 'x.npz'}", curve=(0.9,))
    cosines = [row["cosine"] for row in results["curve"]]
    assert cosines[0] == pytest.approx(1) and cosines[0] > cosines[1] > cosines[2] and "top1" not in results
    assert draw_pruning(results, tmp_path / "f.png").is_file()


def test_labels_that_are_all_the_same_are_none(run, tmp_path: Path) -> None:
    images = {f"x_{split}": open_source("digits").load("test").images[:30, 0].numpy() for split in ("train", "test")}
    np.savez(tmp_path / "x.npz", **images, y_train=np.zeros(30, int), y_test=np.zeros(30, int))
    found = prune(run, tmp_path / "run", Pruning("magnitude", 0.5), f"npz:{tmp_path / 'x.npz'}", curve=())
    assert 0 < found["cosine"] < 1 and "top1" not in found


def test_what_is_there_is_not_overwritten(run, tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "file").touch()
    with pytest.raises(BadInput, match="exists already"):
        prune(run, tmp_path / "there", Pruning("snr", 0.5))
    with pytest.raises(BadInput, match="--curve"):
        prune(run, tmp_path / "other", Pruning("snr", 0.5), curve=(1.0,))
    assert [p.name for p in tmp_path.iterdir()] == ["there"]


def test_rounds_that_were_stopped_go_on(run, tmp_path: Path) -> None:
    how = Pruning("snr", 0.8, rounds=3, epochs=1)
    whole = prune(run, tmp_path / "whole", how, curve=())
    out, rounds = tmp_path / "stopped", iter(range(3))

    def stop_in_the_second(trainer) -> None:
        if next(rounds) == 1:
            trainer._advance()
            trainer.save()
            raise Interrupted("SIGINT")
        trainer.run()

    with pytest.raises(Interrupted):
        prune(run, out, how, curve=(), train=stop_in_the_second)
    assert not (out / "results" / "pruning.json").exists()
    with pytest.raises(BadInput, match="stopped pruning with other settings"):
        prune(run, out, replace(how, sparsity=0.9), curve=())
    found = prune(run, out, how, curve=())
    assert [row["sparsity"] for row in found["rounds"]] == [row["sparsity"] for row in whole["rounds"]]
    assert found["top1"] == whole["top1"] and found["settings"] == whole["settings"]
    one, other = (checkpoints.load(folder / LAST)[0] for folder in (tmp_path / "whole", out))
    assert all(torch.equal(one[name], other[name]) for name in one)
    with pytest.raises(BadInput, match="exists already"):
        prune(run, out, how, curve=())


@pytest.mark.parametrize("rounds", [0, 2])
def test_a_stop_anywhere_can_be_repeated(run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rounds: int) -> None:
    """The call is stopped just before and just after each file it writes; the same call then goes on to the end."""
    how = Pruning("snr", 0.6, rounds=max(1, rounds), epochs=min(1, rounds))
    writes, limit = 0, 0

    class Stopped(Exception):
        pass

    def counted(write):
        def wrapped(*args, **kwargs):
            nonlocal writes
            for act in (lambda: None, lambda: write(*args, **kwargs)):
                act()
                writes += 1
                if writes == limit:
                    raise Stopped

        return wrapped

    for module, name in ((files, "write_atomically"), (checkpoints, "write_atomically"), (cache, "write_atomically")):
        monkeypatch.setattr(module, name, counted(getattr(module, name)))
    limit = 0
    whole = prune(run, tmp_path / "whole", how, curve=(), draw=lambda results: files.write_text(tmp_path / "a", "a"))
    total, writes = writes, 0
    for limit in range(1, total, max(1, total // 12)):
        out, writes = tmp_path / f"{limit}", 0
        with pytest.raises(Stopped):
            prune(run, out, how, curve=(), draw=lambda results: files.write_text(tmp_path / "b", "b"))
        writes = -(10**9)
        assert prune(run, out, how, curve=())["settings"] == whole["settings"]
        one, other = (checkpoints.load(folder / LAST)[0] for folder in (tmp_path / "whole", out))
        assert all(torch.equal(one[name], other[name]) for name in one)
        assert not [*tmp_path.rglob("*.tmp"), *tmp_path.rglob("*.lock"), *out.rglob("*partial*")]


def test_images_of_other_channels_are_converted(run, tmp_path: Path) -> None:
    colour = np.random.default_rng(0).integers(0, 256, (40, 8, 8, 3), dtype=np.uint8)
    labels = np.arange(40) % 4
    np.savez(tmp_path / "colour.npz", x_train=colour, y_train=labels, x_test=colour, y_test=labels)
    found = prune(run, tmp_path / "out", Pruning("snr", 0.5), data=f"npz:{tmp_path / 'colour.npz'}", curve=())
    assert 0 <= found["refitted.top1"] <= 1
