"""The posterior predictive, compared with the plain forward pass and a loop over other libraries' models.

One number for all: images times draws per second. The deterministic network encodes the same images once per draw.
bayesian-torch and torch-uncertainty draw weights within each forward pass, so again for every batch; byov once for all
images. byov's time includes the draw, the alignment on the reference set, the probe and the streaming moments.
"""

from __future__ import annotations

import multiprocessing
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from conductor import THREADS, Turn, Variant, fastest, interleave, ratios, steps_of, summary
from models import CLASSES, SIDE, STUDENT, classifier, images
from peers import _replaced

DETERMINISTIC = "deterministic forward"
CACHED, INCLUDED = "byov, bank cached", "byov, bank made too"
# What byov is compared with, and its factory.
OTHERS = {DETERMINISTIC: "deterministic", "bayesian-torch": "bayesian_torch", "torch-uncertainty": "torch_uncertainty"}
COUNTS = (1000, 4000)  # images
DRAWS = 4
BANK = 1000  # images of the reference bank, byov's default
BATCHES = (128, 256, 512)  # each library but byov, which has its own, uses its best
FEW, MANY, MEMORY_IMAGES = 5, 200, 500  # draws between which memory must not grow; images, and reference images


def measure(quick: bool) -> dict[str, Any]:
    counts, batches, rounds = (COUNTS[:1], BATCHES[:1], 2) if quick else (COUNTS, BATCHES, 5)
    with _prepared(BANK) as run:
        others = {name: _best_batch(run, factory, batches) for name, factory in OTHERS.items()}
        speed = {str(count): _measure(run, count, others, rounds) for count in counts}
    with _prepared(MEMORY_IMAGES) as run:
        repeats, many = (1, 40) if quick else (2, MANY)
        peaks = {draws: [_fresh(run, draws) for _ in range(repeats)] for draws in (FEW, many)}
    return {"speed": speed, "memory": compare(peaks)}


def compare(peaks: dict[int, list[float]]) -> dict[str, Any]:
    """The ratio of the lowest peaks of few and many draws (noise only adds), with the range of all runs."""
    few, many = peaks.values()
    spread = (min(many) / max(few), max(many) / min(few))
    return {
        "draws": list(peaks),
        "peak_mib": [min(few), min(many)],
        "ratio": min(many) / min(few),
        "spread": spread,
    }


def _best_batch(run: Path, factory: str, batches: tuple[int, ...]) -> int:
    where = {"run": str(run), "count": COUNTS[0]}
    tried = [Variant(str(batch), "predictive", factory, where | {"batch": batch}) for batch in batches]
    return int(fastest(tried).name)


def _measure(run: Path, count: int, others: dict[str, int], rounds: int) -> dict[str, Any]:
    where = {"run": str(run), "count": count}
    variants = [
        Variant(CACHED, "predictive", "cached", where),
        Variant(INCLUDED, "predictive", "included", where),
        *(Variant(n, "predictive", OTHERS[n], where | {"batch": batch}) for n, batch in others.items()),
    ]
    times = interleave(variants, rounds)
    return {
        "images": count,
        "draws": DRAWS,
        "bank": BANK,
        "rounds": rounds,
        "batch": others,
        "images_per_second": {name: count * DRAWS / summary(t).median for name, t in times.items()},
        "rate": {name: ratios(times, DETERMINISTIC, name) for name in (CACHED, INCLUDED)},
        "speedup": {name: ratios(times, name, CACHED) for name in OTHERS if name != DETERMINISTIC},
    }


