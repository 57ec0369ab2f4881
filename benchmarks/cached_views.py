"""Adapt pretrained weights with a few cached views per image, and with fresh views in every epoch, and compare them.

    python benchmarks/cached_views.py --images 2000 --views 2 4 8 --seeds 0 --out FOLDER

Trains `adapt-small` by BYOV on CIFAR-10 for each number of cached views and each seed, then with two views per epoch,
so that none is used twice: these are the fresh views of `--views.cached 0`, but pass the trunk faster. All on one
thread. Runs that are in FOLDER already are used as they are. The table has the top-1 of a linear probe on the run's own
images, the mean over seeds; differences are paired by test image, with 95% intervals over images; the seconds are those
of caching and of the steps.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from byov._core.errors import BadInput
from byov.evaluation.probe import fit_probe, load_labelled
from byov.inference.inputs import spread
from byov.inference.run import features_of, load

DATA = "cifar10"
FRESH, START = "fresh", "not adapted"
EPOCHS = 8  # as adapt-small has
TEMPERATURE = 3e-4 / 10_000  # for each training image: adapt-small has 3e-4 for 10,000


def train(out: Path, images: int, seed: int, views: int | None) -> None:
    """Adapt with this many cached views; None: keep the weights as they are."""
    if out.exists():
        return
    method = ["--method", "posthoc"] if views is None else ["--method", "byov", "--views.cached", str(views)]
    method += [] if views is None else ["--optim.epochs", str(EPOCHS)]
    settings = ["--posterior.temperature", str(TEMPERATURE * images), "--seed", str(seed), "--threads", "1"]
    command = [sys.executable, "-m", "byov", "train", "adapt-small", "--data", DATA, "--images", str(images)]
    begun = time.monotonic()
    if subprocess.run([*command, *method, *settings, "--out", str(out)]).returncode:
        raise BadInput(f"the training of {out} failed: see above.")
    (out / "seconds.json").write_text(json.dumps(time.monotonic() - begun))


def correct(folder: Path, tests: int) -> Tensor:
    """(test images,): 1 where a linear probe on the run's own images is right."""
    run = load(folder)
    data, side = load_labelled(run, DATA, lambda what, done, total: None), run.image_shape[-1]
    some = spread(len(data.test), tests)
    known = features_of(run.encoder, data.train.images, size=side)
    probe = fit_probe(known, data.train_labels, classes=data.classes)
    found = probe.probabilities(features_of(run.encoder, data.test.images[some], size=side)).argmax(1)
    return (found == data.test_labels[some]).double()


def paired(ours: Tensor, theirs: Tensor) -> str:
    """The difference in points, with a 95% interval over images, of values (seeds, images)."""
    apart = 100 * (ours - theirs).mean(0)
    return f"{float(apart.mean()):+.2f} ± {1.96 * float(apart.std()) / len(apart) ** 0.5:.2f}"


def table(found: dict[str, Tensor], seconds: dict[str, float], images: int) -> str:
    """Return the comparison in Markdown."""
    seeds = len(found[FRESH])
    lines = [
        f"{images:,} images, {found[FRESH].shape[1]:,} test images, {seeds} seed{'s' * (seeds > 1)}, one thread.",
        "",
        "| views per image | linear probe, top-1 | less fresh views | less not adapted | seconds |",
        "|---|---|---|---|---|",
    ]
    for name, values in found.items():
        cells = ["" if name == other else paired(values, found[other]) for other in (FRESH, START)]
        lines.append(f"| {name} | {100 * float(values.mean()):.1f} | {' | '.join(cells)} | {seconds[name]:.0f} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=2000)
    parser.add_argument("--test-images", type=int, default=4000)
    parser.add_argument("--views", type=int, nargs="+", default=[2, 4, 8], help="cached views per image, even")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--out", type=Path, required=True, help="folder of the runs")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    ways: dict[str, int | None] = {START: None, **{str(views): views for views in options.views}, FRESH: 2 * EPOCHS}
    found: dict[str, Tensor] = {}
    seconds: dict[str, float] = {}
    try:
        for name, views in ways.items():
            folders = [options.out / f"{name.replace(' ', '-')}-{seed}" for seed in options.seeds]
            for folder, seed in zip(folders, options.seeds, strict=True):
                train(folder, options.images, seed, views)
            found[name] = torch.stack([correct(folder, options.test_images) for folder in folders])
            times = [json.loads((folder / "seconds.json").read_text()) for folder in folders]
            seconds[name] = sum(times) / len(times)
            print(f"{name}: {100 * float(found[name].mean()):.1f}", file=sys.stderr, flush=True)
    except BadInput as error:
        sys.exit(f"cached_views.py: {error}")
    print(table(found, seconds, options.images))


if __name__ == "__main__":
    main()
