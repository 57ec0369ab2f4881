"""Train 10,000 steps with each prior, in float32 and bfloat16, and report whether every number stayed finite.

    python benchmarks/numerics.py                          # about 20 minutes on one core
    python benchmarks/numerics.py --steps 1000 --priors teacher_moments

The network is small (4,128 weights on digits), and the schedules are those of the recipe `digits`. Every logged row is
checked: loss, KL, gradient norm, and sigma.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from byov._core.errors import TrainingFailed
from byov.config import merge, read_recipe
from byov.runs.folder import RunFolder, read_log
from byov.training.prepare import prepare

PRIORS = ("standard", "teacher_mean", "teacher_moments", "pretrained")
PRECISIONS = ("32-true", "bf16-mixed")
BATCH, IMAGES = 16, 320
SMALL = {
    "images": IMAGES,
    "calibration": 0,
    "threads": 1,
    "model": {"width": 16, "depth": 1, "heads": 2, "head_hidden": 16, "head_output": 8},
    "monitor": {"tensorboard": False, "log_every": 20, "knn_every": 0, "checkpoint_seconds": 1e9},
}


class Result(NamedTuple):
    """One training."""

    prior: str
    precision: str
    steps: int
    loss: float
    kl: float
    largest_kl: float
    largest_gradient: float
    sigma: str
    """Smallest and largest over layers and epochs of the largest sigma of a layer."""
    verdict: str


def trained(prior: str, precision: str, steps: int, folder: Path) -> Result:
    """Train, and summarise the log."""
    settings = {"precision": precision, "posterior": {"prior": prior}}
    config = merge(merge(read_recipe("digits", "byov"), SMALL, "numerics"), settings, "numerics")
    optim = {"batch_size": BATCH, "epochs": steps // (IMAGES // BATCH)}
    config = merge(
        config, {"optim": optim, **({"init": str(folder / "start")} if prior == "pretrained" else {})}, "numerics"
    )
    out = folder / f"{prior}-{precision}"
    trainer = prepare(config, out, say=lambda text: None)
    trainer.say = lambda text: None
    verdict = "finite"
    try:
        trainer.run()
    except TrainingFailed as error:
        verdict = str(error)
    rows = read_log(RunFolder(out).metrics).rows
    layers = read_log(RunFolder(out).posterior).rows
    for row in (*rows, *layers):
        bad = [key for key, value in row.items() if isinstance(value, float) and not math.isfinite(value)]
        if bad and verdict == "finite":
            verdict = f"{bad[0]} is not finite at step {row['step']}"
    most = [row["sigma_max"] for row in layers]
    return Result(
        prior,
        precision,
        trainer.step,
        rows[-1]["loss"],
        rows[-1]["kl"],
        max(row["kl"] for row in rows),
        max(row["grad_norm"] for row in rows),
        f"{min(most):.2g} to {max(most):.2g}",
        verdict,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--priors", nargs="+", choices=PRIORS, default=PRIORS)
    parser.add_argument("--precisions", nargs="+", choices=PRECISIONS, default=PRECISIONS)
    given = parser.parse_args()
    print("| prior | precision | steps | loss | KL | largest KL | largest gradient | sigma | verdict |")
    print("|---|---|---|---|---|---|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        if "pretrained" in given.priors:
            start = merge(read_recipe("digits", "byov"), SMALL | {"optim": {"epochs": 2, "batch_size": BATCH}}, "start")
            first = prepare(start, folder / "start", say=lambda text: None)
            first.say = lambda text: None
            first.run()
        results = []
        for precision in given.precisions:
            for prior in given.priors:
                begun = time.monotonic()
                results.append(r := trained(prior, precision, given.steps, folder))
                numbers = f"{r.loss:.3f} | {r.kl:.4g} | {r.largest_kl:.4g} | {r.largest_gradient:.3g}"
                print(f"| {r.prior} | {r.precision} | {r.steps} | {numbers} | {r.sigma} | {r.verdict} |", flush=True)
                print(f"{time.monotonic() - begun:.0f} s", file=sys.stderr)
    sys.exit(any(result.verdict != "finite" for result in results))


if __name__ == "__main__":
    main()
