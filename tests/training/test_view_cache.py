"""Cached views of a frozen trunk: equal to its activations, and a run with them can be resumed."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path
from threading import Event, Thread
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

import tiny
from byov._core.errors import BadInput
from byov._core.randomness import RandomStream, fold
from byov.backbones import Encoder, build_encoder
from byov.config import Config, Model, Optim, Posterior, View, Views, to_dict
from byov.data.images import ImageSet
from byov.data.views import two_views
from byov.runs.folder import RunFolder
from byov.training import view_cache
from byov.training.distributed.processes import Processes
from byov.training.distributed.sync_batchnorm import share_batch_norms
from byov.training.learners import encoder_of
from byov.training.loop import Trainer
from byov.training.prepare import cache_views, prepare
from byov.training.preview import estimate_seconds
from two_processes import spawned

RESNET = Model("resnet-18", width=4, stem="cifar", norm="batch", frozen_until="layer2", head_hidden=16, head_output=8)
VIT = replace(tiny.MODEL, depth=2, frozen_until="blocks.0")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Images in a file, and the weights of a ResNet whose statistics are not those of a new one."""
    folder = tmp_path_factory.mktemp("source")
    data = tiny.images(32, channels=3)
    np.savez(folder / "images.npz", x_train=data.images.numpy(), y_train=data.labels.numpy())
    torch.manual_seed(5)
    encoder = build_encoder(RESNET, (3, 8, 8))
    encoder.frozen_statistics = False
    encoder.train()
    for _ in range(3):
        encoder(torch.rand(8, 3, 8, 8))
    save_file(encoder.backbone.state_dict(), folder / "weights.safetensors")
    return folder


def settings(source: Path, method: str = "byov", cached: int = 4, **changes: Any) -> Config:
    given: dict[str, Any] = {
        "data": f"npz:{source / 'images.npz'}",
        "init": str(source / "weights.safetensors"),
        "model": RESNET,
        "posterior": Posterior(prior="pretrained", temperature=1e-3),
        "optim": Optim(epochs=3, batch_size=8, encoder_lr=0.3),
        "views": Views(View(flip=0.5), View(flip=0.5, solarise=0.2), cached),
        "images": 24,
    }
    return tiny.config(method, **given | changes)


def prepared(config: Config, out: Path, **options: Any) -> Trainer:
    trainer = prepare(config, out, **options)
    trainer.say = lambda text: None
    return trainer


# ----------------------------------------------------------------------------------------------------- what it holds


class Fresh(NamedTuple):
    trainer: Trainer
    encoder: Encoder


def fresh(folder: Path, model: Model, channels: int = 3, **changes: Any) -> Fresh:
    config = tiny.config("byol", model=model, views=Views(cached=4), **changes)
    data = tiny.images(channels=channels)
    if "lite" in model.backbone:  # it needs larger ones
        data = ImageSet(data.images.repeat(1, 1, 4, 4), data.labels)
    trainer = tiny.trainer(folder, config, data)
    return Fresh(trainer, encoder_of(trainer.learner.posterior.module))


def made(folder: Path, of: Fresh, images: str = "fingerprint") -> view_cache.ViewCache:
    told = view_cache.describe(of.trainer.config, of.encoder, images, None)
    view_cache.make(folder, of.trainer.config, of.encoder, told, of.trainer.pixels)
    return view_cache.open_cache(folder, told)


def everything(cache: view_cache.ViewCache) -> Tensor:
    views, images = cache.description.shape[:2]
    return torch.stack([cache.view(number, torch.arange(images)) for number in range(views)])


