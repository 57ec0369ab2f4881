"""Measure `byov score --fast`: what it costs as an ONNX graph, and how well it predicts the uncertainty over draws.

    python benchmarks/one_pass.py RUN [RUN ...]          # both
    python benchmarks/one_pass.py RUN --cost             # time of the graph with scores / time of the encoder's

The cost is taken in onnxruntime on one thread, in CPU time, the two graphs in turns; the median of the turns' ratios.
The agreement is Spearman's correlation with the score over draws: of reference images left out of the fit, and of the
calibration images, which were never seen. It is reported with the reliability of the score over draws: the correlation
of one half of the draws with the other, corrected for all draws (Spearman and Brown).
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from byov.export import MOST, export
from byov.inference.run import ReferenceFeatures, ReferenceSet, Run, load
from byov.metrics.correlation import spearman
from byov.scoring.one_pass import FastScorer
from byov.scoring.scores import Scorer, reference_scores

BATCHES = (1, 8, 32)
IMAGES = 320  # in each turn's series, of any batch


class Later(ReferenceSet):
    """A bank whose draws begin later."""

    def __init__(self, run: Run, skip: int) -> None:
        super().__init__(run)
        self.skip = skip

    def at(self, k: int | None) -> ReferenceFeatures:
        return super().at(None if k is None else k + self.skip)


def agreement(run: Run, draws: int) -> dict[str, Any]:
    """How well the head predicts, and how reliable what it predicts is."""
    fast, full = FastScorer(run, draws=draws), Scorer(run, draws=draws)
    halves = [reference_scores(Later(run, skip), full.uncertainty, draws // 2) for skip in (0, draws // 2)]
    half = float(spearman(*halves))
    images = fast.reference.calibration_images()
    unseen = spearman(fast.scores(images).uncertainty, full.scores(images).uncertainty)
    return {
        "uncertainty": full.uncertainty,
        "reference_images": len(halves[0]),
        "left_out": fast.model.agreement,
        "reliability": 2 * half / (1 + half),
        "calibration_images": len(images),
        "calibration": float(unseen),
    }


def cost(run: Run) -> dict[str, Any]:
    """Time of a graph with scores, in units of the encoder's, by batch size."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    with tempfile.TemporaryDirectory() as folder:
        paths = [export(run, "onnx", Path(folder) / f"{w}.onnx", with_uncertainty=w) for w in (False, True)]
        graphs = [onnxruntime.InferenceSession(str(p), options, providers=["CPUExecutionProvider"]) for p in paths]
    found: dict[str, Any] = {"reference_images": min(MOST, len(ReferenceSet(run).means.features))}
    for batch in BATCHES:
        images = torch.rand(batch, *run.image_shape).numpy()
        turns: list[list[float]] = []
        for turn in range(2 + max(10, IMAGES // batch)):
            seconds = [0.0, 0.0]
            for which in (0, 1) if turn % 2 else (1, 0):
                begun = time.process_time()
                graphs[which].run(None, {"images": images})
                seconds[which] = time.process_time() - begun
            turns.append(seconds)
        plain, ratio = (statistics.median(values) for values in zip(*((a, b / a) for a, b in turns[2:]), strict=True))
        found[f"batch {batch}"] = {"ratio": round(ratio, 3), "encoder_ms_per_image": round(1e3 * plain / batch, 2)}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--cost", action="store_true", help="only the cost")
    parser.add_argument("--agreement", action="store_true", help="only the agreement")
    parser.add_argument("--draws", type=int, default=8)
    options = parser.parse_args()
    torch.set_num_threads(1)
    for folder in options.runs:
        run = load(folder)
        if not options.cost:
            print(folder, json.dumps(agreement(run, options.draws)), flush=True)
        if not options.agreement:
            print(folder, json.dumps(cost(run)), flush=True)


if __name__ == "__main__":
    main()