@contextmanager
def _prepared(bank: int) -> Iterator[Path]:
    """A run whose reference set has this many images."""
    from byov.config import Config, Monitor, Optim
    from byov.training.prepare import prepare

    with tempfile.TemporaryDirectory() as folder:
        known = Path(folder) / "known.npz"
        np.savez(known, images=images(bank).permute(0, 2, 3, 1).numpy())
        optim, monitor = Optim(epochs=1, batch_size=bank // 2), Monitor(tensorboard=False)
        config = Config(
            data=f"npz:{known}",
            calibration=0,
            model=STUDENT,
            optim=optim,
            monitor=monitor,
            device="cpu",
            threads=THREADS,
        )
        run = Path(folder) / "run"
        prepare(config, run, say=lambda text: None).run()
        yield run


# ---------------------------------------------------------------------------------------------------------------- byov


def cached(run: str, count: int) -> Turn:
    """A reference set that has seen these draws before: its features are read."""
    from byov.evaluation.predictive import predict_classes
    from byov.inference.run import ReferenceSet

    opened, probe, tested = _opened(run, count)
    bank = ReferenceSet(opened)
    return steps_of(lambda k: predict_classes(bank, probe, tested, DRAWS))


def included(run: str, count: int) -> Turn:
    """A new reference set, from opening its images to writing its features, in a copy of the run."""
    import byov
    from byov.evaluation.predictive import predict_classes
    from byov.inference.run import ReferenceSet
    from byov.runs.folder import RunFolder

    own = f"{run}-{count}"
    shutil.copytree(run, own)
    _, probe, tested = _opened(run, count)
    opened = byov.load(own)

    def step(_: int) -> None:
        for features in RunFolder(Path(own)).reference.glob("*/"):
            shutil.rmtree(features)
        predict_classes(ReferenceSet(opened), probe, tested, DRAWS)

    return steps_of(step)


def forward(task: str, count: int) -> Turn:
    """Only byov's way of passing images through a network."""
    from byov.inference.run import features_of

    network, tested = classifier(task), images(count) / 255
    return steps_of(lambda k: features_of(network, tested))


def _opened(run: str, count: int) -> tuple[Any, Any, Tensor]:
    """The run, a probe (any will do) and the images."""
    import byov
    from byov.evaluation.probe import Probe

    opened, width = byov.load(run), STUDENT.width or 0
    g = torch.Generator().manual_seed(0)
    weights = torch.randn(CLASSES, width, generator=g, dtype=torch.float64)
    nothing, one = torch.zeros(CLASSES, dtype=torch.float64), torch.ones(width, dtype=torch.float64)
    return opened, Probe(weights, nothing, 0 * one, one, 0.0, 0.0, True), images(count, SIDE)


# --------------------------------------------------------------------------------------------------------------- others


def _network(run: str) -> nn.Module:
    """The run's encoder as it would be without byov, and a linear layer."""
    import byov

    return nn.Sequential(byov.load(run).encoder.unwrapped(), nn.Linear(STUDENT.width or 0, CLASSES)).eval()


def deterministic(run: str, count: int, batch: int) -> Turn:
    """Only the forward pass."""
    network = _network(run)
    return _passes(count, batch, network, lambda outputs: None)


def bayesian_torch(run: str, count: int, batch: int) -> Turn:
    from bayesian_torch.models.dnn_to_bnn import dnn_to_bnn

    network = _network(run)
    settings = {"prior_mu": 0.0, "prior_sigma": 1.0, "posterior_mu_init": 0.0, "posterior_rho_init": -5.0}
    dnn_to_bnn(network, settings | {"type": "Reparameterization", "moped_enable": False})
    return _passes(count, batch, network.eval(), _moments(count))


def torch_uncertainty(run: str, count: int, batch: int) -> Turn:
    from byov.backbones._torchvision import import_torchvision

    import_torchvision()  # it imports torchvision, in the way that fails with a CPU build of torch
    from torch_uncertainty.layers import BayesConv2d, BayesLinear

    torch.distributions.Distribution.set_default_validate_args(False)
    network = _replaced(
        _network(run),
        lambda m: BayesLinear(m.in_features, m.out_features),
        lambda m: BayesConv2d(m.in_channels, m.out_channels, m.kernel_size, stride=m.stride),
    )
    return _passes(count, batch, network.eval(), _moments(count))


def _passes(count: int, batch: int, network: nn.Module, take: Callable[[Tensor], object]) -> Turn:
    """All images through the network once per draw; take(outputs) is called for each draw."""
    tested = images(count, SIDE)

    @torch.no_grad()
    def step(_: int) -> None:
        for _draw in range(DRAWS):
            take(torch.cat([network(part) for part in torch.split(tested, batch)]))

    return steps_of(step)


def _moments(count: int) -> Callable[[Tensor], None]:
    """Mean and variance over draws of the probabilities: what one writes around such a model."""
    total, squares = torch.zeros(count, CLASSES), torch.zeros(count, CLASSES)

    def take(logits: Tensor) -> None:
        probabilities = logits.softmax(1)
        total.add_(probabilities)
        squares.addcmul_(probabilities, probabilities)

    return take


# --------------------------------------------------------------------------------------------------------------- memory


def _fresh(run: Path, draws: int) -> float:
    """MiB at the peak of a process that makes this many draws, without cached reference features."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_predict, args=(there, run, draws))
    process.start()
    there.close()
    peak: float = here.recv()
    process.join()
    return peak


def _predict(pipe: Connection, run: Path, draws: int) -> None:
    from byov.evaluation.predictive import predict_classes
    from byov.inference.run import ReferenceSet
    from byov.runs.folder import RunFolder
    from byov.training.monitors import peak_memory_mib

    torch.set_num_threads(THREADS)
    opened, probe, tested = _opened(str(run), MEMORY_IMAGES)
    for features in RunFolder(run).reference.glob("*/"):
        shutil.rmtree(features)
    predict_classes(ReferenceSet(opened), probe, tested, draws)
    pipe.send(peak_memory_mib(torch.device("cpu")))
