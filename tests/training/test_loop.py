"""The loop: what it visits, writes and saves."""

import json

import pytest
import torch

import tiny
from byov._core.errors import BadInput, TrainingFailed
from byov._core.lock import Lock
from byov.config import Monitor, Optim
from byov.data.images import ImageSet
from byov.runs import checkpoints
from byov.runs.folder import RunFolder, read_log
from byov.training import loop
from byov.training.distributed.processes import Processes
from byov.training.loop import subset
from byov.training.preview import estimate_seconds


def test_an_epoch_visits_every_image_once_and_in_another_order_than_the_next(tmp_path) -> None:
    trainer = tiny.trainer(tmp_path, tiny.config())
    epochs = [[b.ids for k in range(3) for b in trainer.batches(3 * epoch + k)] for epoch in range(2)]
    orders = [torch.cat(ids).tolist() for ids in epochs]
    assert sorted(orders[0]) == sorted(orders[1]) == list(range(24)) and orders[0] != orders[1]


def test_processes_share_a_batch_without_overlap(tmp_path) -> None:
    trainer = tiny.trainer(tmp_path, tiny.config())
    whole = trainer.batches(1)[0].ids.tolist()
    for world in (2, 4):
        parts = []
        for rank in range(world):
            trainer.processes = Processes(rank, world)
            parts.append(trainer.batches(1)[0].ids.tolist())
        assert [ids for together in zip(*parts, strict=True) for ids in together] == whole  # in the same order


@pytest.mark.parametrize("method", ["byov", "byol", "supervised", "supervised-bbb"])
def test_a_run_writes_what_the_contract_says(tmp_path, method: str) -> None:
    trainer = tiny.trainer(tmp_path, tiny.config(method))
    summary = trainer.run()
    rows = read_log(tmp_path / "metrics.jsonl").rows
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    wanted = {"epoch", "loss", "nll", "beta", "lr", "images_per_second", "feature_std", "effective_rank", "grad_norm"}
    assert wanted <= set(rows[0])
    assert ("kl" in rows[0]) == (method in ("byov", "supervised-bbb"))
    assert ("tau" in rows[0]) == ("teacher_moved" in rows[0]) == (method in ("byov", "byol"))
    assert "knn" in rows[-1] and "knn" not in rows[0]
    layers = read_log(tmp_path / "posterior.jsonl").rows
    assert {row["epoch"] for row in layers} == ({0, 1, 2} if method in ("byov", "supervised-bbb") else set())
    assert json.loads((tmp_path / "summary.json").read_text())["steps"] == summary["steps"] == 6
    tensors, state = checkpoints.load(tmp_path / "checkpoints" / "last.safetensors")
    assert state["step"] == 6 and any(name.startswith("student.") for name in tensors)
    assert not list(tmp_path.rglob("*.tmp"))


def test_tensorboard_events_are_written(tmp_path) -> None:
    trainer = tiny.trainer(tmp_path, tiny.config(monitor=Monitor(log_every=1)))
    trainer.run()
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [e.step for e in events.Scalars("nll")] == [1, 2, 3, 4, 5, 6]


def test_training_learns_something(tmp_path) -> None:
    """Two kinds of images, bright at the left or at the right: supervised training must tell them apart."""
    pixels = torch.zeros(64, 1, 8, 8, dtype=torch.uint8)
    labels = torch.arange(64) % 2
    pixels[labels == 0, :, :, :4] = 255
    pixels[labels == 1, :, :, 4:] = 255
    settings = tiny.config("supervised-bbb", optim=Optim(epochs=25, batch_size=16, lr=3e-3))
    trainer = tiny.trainer(tmp_path, settings, ImageSet(pixels, labels, None))
    for view in ("first", "second"):
        object.__setattr__(getattr(trainer.config.views, view), "flip", 0.0)
    trainer.run()
    rows = read_log(tmp_path / "metrics.jsonl").rows
    assert rows[-1]["nll"] < 0.2 < rows[0]["nll"]


def test_the_estimate_leaves_all_as_it_was_and_asks_for_no_optimizer_state(tmp_path, monkeypatch) -> None:
    trainer = tiny.trainer(tmp_path, tiny.config("byov"))
    before = {name: value.clone() for name, value in trainer.tensors().items()}
    with monkeypatch.context() as patched:  # a sharded one would have to be gathered
        patched.setattr(loop, "optimizer_tensors", lambda optimizer: pytest.fail("the state was asked for"))
        assert estimate_seconds(trainer) > 0
    assert any(name.endswith("running_mean") for name in before)
    assert all(torch.equal(value, before[name]) for name, value in trainer.tensors().items())
    assert all(p.grad is None for p in trainer.learner.posterior.parameters())


