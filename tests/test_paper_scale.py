"""docs/scale.md: its counts against closed forms, its formulas against a real run, and its tables up to date."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from byov.backbones.vit import SIZES
from byov.config import Config, Model, Monitor, Optim
from byov.training.prepare import prepare
from byov.training.resolve import resolve

ROOM = Path(__file__).resolve().parents[1] / "benchmarks"
sys.path.append(str(ROOM))  # its files are scripts, not a package

import scale  # noqa: E402

MODEL = Model(
    width=16, depth=2, heads=2, patch=8, pool="cls", head_hidden=24, head_output=8, projector_layers=3
)  # fmt: skip


def encoder_flops(tokens: int, width: int, depth: int, patch: int) -> int:
    """Patches; then a block's four Linear layers of 12 width^2 weights, and attention. The class token is one more."""
    stem = 2 * tokens * 3 * patch**2 * width
    return stem + depth * ((tokens + 1) * 24 * width**2 + 4 * (tokens + 1) ** 2 * width)


def head_flops(features: int, hidden: int, out: int) -> tuple[int, int]:
    """A projector of 3 layers, and a predictor of 2."""
    return 2 * (features * hidden + hidden**2 + hidden * out), 2 * (out * hidden + hidden * out)


def encoder_weights(width: int, depth: int, patch: int) -> int:
    """Stem, class token, blocks (12 width^2 weights, 9 width biases, 4 width in the norms), last norm; no positions."""
    return 3 * patch**2 * width + width + width + depth * (12 * width**2 + 13 * width) + 2 * width


def head_weights(features: int, hidden: int, out: int) -> tuple[int, int]:
    """Hidden layers have a bias and BatchNorm's two."""
    return features * hidden + hidden**2 + hidden * out + 6 * hidden, 2 * out * hidden + 3 * hidden


def test_a_small_student_is_counted_right() -> None:
    config = resolve(Config(model=MODEL, image_size=32), (3, 32, 32), 100, flips=True)
    counted = scale.count(config)
    projector, predictor = head_flops(16, 24, 8)
    encoder = encoder_flops(16, 16, 2, 8)
    assert counted.forward_flops == encoder + projector + predictor
    assert counted.teacher_flops == encoder + projector
    stem = encoder_flops(16, 16, 0, 8)
    assert counted.backward_flops == 2 * counted.forward_flops - stem  # images need no gradient
    assert list(counted.parameters.values()) == [encoder_weights(16, 2, 8), *head_weights(16, 24, 8)]


def test_bytes_for_the_backward_pass() -> None:
    """Kept in bf16: what goes into each Linear layer and into GELU; and the second layer's weights."""
    network = nn.Sequential(nn.Linear(8, 16, bias=False), nn.GELU(), nn.Linear(16, 4, bias=False))
    for images in (2, 5):
        assert scale.saved_bytes(network, torch.randn(images, 8)) == 2 * (images * (8 + 16 + 16) + 16 * 4)


def test_what_is_stored_is_that_of_the_recipe() -> None:
    counted = scale.Counted(**json.loads(scale.FOUND.read_text(encoding="utf-8")))
    model, (width, depth, _) = scale.paper_config().model, SIZES["base"]
    assert (model.patch, model.pool, model.projector_layers, model.predictor_layers) == (16, "cls", 3, 2)
    heads = (width, model.head_hidden, model.head_output)
    assert list(counted.parameters.values()) == [encoder_weights(width, depth, 16), *head_weights(*heads)]
    assert counted.forward_flops == encoder_flops(196, width, depth, 16) + sum(head_flops(*heads))


def test_the_page_is_up_to_date() -> None:
    counted = scale.Counted(**json.loads(scale.FOUND.read_text(encoding="utf-8")))
    page = scale.PAGE.read_text(encoding="utf-8")
    tables = scale.render(counted, scale.paper_config())
    assert scale.in_page(page, tables) == page, "run python benchmarks/scale.py --render"
    assert scale.in_page(page, "other") != page


def test_a_ring_sends_each_piece_twice_but_to_oneself() -> None:
    # 8 pieces of 100 bytes; each GPU passes on 7 while they are summed, and 7 while they are handed out
    assert scale.ring_bytes(800, 8) == 14 * 100
    assert scale.ring_bytes(800, 1) == 0


@pytest.mark.parametrize("method", scale.METHODS)
def test_a_checkpoint_and_the_state_hold_so_many_numbers_a_weight(method: str, tmp_path: Path) -> None:
    model = Model(width=16, depth=1, heads=2, head_hidden=16, head_output=8)
    optim, monitor = Optim(epochs=1, batch_size=32), Monitor(tensorboard=False)
    config = Config(method=method, images=64, threads=1, device="cpu", model=model, optim=optim, monitor=monitor)  # type: ignore[arg-type]
    trainer = prepare(config, tmp_path / "run", say=lambda text: None)
    trainer.run()
    posterior = trainer.learner.posterior
    weights = posterior.segments.numel + sum(p.numel() for p in posterior.module.parameters())
    buffers = (
        "running_mean",
        "running_var",
        "num_batches_tracked",
        "pixel_mean",
        "pixel_std",
        ".step",
        "balance.pulls",
        "balance.totals",
    )
    held = {name: t.numel() for name, t in trainer.tensors().items() if not name.endswith(buffers)}
    assert sum(held.values()) == scale.checkpoint_floats(method) * weights
    moments = sum(size for name, size in held.items() if name.startswith("optimizer."))
    assert moments == scale.state_floats(method)["AdamW's moments"] * weights
    gradients = sum(p.grad.numel() for p in posterior.parameters() if p.grad is not None)
    assert gradients == scale.state_floats(method)["gradients"] * weights == scale.exchanged_floats(method) * weights
