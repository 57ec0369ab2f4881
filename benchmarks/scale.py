"""What the paper's run would take: counted on the real networks, the rest by formula.

    python benchmarks/scale.py           counts (a minute), writes scale.json and the tables of docs/scale.md
    python benchmarks/scale.py --render  the tables again, from scale.json

Nothing here was run on a GPU. The assumptions are in ASSUMED and on the page.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import FlopCounterMode

from byov.backbones import build_encoder
from byov.config import Config, read_recipe
from byov.data.image_folder import storage_side
from byov.training.learners import Student
from byov.training.resolve import resolve

HERE = Path(__file__).resolve().parent
FOUND, PAGE = HERE / "scale.json", HERE.parent / "docs" / "scale.md"
BEGIN, END = "<!-- made by benchmarks/scale.py: begin -->", "<!-- end -->"

RECIPE = "imagenet-vit-b16-byov"
IMAGENET = 1_281_167  # training images
FLOAT = 4  # bytes: posterior, teacher, gradients and optimizer are float32 whatever the precision
GPUS = (8, 64)
METHODS = ("byov", "byol")


@dataclass(frozen=True)
class Gpu:
    tflops: float
    """Dense bf16 peak, from the data sheet."""
    gib: float
    memory_tbs: float
    """TB/s of its memory, from the data sheet."""


ASSUMED = {"A100 80 GB": Gpu(312, 74.5, 2.0), "H100 80 GB": Gpu(989, 74.5, 3.35)}
UTILISATION = 0.4  # part of the peak that a training step reaches
LINK = {8: 200e9, 64: 20e9}  # bytes/s a GPU sends in an all-reduce: within a machine, and over 8 machines of 8
PASSES = 45  # over memory that a draw, its gradients, the KL and AdamW of the log-variances add, by reading the code


# ------------------------------------------------------------------------------------------------------------- counted


@dataclass(frozen=True)
class Counted:
    """Counts of the real student."""

    parameters: dict[str, int]
    """Of encoder, projector and predictor."""
    forward_flops: int
    """Of one view of one image through the student; a multiplication and an addition are two."""
    backward_flops: int
    teacher_flops: int
    """Forward through encoder and projector."""
    saved_bytes: int
    """Kept for the backward pass, of one view of one image, under bf16 autocast."""
    copied_bytes: int
    """Kept whatever the batch: the weights in bf16."""

    @property
    def weights(self) -> int:
        return sum(self.parameters.values())

    @property
    def image_flops(self) -> int:
        """A training step's, for each image: two views through student and back, and through the teacher."""
        return 2 * (self.forward_flops + self.backward_flops + self.teacher_flops)


