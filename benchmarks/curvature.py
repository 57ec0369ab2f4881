"""How well can a weight's curvature be measured? Why Newton's variances share one scale per group of weights.

    byov train digits --out runs/digits
    python benchmarks/curvature.py runs/digits --estimates 2000       # 5 minutes on one core

At a run's end, with weights and sigma fixed, each step gives one estimate g (w - mean) / sigma^2 of every weight's
curvature. A row per weight matrix:

    noise          standard deviation of one weight's estimate, over the matrix's mean curvature
    reliability    correlation over weights of the mean of half of the estimates with that of the other half
    g^2            correlation of the mean of g^2, from one half, with the other half's mean estimate, divided by the
                   square root of the reliability: about its correlation with the true curvature
    scale          mean curvature over mean g^2
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import Tensor

from byov._core.randomness import RandomStream
from byov.config import read_config
from byov.runs.folder import RunFolder
from byov.training.prepare import prepare


def correlation(a: Tensor, b: Tensor) -> float:
    return float(torch.corrcoef(torch.stack([a, b]))[0, 1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--estimates", type=int, default=2000)
    parser.add_argument("--sigma", type=float, default=0.02, help="of all weights, while measuring")
    options = parser.parse_args()
    trainer = prepare(read_config(RunFolder(options.run).config), options.run, resume=True)
    learner, posterior = trainer.learner, trainer.learner.posterior
    posterior.train()
    with torch.no_grad():
        posterior.log_variances.fill_(2 * torch.tensor(options.sigma).log())
    halves = [torch.zeros_like(posterior.means.detach()) for _ in range(2)]
    squares = [torch.zeros_like(half) for half in halves]
    spread = torch.zeros_like(halves[0])
    for k in range(options.estimates):
        posterior.reuse_gradients()
        learner.loss(trainer.batches(k % trainer.total)[0], (RandomStream.NOISE, 1, k)).nll.backward()
        assert posterior.means.grad is not None and posterior.log_variances.grad is not None
        estimate = 2 * posterior.log_variances.grad / options.sigma**2
        halves[k % 2] += estimate * 2 / options.estimates
        squares[k % 2] += posterior.means.grad**2 * 2 / options.estimates
        spread += estimate**2 / options.estimates
    print("| matrix | curvature | noise | reliability | g^2 | scale |\n|---|---|---|---|---|---|")
    for segment in posterior.segments:
        if segment.stop - segment.offset < 2048:
            continue
        (a, b), (s, _), one = ([t[segment.offset : segment.stop] for t in ts] for ts in (halves, squares, [spread]))
        curvature, reliability = float((a + b).mean() / 2), correlation(a, b)
        noise = float(one[0].mean().sqrt()) / curvature
        shape = correlation(s, b) / max(reliability, 1e-9) ** 0.5
        row = f"{curvature:.1e} | {noise:.0f} | {reliability:.2f} | {shape:.2f} | {curvature / float(s.mean()):.0f}"
        print(f"| {segment.name.removeprefix('encoder.backbone.')} | {row} |", flush=True)


if __name__ == "__main__":
    main()
