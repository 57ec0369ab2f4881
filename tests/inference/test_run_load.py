"""A run opened from Python, and its first measure."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import byov
from byov._core.errors import BadInput
from byov.config import Config, Model, Monitor, Optim
from byov.data.sources import open_source
from byov.data.transforms import resized
from byov.evaluation.evaluate import evaluate
from byov.inference.run import features_of, load
from byov.runs import checkpoints
from byov.runs.folder import RunFolder
from byov.training.prepare import prepare

SMALL = Config(
    images=64,
    threads=1,
    device="cpu",
    model=Model(width=16, depth=1, heads=2, head_hidden=16, head_output=8),
    optim=Optim(epochs=1, batch_size=16),
    monitor=Monitor(tensorboard=False),
)


def trained(folder: Path, method: str) -> Path:
    prepare(replace(SMALL, method=method), folder).run()
    return folder


@pytest.fixture(scope="module", params=["byov", "byol", "supervised-bbb"])
def run(request, tmp_path_factory):
    return byov.load(trained(tmp_path_factory.mktemp("runs") / request.param, request.param))


def test_the_encoder_is_the_students(run) -> None:
    images = open_source("digits").load("test").images[:9]
    with torch.no_grad():
        expected = run.learner.posterior.module.eval().encoder(images)
    assert torch.equal(run.features(images), expected)
    random = run.config.method != "byol"
    assert (run.encoder.means.numel() > 0) == random
    student = run.learner.posterior.segments.named(run.learner.posterior.log_variances)
    for name, value in run.encoder.segments.named(run.encoder.log_variances).items():
        assert torch.equal(value, student[f"encoder.{name}"])
    if random:
        prediction = run.encoder.predict(images, draws=3, generator=torch.Generator().manual_seed(0))
        assert prediction.mean.shape == expected.shape and (prediction.std > 0).any()


def test_the_teachers_encoder(run) -> None:
    images = open_source("digits").load("test").images[:4]
    if run.config.method == "supervised-bbb":
        with pytest.raises(BadInput, match="no teacher"):
            run.teacher_encoder()
    else:
        assert not torch.equal(features_of(run.teacher_encoder(), images), run.features(images))


def test_the_untrained_encoder_is_that_of_step_zero(run, tmp_path) -> None:
    images = open_source("digits").load("test").images[:5]
    fresh = prepare(replace(SMALL, method=run.config.method), tmp_path / "fresh")
    expected = features_of(fresh.learner.posterior.module.encoder, images)
    assert torch.equal(features_of(run.untrained_encoder(), images), expected)
    assert not torch.equal(run.features(images), expected)


def test_features_do_not_depend_on_the_batch_size_and_leave_the_mode_alone(run) -> None:
    images = open_source("digits").load("test").images[:30]
    run.encoder.train()
    torch.testing.assert_close(
        features_of(run.encoder, images, batch_size=7), features_of(run.encoder, images), rtol=1e-4, atol=1e-5
    )
    assert run.encoder.training


def test_images_of_another_shape_are_refused(run) -> None:
    with pytest.raises(BadInput, match=r"\(N, 1, 8, 8\)"):
        run.check(torch.zeros(2, 3, 8, 8))
    with pytest.raises(BadInput, match=r"\(N, 1, 8, 8\)"):
        load(run.folder).features(torch.zeros(2, 3, 8, 8))


def test_a_run_scores_images_without_labels(run) -> None:
    images = open_source("digits").load("test").images[:40]
    usual, noise = run.score(images, draws=3), run.score(torch.rand(40, 1, 8, 8), draws=3)
    assert torch.equal(usual.embedding, run.features(images)) and usual.uncertainty.shape == (40,)
    assert usual.oddness.shape == (40,) and usual.oddness.dtype == usual.uncertainty.dtype == torch.float64
    for percentile in (usual.oddness_percentile, usual.uncertainty_percentile):
        assert percentile is not None and 0 <= float(percentile.min()) <= float(percentile.max()) <= 100
    assert noise.oddness_percentile.median() > usual.oddness_percentile.median()
    more = run.score(images)  # 8 draws: of the uncertainty alone
    assert torch.equal(more.oddness, usual.oddness)
    assert torch.equal(more.uncertainty, usual.uncertainty) == (run.config.method == "byol")


def test_evaluation_writes_flat_results_with_their_settings(run) -> None:
    results = evaluate(run)
    stored = json.loads((run.folder / "results" / "evaluation.json").read_text())
    assert stored == json.loads(json.dumps(results))
    for key in ("top1", "top5", "ece", "brier", "reliability", "resolution", "nll"):
        assert stored[key] >= 0 and {f"untrained.{key}", f"pixels.{key}"} <= set(stored)
    assert stored["settings"]["train_images"] == 64 and stored["settings"]["test_images"] == 355
    assert sum(row[0] for row in stored["bins"]) == 355
    assert (stored["median_sigma"] is None) == (run.config.method == "byol")
    told = []
    if run.learner.teacher is not None:
        evaluate(run, teacher=True, progress=lambda *what: told.append(what))
        assert told[-1][1:] == (355, 355)
        assert json.loads((run.folder / "results" / "evaluation.json").read_text()) == stored  # another file
        assert (run.folder / "results" / "evaluation-teacher.json").is_file()


def test_a_source_without_labels_or_of_another_shape_cannot_be_evaluated(run, tmp_path) -> None:
    pixels = np.zeros((4, 8, 8), dtype=np.uint8)
    np.savez(tmp_path / "x.npz", x_train=pixels, x_test=pixels)
    with pytest.raises(BadInput, match="no labels"):
        evaluate(run, f"npz:{tmp_path / 'x.npz'}")
    wide = np.zeros((4, 8, 9), dtype=np.uint8)
    np.savez(tmp_path / "y.npz", x_train=wide, x_test=wide, y_train=[0, 1, 0, 1], y_test=[0, 1, 0, 1])
    with pytest.raises(BadInput, match="shape"):
        evaluate(run, f"npz:{tmp_path / 'y.npz'}")


def test_images_of_another_side_are_resized(run, tmp_path) -> None:
    images = open_source("digits").load("test").images[:20]
    large = images.repeat_interleave(2, 2).repeat_interleave(2, 3)
    assert torch.equal(run.features(large), run.features(resized(large, 8)))
    labels = np.arange(20) % 2
    np.savez(tmp_path / "x.npz", x_train=large[:, 0], x_test=large[:, 0], y_train=labels, y_test=labels)
    assert evaluate(run, f"npz:{tmp_path / 'x.npz'}")["settings"]["test_images"] == 20


def test_a_network_may_see_another_side_than_the_images_have(tmp_path) -> None:
    trainer = prepare(replace(SMALL, image_size=12), tmp_path / "run")
    trainer.run()
    opened = byov.load(tmp_path / "run")
    assert opened.image_shape == (1, 12, 12) and opened.config.image_size == 12
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert 0 <= rows[-1]["knn"] <= 1
    assert 0 <= evaluate(opened)["pixels.top1"] <= 1
    resumed = prepare(replace(SMALL, image_size=12), tmp_path / "run", resume=True)
    assert resumed.step == trainer.total


def test_what_is_no_run_is_refused(tmp_path) -> None:
    with pytest.raises(BadInput, match="no run"):
        byov.load(tmp_path / "nowhere")
    with pytest.raises(BadInput, match="no checkpoint"):
        byov.load(tmp_path)


def test_the_statistics_of_batches_are_neither_used_nor_moved_by_a_call(tmp_path) -> None:
    config = replace(SMALL, model=Model(backbone="resnet-18", width=8, head_hidden=16, head_output=8))
    prepare(config, tmp_path / "run").run()
    opened = byov.load(tmp_path / "run")
    images = open_source("digits").load("test").images[:9]
    expected, teachers = opened.features(images), features_of(opened.teacher_encoder(), images)
    with torch.no_grad():
        torch.testing.assert_close(opened.encoder(images[:4]), expected[:4], rtol=1e-4, atol=1e-5)
        opened.learner.posterior(images[:4])
        opened.teacher_encoder()(images[:4])
    assert torch.equal(opened.features(images), expected)
    assert torch.equal(features_of(opened.teacher_encoder(), images), teachers)


@pytest.mark.parametrize(
    ("changes", "telling"),
    [
        ({"step": -1}, "damaged (in step)"),
        ({"step": True}, "damaged (in step)"),
        ({"image_shape": [3, 10**6, 10**6]}, "damaged (in image_shape)"),
        ({"image_shape": "888"}, "damaged (in image_shape)"),
        ({"classes": 2**40}, "damaged (in classes)"),
        ({"fingerprint": 1, "config": []}, "damaged (in fingerprint, config)"),
        ({"config": {"posterior": {"where": None}}}, "damaged (in config)"),
        ({"config": {"method": "auto"}}, "damaged (in config)"),
        ({"config": {"model": {"depth": 10**6}}}, "at most 1,000"),
        ({"config": {"method": "supervised-bbb", "posterior": {"prior": "teacher_mean"}}}, "needs a teacher"),
    ],
)
def test_a_state_that_no_run_has_is_refused(tmp_path: Path, changes: dict, telling: str) -> None:
    """The sizes in it are built: without bounds, they would take all memory."""
    path = RunFolder(trained(tmp_path / "run", "byov")).checkpoint
    tensors, state = checkpoints.load(path)
    config = state["config"]
    for key, value in dict(changes.get("config") or {}).items():
        config[key] = {**config[key], **value} if isinstance(value, dict) else value
    others = {key: value for key, value in changes.items() if not isinstance(value, dict)}
    checkpoints.save(path, tensors, state | others)
    with pytest.raises(BadInput) as caught:
        load(tmp_path / "run")
    assert telling in str(caught.value)