def count(config: Config) -> Counted:
    """Counts FLOPs without arithmetic (meta tensors) and bytes by a real forward of a few images."""
    torch.manual_seed(0)
    side = config.image_size
    assert side is not None, "resolve the config first"
    with torch.device("meta"):
        ghost = student(config)
        images = torch.empty(2, 3, side, side)
    forward, backward = flops(ghost, images)
    teacher, _ = flops(nn.Sequential(ghost.encoder, ghost.projector), images)
    real = student(config)
    two, four = (saved_bytes(real, torch.randn(count, 3, side, side)) for count in (2, 4))
    parameters = {name: sum(p.numel() for p in part.parameters()) for name, part in ghost.named_children()}
    return Counted(parameters, forward // 2, backward // 2, teacher // 2, (four - two) // 2, 2 * two - four)


def student(config: Config) -> Student:
    assert config.image_size is not None
    return Student(build_encoder(config.model, (3, config.image_size, config.image_size)), config.model)


def flops(network: nn.Module, images: torch.Tensor) -> tuple[int, int]:
    """Of a forward and of its backward."""
    with FlopCounterMode(display=False) as forward:
        output = network(images)
    last = output if isinstance(output, torch.Tensor) else output.prediction
    with FlopCounterMode(display=False) as backward:
        last.sum().backward()
    return forward.get_total_flops(), backward.get_total_flops()


def saved_bytes(network: nn.Module, images: torch.Tensor) -> int:
    """Bytes that autograd saves for the backward pass, each memory once, without the weights themselves."""
    weights = {p.untyped_storage().data_ptr() for p in network.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage  # held: a freed address would be used again
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor), torch.autocast("cpu", torch.bfloat16):
        network(images)
    return sum(storage.nbytes() for storage in kept.values())


# ------------------------------------------------------------------------------------------------------------ formulas


def state_floats(method: str) -> dict[str, float]:
    """What training holds on every GPU, in numbers per weight."""
    bayesian = method == "byov"
    return {
        "weights (means, log-variances)": 1 + bayesian,
        "teacher": 1,
        "draw": int(bayesian),
        "gradients": 1 + bayesian,
        "AdamW's moments": 2 * (1 + bayesian),
    }


def exchanged_floats(method: str) -> int:
    """Numbers per weight in the one all-reduce of a step."""
    return 2 if method == "byov" else 1


def checkpoint_floats(method: str) -> int:
    """Numbers per weight in a checkpoint: weights, teacher, moments. Sharded moments are gathered into it."""
    return 7 if method == "byov" else 4


def ring_bytes(size: float, gpus: int) -> float:
    """What each GPU sends in a ring all-reduce of `size` bytes: a reduce-scatter and an all-gather."""
    return 2 * (gpus - 1) / gpus * size


def held_bytes(counted: Counted, method: str, gpus: int, shard: bool) -> float:
    floats = state_floats(method)
    moments = floats.pop("AdamW's moments") / (gpus if shard else 1)
    return (sum(floats.values()) + moments) * counted.weights * FLOAT + counted.copied_bytes


def activation_bytes(counted: Counted, batch: int, gpus: int, accumulate: int) -> float:
    """Of both views of a micro-batch."""
    return 2 * batch / gpus / accumulate * counted.saved_bytes


def step_seconds(counted: Counted, batch: int, gpus: int, gpu: Gpu) -> float:
    """Arithmetic alone."""
    return batch * counted.image_flops / (gpus * gpu.tflops * 1e12 * UTILISATION)


def exchange_seconds(counted: Counted, method: str, gpus: int) -> float:
    """It starts when the backward pass has ended: nothing hides it."""
    return ring_bytes(exchanged_floats(method) * counted.weights * FLOAT, gpus) / LINK[gpus]


def posterior_seconds(counted: Counted, gpu: Gpu) -> float:
    return PASSES * counted.weights * FLOAT / (gpu.memory_tbs * 1e12)


# -------------------------------------------------------------------------------------------------------------- tables


def table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [titles, ["---"] * len(titles), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def tables(keys: int, after: int, titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Two tables of at most six columns, cut before column `after`; both begin with the first `keys` columns."""

    def second(row: Sequence[str]) -> list[str]:
        return [*row[:keys], *row[after:]]

    return f"{table(titles[:after], [row[:after] for row in rows])}\n\n{table(second(titles), list(map(second, rows)))}"


def render(counted: Counted, config: Config) -> str:
    """All tables, in Markdown."""
    batch, epochs = config.optim.batch_size, config.optim.epochs
    parts = [
        ("Counted on the real student", _counted_table(counted, config)),
        (f"Memory per GPU, batch {batch:,}, GiB", _memory_table(counted, batch)),
        (f"Time, {epochs} epochs, batch {batch:,}", _time_table(counted, batch, epochs)),
        ("Exchange and storage, GB (10^9 bytes)", _exchange_table(counted)),
    ]
    return "\n\n".join(f"**{title}**\n\n{rows}" for title, rows in parts)


def _counted_table(counted: Counted, config: Config) -> str:
    assert config.image_size is not None
    disk = IMAGENET * 3 * storage_side(config.image_size) ** 2
    rows = [(f"weights of the {name}", f"{number / 1e6:.1f} M") for name, number in counted.parameters.items()]
    rows += [
        ("all of the student's weights", f"{counted.weights / 1e6:.1f} M, {counted.weights / IMAGENET:.0f} per image"),
        ("forward, one view", f"{counted.forward_flops / 1e9:.1f} GFLOP"),
        ("backward, one view", f"{counted.backward_flops / 1e9:.1f} GFLOP"),
        ("teacher's forward, one view", f"{counted.teacher_flops / 1e9:.1f} GFLOP"),
        ("a training step, per image", f"{counted.image_flops / 1e9:.0f} GFLOP"),
        ("one epoch", f"{counted.image_flops * IMAGENET:.2e} FLOP"),
        ("saved for the backward pass, one view", f"{counted.saved_bytes / 2**20:.1f} MiB"),
        ("weights in bf16", f"{counted.copied_bytes / 2**20:.0f} MiB"),
        ("ImageNet decoded, as `byov` caches it on disk", f"{disk / 1e9:.0f} GB"),
    ]
    return table(("what", "count"), rows)


def _memory_table(counted: Counted, batch: int) -> str:
    rows = []
    for method in METHODS:
        for gpus in GPUS:
            whole, sharded = (held_bytes(counted, method, gpus, shard) / 2**30 for shard in (False, True))
            once, fourth = (activation_bytes(counted, batch, gpus, k) / 2**30 for k in (1, 4))
            copy = exchanged_floats(method) * counted.weights * FLOAT / 2**30
            numbers = (whole, sharded, once, fourth, copy, whole + once, sharded + fourth)
            rows.append((method, str(gpus), *(f"{number:.1f}" for number in numbers)))
    titles = ("method", "GPUs", "state", "state, `--optim.shard`", "activations", "in 4 micro-batches")
    return tables(2, 6, (*titles, "copy for the all-reduce", "total", "total, sharded, in 4"), rows)


def _time_table(counted: Counted, batch: int, epochs: int) -> str:
    rows = []
    steps = epochs * (IMAGENET // batch)
    for name, gpu in ASSUMED.items():
        for gpus in GPUS:
            for method in METHODS:
                arithmetic, exchange = step_seconds(counted, batch, gpus, gpu), exchange_seconds(counted, method, gpus)
                posterior = posterior_seconds(counted, gpu) if method == "byov" else 0.0
                step = arithmetic + exchange + posterior
                times = (f"{seconds * 1000:,.0f}" for seconds in (arithmetic, posterior, exchange, step))
                rows.append((name, str(gpus), method, *times, f"{batch / step:,.0f}", f"{steps * step / 3600:,.1f}"))
    titles = ("GPU", "GPUs", "method", "arithmetic, ms per step", "posterior, ms", "exchange, ms", "step, ms")
    return tables(3, 6, (*titles, "images/s", "hours"), rows)


def _exchange_table(counted: Counted) -> str:
    rows = []
    for method in METHODS:
        weights = counted.weights * FLOAT / 1e9
        reduced, moments = exchanged_floats(method) * weights, state_floats(method)["AdamW's moments"] * weights
        numbers = [reduced, *(ring_bytes(reduced, gpus) for gpus in GPUS)]
        numbers += [checkpoint_floats(method) * weights, moments, *(moments / gpus for gpus in GPUS)]
        rows.append((method, *(f"{number:.2f}" for number in numbers)))
    titles = ["method", "all-reduce per step", *(f"sent by each of {gpus} GPUs" for gpus in GPUS), "checkpoint"]
    return tables(1, 5, (*titles, "AdamW's moments", *(f"sharded over {gpus}" for gpus in GPUS)), rows)


# ---------------------------------------------------------------------------------------------------------------- page


def paper_config() -> Config:
    return resolve(read_recipe(RECIPE), (3, 256, 256), IMAGENET, flips=True)


def in_page(page: str, tables: str) -> str:
    """The page with the tables between its marks."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{tables}\n{END}{after}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--render", action="store_true", help="count nothing: take scale.json")
    options = parser.parse_args(arguments)
    config = paper_config()
    if not options.render:
        FOUND.write_text(json.dumps(asdict(count(config)), indent=2) + "\n", encoding="utf-8")
    tables = render(Counted(**json.loads(FOUND.read_text(encoding="utf-8"))), config)
    print(tables)
    PAGE.write_text(in_page(PAGE.read_text(encoding="utf-8"), tables), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