@pytest.mark.parametrize(
    "model", [RESNET, VIT, Model("efficientnet-lite0", frozen_until="blocks.1", head_hidden=16, head_output=8)]
)
def test_cached_activations_are_the_trunks_of_the_views(tmp_path: Path, model: Model) -> None:
    """Epoch a of fresh views has view a of both kinds; the cached ones are rounded to float16."""
    of = fresh(tmp_path, model)
    cache = made(tmp_path, of)
    assert cache.description.channels_last == ("lite" in model.backbone)
    config, ids = of.trainer.config, torch.tensor([3, 17, 4])
    for epoch in (0, 1):
        fresh_views = two_views(
            of.trainer.pixels(ids),
            ids,
            config.views,
            of.encoder.image_shape[-1],
            fold(RandomStream.VIEWS, config.seed),
            epoch,
        )
        for cached, pixels in zip(cache.pair(ids, epoch), fresh_views, strict=True):
            with torch.no_grad():
                expected = of.encoder.trunk(pixels)
            assert cached.dtype == torch.float16
            torch.testing.assert_close(cached.float(), expected, rtol=1e-3, atol=1e-3 * float(expected.abs().max()))
            with torch.no_grad():
                features = of.encoder.after_trunk(cached)
                torch.testing.assert_close(features, of.encoder(pixels), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("half", [1, 2, 4])
def test_all_pairs_come_in_turn(half: int) -> None:
    epochs = [view_cache.pair_of(epoch, half) for epoch in range(half * half)]
    assert set(epochs) == {(a, b) for a in range(half) for b in range(half)}
    for start in range(0, len(epochs), half):  # within `half` epochs each view comes once
        some = epochs[start : start + half]
        assert all(count == 1 for kind in zip(*some, strict=True) for count in Counter(kind).values())


def test_the_digest_depends_on_everything(tmp_path: Path) -> None:
    of = fresh(tmp_path, RESNET)
    config = of.trainer.config

    def digest(config: Config = config, images: str = "a", trained: Tensor | None = None) -> str:
        return view_cache.describe(config, of.encoder, images, trained).digest

    first = digest()
    assert first == digest()
    views = replace(config.views, first=replace(config.views.first, hue=0.2))
    others = [
        digest(images="b"),
        digest(trained=torch.arange(3)),
        digest(replace(config, seed=1)),
        digest(replace(config, views=views)),
        digest(replace(config, views=replace(config.views, cached=2))),
    ]
    with torch.no_grad():
        of.encoder.pixel_mean += 0.1
    others.append(digest())
    next(of.encoder.backbone.parameters()).data.mul_(2)
    others.append(digest())
    assert len({first, *others}) == 8
    trained = [p for p in of.encoder.parameters() if p.requires_grad]
    trained[-1].data.add_(1)  # the trained part does not matter
    assert digest() == others[-1]


def test_a_cache_of_other_weights_is_refused(tmp_path: Path) -> None:
    made(tmp_path, fresh(tmp_path, RESNET))
    with pytest.raises(BadInput, match=r"cache holds views of other weights, images or settings: delete"):
        made(tmp_path, fresh(tmp_path, RESNET, seed=1))


def test_half_a_cache_is_made_again(tmp_path: Path) -> None:
    of = fresh(tmp_path, RESNET)
    whole = everything(made(tmp_path, of))
    file = RunFolder(tmp_path).view_cache / view_cache.FILE
    file.write_bytes(file.read_bytes()[:-2])
    assert torch.equal(everything(made(tmp_path, of)), whole)
    file.write_bytes(file.read_bytes()[:-2] + b"\x3c\x3c")  # other numbers
    assert torch.equal(everything(made(tmp_path, of)), whole)
    (file.parent / view_cache.ABOUT).unlink()
    file.write_bytes(b"\0" * file.stat().st_size)
    assert torch.equal(everything(made(tmp_path, of)), whole)


def test_progress_is_told(tmp_path: Path) -> None:
    of, told = fresh(tmp_path, VIT, channels=1), []
    description = view_cache.describe(of.trainer.config, of.encoder, "", None)
    view_cache.make(
        tmp_path, of.trainer.config, of.encoder, description, of.trainer.pixels, lambda *row: told.append(row)
    )
    assert told[0] == ("caching 4 views of 24 images", 0, 96) and told[-1][1:] == (96, 96)


def test_activations_beyond_float16_are_refused(tmp_path: Path) -> None:
    of = fresh(tmp_path, replace(RESNET, frozen_until="stem"))
    of.encoder.backbone.bn1.bias.data.fill_(1e6)
    with pytest.raises(BadInput, match="beyond float16"):
        made(tmp_path, of)
    assert not list(tmp_path.rglob("*.f16*"))


# ------------------------------------------------------------------------------------------------------- runs with it


@pytest.mark.parametrize("method", ["byov", "byol"])
def test_a_resumed_run_is_bit_equal(tmp_path: Path, source: Path, method: str) -> None:
    config = settings(source, method)
    whole = prepared(config, tmp_path / "whole")
    begin = {k: v.clone() for k, v in whole.tensors().items()}
    assert estimate_seconds(whole) > 0
    whole.run()
    cut = prepared(config, tmp_path / "cut")
    for _ in range(4):
        cut._advance()
    cut.save()
    shutil.rmtree(tmp_path / "cut" / "cache")
    (tmp_path / "cut" / "cache").mkdir()
    (tmp_path / "cut" / "cache" / ".views.f16.1.tmp").write_bytes(b"half")
    again = prepared(config, tmp_path / "cut", resume=True)
    assert again.step == 4 and again.view_cache is not None
    again.run()
    ends = whole.tensors(), again.tensors()
    assert ends[0].keys() == ends[1].keys() and all(torch.equal(v, ends[1][k]) for k, v in ends[0].items())
    assert not (tmp_path / "whole" / "cache").exists() and not (tmp_path / "cut" / "cache").exists()
    # The trunk's weights and all of the encoder's statistics are as they came; the rest has moved, the heads' too.
    kept = [k for k in begin if ".other.encoder." in k and not whole_is_trained(whole, k)]
    assert any("running_mean" in k for k in kept) and any("layer1.0.conv1" in k for k in kept)
    assert all(torch.equal(begin[k], ends[0][k]) for k in kept)
    moved = [k for k in begin if "layer3.0.conv1" in k or "projector.1.running_mean" in k]
    assert len(moved) >= 4 and not any(torch.equal(begin[k], ends[0][k]) for k in moved if not k.startswith("prior"))
    longer = prepared(config, tmp_path / "whole", extend=1)  # its cache was removed: made again
    longer.run()
    assert longer.step == 12


def whole_is_trained(trainer: Trainer, key: str) -> bool:
    name = key.split(".other.", 1)[1]
    return dict(trainer.learner.posterior.module.named_parameters()).get(name, torch.zeros(())).requires_grad


def test_frozen_statistics_hold_in_student_and_teacher_but_not_in_heads(tmp_path: Path, source: Path) -> None:
    trainer = prepared(settings(source), tmp_path / "run")
    assert trainer.learner.teacher is not None
    for network in (trainer.learner.posterior.module, trainer.learner.teacher.module):
        network.train()
        norms = {name: m for name, m in network.named_modules() if isinstance(m, _BatchNorm)}
        assert all(norm.training == (not name.startswith("encoder.")) for name, norm in norms.items())
        assert {name.split(".")[0] for name in norms} >= {"encoder", "projector"}


def test_fresh_views_pass_the_trunk_once(tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a cache student and teacher share the trunk's activations, and the loss is that of whole passes."""
    trainer = prepared(settings(source, "byol", cached=0), tmp_path / "run")
    learner, batch = trainer.learner, trainer.batches(0)[0]
    assert trainer.view_cache is None and batch.activations is None
    calls = []
    trunk = Encoder.trunk
    monkeypatch.setattr(Encoder, "trunk", lambda self, images: calls.append(1) or trunk(self, images))
    shared = learner.loss(batch, (0,)).nll
    assert len(calls) == 2
    monkeypatch.setattr(Encoder, "has_trunk", False)
    torch.testing.assert_close(learner.loss(batch, (0,)).nll, shared)


def test_the_cached_run_learns_what_one_with_fresh_views_does(tmp_path: Path, source: Path) -> None:
    """The first epochs have the same views: up to float16, the same loss."""
    losses = []
    for cached in (0, 4):
        trainer = prepared(settings(source, "byol", cached), tmp_path / str(cached))
        losses.append([float(trainer._advance().nll) for _ in range(3)])
    torch.testing.assert_close(torch.tensor(losses[0]), torch.tensor(losses[1]), rtol=1e-2, atol=1e-2)


def test_no_trunk_no_cache(tmp_path: Path, source: Path) -> None:
    config = settings(source, model=replace(RESNET, frozen_until=None))
    with pytest.raises(BadInput, match=r"views\.cached needs a trunk"):
        prepare(config, tmp_path / "run")
    with pytest.raises(BadInput, match="even number"):
        prepare(settings(source, cached=3), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_too_little_disk_is_one_sentence_before_anything_is_written(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=100))
    with pytest.raises(BadInput, match=r"need 0\.0 GiB in .*run/cache, where .* --views.cached 0"):
        prepare(settings(source), tmp_path / "run")
    assert not list(tmp_path.iterdir())


def test_what_is_written_beside_it(tmp_path: Path, source: Path) -> None:
    trainer = prepared(settings(source), tmp_path / "run")
    about = json.loads((tmp_path / "run" / "cache" / "views.json").read_text())
    assert about["shape"] == [4, 24, 8, 4, 4] and not about["channels_last"]
    assert (tmp_path / "run" / "cache" / "views.f16").stat().st_size == 2 * 4 * 24 * 4 * 4 * 8
    assert to_dict(trainer.config)["views"]["cached"] == 4


# ------------------------------------------------------------------------------------------------------ two processes


def _train(rank: int, folder: Path, config: Config) -> list[Tensor]:
    """What two processes learn in a step; the first makes the cache, both map it."""
    trainer = tiny.trainer(folder, config, tiny.images(channels=3), processes=Processes(rank, 2), fingerprint="images")
    assert trainer.learner.teacher is not None
    for network in (trainer.learner.posterior, trainer.learner.teacher):
        share_batch_norms(network, print)
    cache_views(trainer)
    trainer._advance()
    return [trainer.learner.posterior.means.detach(), *trainer.learner.posterior.module.parameters()]


def test_two_processes_equal_one(tmp_path: Path) -> None:
    config = tiny.config("byol", model=RESNET, views=Views(cached=4), precision="64-true")
    (tmp_path / "two").mkdir()
    first, second = spawned(_train, tmp_path / "two", config)
    trainer = tiny.trainer(tmp_path / "one", config, tiny.images(channels=3), fingerprint="images")
    cache_views(trainer)
    trainer._advance()
    own = [trainer.learner.posterior.means.detach(), *trainer.learner.posterior.module.parameters()]
    for a, b, c in zip(first, second, own, strict=True):
        assert torch.equal(a, b)
        torch.testing.assert_close(a, c.detach(), rtol=1e-6, atol=1e-9)


# ------------------------------------------------------------------------------------------------------------- shared


def test_runs_share_a_cache_and_learn_the_same(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shared = tmp_path / "views"
    alone = prepared(settings(source), tmp_path / "alone")
    alone.run()
    first = prepared(settings(source), tmp_path / "first", view_caches=shared)
    first.run()
    assert torch.equal(first.learner.posterior.means, alone.learner.posterior.means)
    assert not RunFolder(first.folder).view_cache.exists()
    stopped = prepared(settings(source), tmp_path / "stopped", view_caches=shared)
    stopped._advance()
    stopped.save()
    resumed = prepared(settings(source), tmp_path / "stopped", resume=True, view_caches=shared)
    resumed.run()
    assert torch.equal(resumed.learner.posterior.means, alone.learner.posterior.means)
    monkeypatch.setattr(view_cache, "_activations", None)  # the others make no cache
    for method in ("byol", "supervised-bbb"):
        prepared(settings(source, method), tmp_path / method, view_caches=shared).run()
    assert len(list(shared.glob("*/views.json"))) == 1
    with pytest.raises(TypeError):  # other views
        prepared(replace(settings(source), seed=1), tmp_path / "other", view_caches=shared)


def test_one_process_makes_the_shared_cache_and_the_others_wait(tmp_path: Path) -> None:
    begun = Event()

    def other() -> None:
        begun.set()
        with view_cache.alone_in(tmp_path):
            order.append("second")

    order: list[str] = []
    thread = Thread(target=other)
    with view_cache.alone_in(tmp_path):
        thread.start()
        begun.wait()
        thread.join(0.1)
        order.append("first")
    thread.join()
    assert order == ["first", "second"]


def test_a_supervised_run_learns_from_cached_first_views(source: Path, tmp_path: Path) -> None:
    """In the first epoch they are the fresh ones, rounded to float16."""
    cached, fresh_views = (
        prepared(settings(source, "supervised", cached=count), tmp_path / str(count)) for count in (4, 0)
    )
    batches = [trainer._batch(torch.arange(8), 0) for trainer in (cached, fresh_views)]
    losses = [
        trainer.learner.loss(batch, (0,)).nll for trainer, batch in zip((cached, fresh_views), batches, strict=True)
    ]
    assert batches[0].activations is not None and batches[1].activations is None
    assert float(losses[0].detach()) == pytest.approx(float(losses[1].detach()), rel=1e-3)
    cached._advance()


def test_nothing_is_cached_where_nothing_is_trained(source: Path, tmp_path: Path) -> None:
    trainer = prepared(settings(source, "posthoc", posterior=Posterior()), tmp_path / "run")
    assert trainer.config.views.cached == 0 and trainer.view_cache is None