def test_a_nan_names_step_loss_and_layer_and_keeps_the_checkpoint(tmp_path) -> None:
    trainer = tiny.trainer(tmp_path, tiny.config())
    trainer.step = 2
    trainer.save()
    good = (tmp_path / "checkpoints" / "last.safetensors").read_bytes()
    weight = next(s for s in trainer.learner.posterior.segments if s.name.endswith("mlp.0.weight"))
    with torch.no_grad():
        trainer.learner.posterior.means[weight.offset] = float("nan")
    with pytest.raises(TrainingFailed, match=r"step 2.*nan.*mlp\.0"):
        trainer.run()
    assert (tmp_path / "checkpoints" / "last.safetensors").read_bytes() == good


def test_subset_is_fixed_and_labels_stay_with_their_images() -> None:
    data = tiny.images(30)
    part = subset(data, 10)
    assert len(part) == 10 and torch.equal(part.images, subset(data, 10).images)
    place = [(data.images == image).flatten(1).all(1).nonzero().item() for image in part.images]
    assert torch.equal(part.labels, data.labels[place]) and len(set(place)) == 10
    assert subset(data, 30) is data


@pytest.mark.parametrize("steps", [None, 1])
@pytest.mark.parametrize(
    "rates", [{"lr": float("inf")}, {"log_variance_lr": 1e30}, {"lr": 1e38}], ids=["lr inf", "log-variances", "lr 1e38"]
)
def test_a_bad_update_is_found_although_the_loss_before_it_was_finite(tmp_path, rates, steps) -> None:
    optim = Optim(**{"epochs": 1, "batch_size": 24, "log_variance_lr": 0.02, "warmup": 0.0, **rates})
    monitor = Monitor(log_every=100, tensorboard=False, checkpoint_steps=steps)
    trainer = tiny.trainer(tmp_path, tiny.config(optim=optim, monitor=monitor))
    trainer.save()
    good = (tmp_path / "checkpoints" / "last.safetensors").read_bytes()
    with pytest.raises(TrainingFailed, match=r"step 1: after the update.*last good state.*Lower optim\.lr"):
        trainer.run()
    assert (tmp_path / "checkpoints" / "last.safetensors").read_bytes() == good
    assert not (tmp_path / "summary.json").exists()


def test_a_bad_update_is_found_at_the_next_log_step(tmp_path) -> None:
    monitor = Monitor(log_every=2, tensorboard=False, checkpoint_seconds=1e9)
    trainer = tiny.trainer(tmp_path, tiny.config(monitor=monitor))
    buffer = next(b for name, b in trainer.learner.teacher.named_buffers() if name.endswith("running_mean"))
    trainer.on_step = lambda step, row: buffer.fill_(float("inf")) if step == 1 else None
    with pytest.raises(TrainingFailed, match=r"step 2: after the update, teacher\..*running_mean"):
        trainer.run()


def test_a_weight_without_noise_is_found_unless_it_is_pruned(tmp_path) -> None:
    trainer = tiny.trainer(tmp_path, tiny.config())
    segment = trainer.learner.posterior.segments.table[0]
    with torch.no_grad():
        trainer.learner.posterior.log_variances[segment.offset] = -1e30
    with pytest.raises(TrainingFailed, match="sigmas are 0"):
        trainer.save()
    mask = torch.ones(segment.shape, dtype=torch.bool)
    mask.view(-1)[0] = False
    trainer.learner.masks = {segment.name: mask}
    trainer.save()


@pytest.mark.parametrize("damage", ["int8", "no state", "shape"])
def test_a_checkpoint_that_does_not_fit_is_not_resumed(tmp_path, damage: str) -> None:
    trainer = tiny.trainer(tmp_path, tiny.config())
    trainer.run()
    path = tmp_path / "checkpoints" / "last.safetensors"
    tensors, state = checkpoints.load(path)
    moment = next(name for name in tensors if name.endswith("exp_avg"))
    if damage == "int8":
        tensors |= {name: tensors[name].to(torch.int8) for name in tensors if ".mean." in name}
    elif damage == "shape":
        tensors[moment] = tensors[moment][:-1]
    else:
        tensors = {name: value for name, value in tensors.items() if not name.startswith("optimizer.")}
    checkpoints.save(path, tensors, state)
    with pytest.raises(BadInput, match={"int8": "int8", "shape": "does not fit", "no state": "lacks the"}[damage]):
        tiny.trainer(tmp_path, tiny.config()).restore()


@pytest.mark.parametrize("fate", ["removed", "moved", "taken over"])
def test_a_folder_that_goes_while_training_is_a_failure(tmp_path, fate: str) -> None:
    run = tmp_path / "run"
    trainer = tiny.trainer(run, tiny.config())
    trainer.lock = Lock(RunFolder(run).lock, run)

    def lose(step: int, row: object) -> None:
        if step == 2:
            if fate == "taken over":
                RunFolder(run).lock.write_text('{"machine": "00000000", "pid": 1, "started": 1, "host": "b"}')
            else:
                run.rename(tmp_path / "moved")

    trainer.on_step = lose
    with pytest.raises(TrainingFailed, match=r"run was removed, moved or taken over .*step 6"):
        trainer.run()
    assert fate == "taken over" or not run.exists()
