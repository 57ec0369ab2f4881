"""Run folders for tests of the page: real digits, numbers made up."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import yaml

from byov._core.cache import Entry, write_entry
from byov.config import Config, to_dict
from byov.data.sources import open_source
from byov.evaluation.evaluate import fingerprint
from byov.scoring.scores import DEFAULT, DEFAULT_AT_MEANS

SHIFTS = ("salt_pepper", "blur")
SCORES = ("max_softmax", f"label_free_{DEFAULT_AT_MEANS}", f"label_free_{DEFAULT}")


def shift_results(ece: float, top1: float) -> dict[str, float]:
    """Worse with each severity by a hundredth."""
    found = {"ece": ece, "top1": top1}
    for name in SHIFTS:
        for severity in range(1, 6):
            found[f"shifts.{name}.{severity}.ece"] = ece + severity / 100
            found[f"shifts.{name}.{severity}.top1"] = top1 - severity / 100
    return found


def uncertainty_results() -> dict[str, float]:
    found = {}
    for i, score in enumerate(SCORES):
        found |= {f"selective.{score}.error_auroc": 0.9 - i / 10, f"selective.{score}.aurc": 0.01 + i / 10}
        found |= {f"ood.mnist.{score}.auroc": 0.6 + i / 10, f"ood.folder-x.{score}.auroc": 0.8 - i / 10}
    return found


def pruning_results() -> dict[str, Any]:
    points = [(0.0, 0.95), (0.5, 0.9), (0.9, 0.4)]
    curve = [{"sparsity": s, "top1": t, "refitted.top1": t + 0.03, "ece": 0.1, "refitted.ece": 0.05} for s, t in points]
    return curve[1] | {
        "curve": curve,
        "rounds": [],
        "bytes": {"pruned_compressed": 231_447, "unpruned_compressed": 372_001},
        "images_per_second": {"pruned": 11364.0, "unpruned": 11364.0},
        "settings": {"by": "snr", "scope": "layer"},
    }


def full_run(folder: Path, method: str = "byov", ece: float = 0.04, top1: float = 0.95) -> Path:
    """A run that is evaluated in every way. Image i of the test images has score i; the probe errs in every tenth."""
    (folder / "results").mkdir(parents=True)
    config = Config(method=method, image_size=8)  # type: ignore[arg-type]
    (folder / "config.yaml").write_text(yaml.safe_dump(to_dict(config)))
    test = open_source("digits").load("test")
    scores = {f"score.{name}": torch.arange(len(test)).double() for name in SCORES}
    right = (torch.arange(len(test)) % 10 != 0).double()
    entry = Entry(scores | {"means.top1": right}, {"images": fingerprint(test)})
    write_entry(folder / "results" / "evaluation.safetensors", entry)
    bins = [[10, (i + 0.5) / 15, (i + 0.3) / 15] for i in range(15)]
    results = shift_results(ece, top1) | uncertainty_results() | {"bins": bins, "settings": {"data": "digits"}}
    (folder / "results" / "evaluation.json").write_text(json.dumps(results))
    (folder / "results" / "pruning.json").write_text(json.dumps(pruning_results()))
    return folder


def change_results(run: Path, changes: dict[str, Any]) -> None:
    path = run / "results" / "evaluation.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
