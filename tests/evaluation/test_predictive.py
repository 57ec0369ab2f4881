"""The posterior predictive: closed forms, alignment, the same draws whatever the batches, resumed and shared."""

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

import handmade
from byov._core.errors import BadInput
from byov.evaluation import predictive
from byov.evaluation.predictive import predict_classes, predict_levels
from byov.evaluation.probe import Probe
from byov.inference.run import ReferenceSet, Run, at_draw, features_of
from byov.metrics.over_draws import Predictive
from byov.training.distributed.processes import Processes

IMAGES = handmade.images(9, seed=1)


def probe(width: int, classes: int = 3) -> Probe:
    g = torch.Generator().manual_seed(2)
    weights = torch.randn(classes, width, generator=g).double()
    return Probe(
        weights, torch.zeros(classes).double(), torch.zeros(width).double(), torch.ones(width).double(), 0, 0, True
    )


@pytest.fixture
def affine(tmp_path: Path) -> Run:
    torch.manual_seed(0)
    return handmade.run(tmp_path / "run", handmade.Affine(6))


# -------------------------------------------------------------------------------------------------------- closed forms


def test_mean_and_variance_of_a_linear_posterior(tmp_path: Path) -> None:
    """Outputs are N(mean, sigma^2 (|x|^2 + 1)), independent over features, so the sampling errors are known."""
    run, draws = handmade.student_run(tmp_path / "run"), 300
    level = predict_levels(ReferenceSet(run), IMAGES, draws)["encoder"].raw
    expected = features_of(run.encoder, IMAGES).double()
    variance = 0.05**2 * (handmade.pixels(IMAGES).double().square().sum(1) + 1)
    assert level.draws == draws
    assert float(((level.mean - expected).abs() / (variance[:, None] / draws).sqrt()).max()) < 4.5
    error = (2 / ((draws - 1) * level.mean.shape[1])) ** 0.5  # of a mean over features of sample variances, relative
    assert float((level.variance.mean(1) / variance - 1).abs().max()) < 4.5 * error


def test_alignment_leaves_nothing_of_shifts_and_stretches(tmp_path: Path) -> None:
    torch.manual_seed(0)
    run = handmade.run(tmp_path / "run", handmade.ShiftedAndStretched(6), sigma=0.2)
    found = predict_classes(ReferenceSet(run), probe(6), IMAGES, 5)
    at_means = probe(6).probabilities(run.features(IMAGES)).double()
    torch.testing.assert_close(found.aligned.mean, at_means, rtol=0, atol=1e-5)
    assert float(found.aligned.std.max()) < 1e-5 < 1e-2 < float(found.unaligned.std.max())


def test_levels_equal_the_network_at_each_draw(tmp_path: Path) -> None:
    """BatchNorm uses its running statistics: an image's outputs do not depend on the rest of its batch."""
    run = handmade.student_run(tmp_path / "run")
    bank = ReferenceSet(run)
    levels = predict_levels(bank, IMAGES, 4, batch_size=2)
    raw: list[list[Tensor]] = []
    moved: list[list[Tensor]] = []
    network = run.learner.posterior.eval()
    with torch.no_grad():
        reference = [(o.mean(0), o.std(0, correction=0)) for o in network(bank.images)]
        for k in range(4):
            with at_draw(network, 0, k):
                outputs, of = network(IMAGES), network(bank.images)
            raw.append(list(outputs))
            moved.append(
                [
                    (o - b.mean(0)) / b.std(0, correction=0) * s + m
                    for o, b, (m, s) in zip(outputs, of, reference, strict=True)
                ]
            )
    for i, name in enumerate(("encoder", "projector", "predictor")):
        for found, each in ((levels[name].raw, raw), (levels[name].aligned, moved)):
            together = torch.stack([outputs[i] for outputs in each]).double()
            torch.testing.assert_close(found.mean, together.mean(0), rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(found.variance, together.var(0), rtol=1e-4, atol=1e-6)


def test_class_probabilities_equal_a_plain_loop(affine: Run) -> None:
    bank = ReferenceSet(affine)
    found = predict_classes(bank, probe(6), IMAGES, 4)
    plain = [Predictive(9, 3), Predictive(9, 3)]
    for k in range(4):
        with at_draw(affine.encoder, 0, k):
            features = affine.encoder(IMAGES)
        plain[0].update(probe(6).probabilities(bank.aligned(features, k)))
        plain[1].update(probe(6).probabilities(features))
    for ours, theirs in zip((found.aligned, found.unaligned), plain, strict=True):
        assert ours.draws == 4
        for key, value in theirs.state().items():
            torch.testing.assert_close(ours.state()[key], value, rtol=1e-6, atol=1e-8)


# ------------------------------------------------------------------------------------- the same draws whatever happens


def test_batches_chunks_and_the_number_of_draws_change_nothing(affine: Run) -> None:
    bank = ReferenceSet(affine)
    whole = predict_classes(bank, probe(6), IMAGES, 3).aligned
    for batch_size in (1, 4):
        torch.testing.assert_close(
            predict_classes(bank, probe(6), IMAGES, 3, batch_size=batch_size).aligned.mean,
            whole.mean,
            rtol=0,
            atol=1e-5,
        )
    chunks = [predict_classes(bank, probe(6), chunk, 3).aligned for chunk in torch.split(IMAGES, 5)]
    torch.testing.assert_close(torch.cat([chunk.mean for chunk in chunks]), whole.mean, rtol=0, atol=1e-5)
    more = predict_classes(bank, probe(6), IMAGES, 4).aligned
    with at_draw(affine.encoder, 0, 3):
        fourth = probe(6).probabilities(bank.aligned(affine.encoder(IMAGES), 3)).double()
    torch.testing.assert_close(more.mean, (3 * whole.mean + fourth) / 4, rtol=0, atol=1e-5)


def test_pixels_in_0_to_1_and_other_sides_are_taken(affine: Run) -> None:
    bank = ReferenceSet(affine)
    whole = predict_classes(bank, probe(6), IMAGES, 2).aligned.mean
    scaled = predict_classes(bank, probe(6), IMAGES.float() / 255, 2).aligned.mean
    torch.testing.assert_close(scaled, whole, rtol=0, atol=1e-5)
    large = IMAGES.repeat_interleave(2, 2).repeat_interleave(2, 3)
    assert predict_classes(bank, probe(6), large, 2).aligned.mean.shape == whole.shape
    with pytest.raises(BadInput, match="shape"):
        predict_classes(bank, probe(6), torch.zeros(2, 3, 4, 4), 2)
    with pytest.raises(BadInput, match="at least 1"):
        predict_classes(bank, probe(6), IMAGES, 0)


class PlugPulled(Exception):
    pass


def stopped(at: int) -> Callable[[str, int, int], None]:
    def progress(what: str, done: int, total: int) -> None:
        if done > at * len(IMAGES):
            raise PlugPulled

    return progress


def test_stopped_work_goes_on(affine: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(predictive, "SAVE_SECONDS", 0.0)
    bank, partial = ReferenceSet(affine), affine.folder / "results" / "partial"
    work: list[Callable[..., Any]] = [
        lambda **how: predict_classes(bank, probe(6), IMAGES, 5, **how).aligned,
        lambda **how: (
            predict_levels(ReferenceSet(handmade.student_run(affine.folder)), IMAGES, 5, **how)["predictor"].aligned
        ),
    ]
    for each in work:
        whole = each()
        with pytest.raises(PlugPulled):
            each(resumable=True, progress=stopped(3))
        assert len(list(partial.iterdir())) == 1
        counted: list[int] = []
        again = each(resumable=True, progress=lambda what, done, total, counted=counted: counted.append(done))
        assert counted == [4 * len(IMAGES), 5 * len(IMAGES)], "three draws were done already"
        assert again.draws == 5 and torch.equal(again.mean, whole.mean) and torch.equal(again.squares, whole.squares)
        assert not partial.exists(), "what was saved is removed at the end"


def test_stopped_work_is_not_mixed_with_other_work(affine: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(predictive, "SAVE_SECONDS", 0.0)
    bank = ReferenceSet(affine)
    with pytest.raises(PlugPulled):
        predict_classes(bank, probe(6), IMAGES, 5, resumable=True, progress=stopped(3))
    others = handmade.images(9, seed=5)
    alone = predict_classes(bank, probe(6), others, 5).aligned.mean
    assert torch.equal(predict_classes(bank, probe(6), others, 5, resumable=True).aligned.mean, alone)
    fewer = predict_classes(bank, probe(6), IMAGES, 2, resumable=True).aligned  # than were done before
    assert fewer.draws == 2 and torch.equal(fewer.mean, predict_classes(bank, probe(6), IMAGES, 2).aligned.mean)


# ----------------------------------------------------------------------------------------------- parts and processes


def _work(run: Run, draws: int) -> list[dict[str, Tensor]]:
    bank = ReferenceSet(run)
    classes = predict_classes(bank, probe(6), IMAGES, draws, resumable=True)
    levels = predict_levels(bank, IMAGES, draws)
    return [a.state() for a in (classes.aligned, classes.unaligned, *levels["projector"])]


def _worker(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    run = replace(handmade.student_run(folder / f"run{rank}"), folder=folder / "run", processes=Processes(rank, 2))
    torch.save([_work(run, draws) for draws in (5, 1)], folder / f"{rank}.pt")
    dist.destroy_process_group()
    os._exit(0)  # a thread of gloo may still hold a tensor, and a Python closing down then aborts


def test_two_processes_equal_one(tmp_path: Path) -> None:
    """Also where there are fewer draws than processes."""
    torch.set_num_threads(1)  # as in each of the two: rounding depends on it
    run = handmade.student_run(tmp_path / "run")
    mp.spawn(_worker, (tmp_path,), nprocs=2)
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    for draws, ours, theirs in zip((5, 1), first, second, strict=True):
        one = _work(run, draws)
        for a, b, whole in zip(ours, theirs, one, strict=True):
            for key, value in whole.items():
                torch.testing.assert_close(a[key], value, rtol=1e-10, atol=1e-10)
                assert torch.equal(a[key], b[key])
    assert not (tmp_path / "run" / "results" / "partial").exists()
