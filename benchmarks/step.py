"""What the posterior costs: a whole BYOV step against plain BYOL, interleaved; peak memory in fresh processes.

    python benchmarks/step.py [--rounds 60] [--out benchmarks/results]

Plain BYOL is an ordinary nn.Module with torch's fused AdamW and a foreach EMA: what one would write without byov. Both
make the same views of the same images. "method byol" is our own BYOL: the posterior with nothing random.
"""

from __future__ import annotations

import argparse
import copy
import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F

from byov.backbones import build_encoder
from byov.config import Config, Model, Optim
from byov.data.images import ImageSet
from byov.data.views import two_views
from byov.training.learners import build_learner
from byov.training.loop import Trainer
from byov.training.monitors import peak_memory_mib
from byov.training.networks import Student
from byov.training.resolve import resolve
from byov.training.step import training_step

MODEL = Model(width=128, depth=4, heads=4, patch=8, head_hidden=512, head_output=128)
BATCH, SIDE = 128, 32


def config(method: str) -> Config:
    base = Config(method=method, model=MODEL, optim=Optim(epochs=1000, batch_size=BATCH))
    return resolve(base, (3, SIDE, SIDE), 4 * BATCH, flips=True)


def images() -> torch.Tensor:
    g = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, (4 * BATCH, 3, SIDE, SIDE), generator=g, dtype=torch.uint8)


def ours(method: str) -> Callable[[int], None]:
    settings = config(method)
    data = ImageSet(images(), None, None)
    trainer = Trainer(settings, Path(), build_learner(settings, (3, SIDE, SIDE), None), data)

    def step(k: int) -> None:
        training_step(trainer.learner, trainer.optimizer, trainer.batches(k), trainer.config, k, trainer.total)

    return step


def plain() -> Callable[[int], None]:
    settings, pixels = config("byol"), images()
    torch.manual_seed(0)
    student = Student(build_encoder(settings.model, (3, SIDE, SIDE)), settings.model)
    teacher = copy.deepcopy(student).requires_grad_(False)
    optimizer = torch.optim.AdamW(student.parameters(), lr=1e-3, weight_decay=0.05, fused=True)

    def step(k: int) -> None:
        ids = torch.arange(BATCH) + BATCH * (k % 4)
        views = two_views(pixels[ids], ids, settings.views, SIDE, 0, k)
        with torch.no_grad():
            targets = [teacher.projector(teacher.encoder(v)) for v in views]
        predictions = [student(v).prediction for v in views]
        cosine = [F.cosine_similarity(p, z) for p, z in zip(predictions, reversed(targets), strict=True)]
        loss = (4 - 2 * cosine[0] - 2 * cosine[1]).mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(student.parameters(), 1.0)
        optimizer.step()
        with torch.no_grad():
            torch._foreach_lerp_(list(teacher.parameters()), list(student.parameters()), 0.01)

    return step


def views_only() -> Callable[[int], None]:
    settings, pixels = config("byol"), images()

    def step(k: int) -> None:
        ids = torch.arange(BATCH) + BATCH * (k % 4)
        two_views(pixels[ids], ids, settings.views, SIDE, 0, k)

    return step


VARIANTS: dict[str, Callable[[], Callable[[int], None]]] = {
    "plain BYOL (nn.Module, torch AdamW)": plain,
    "byov, method byol": lambda: ours("byol"),
    "byov, method byov": lambda: ours("byov"),
    "views alone": views_only,
}
BASELINE = next(iter(VARIANTS))


def interleaved(rounds: int) -> dict[str, list[float]]:
    """Seconds of each variant's steps; in every round all variants run once, in an order that turns."""
    steps = {name: make() for name, make in VARIANTS.items()}
    times: dict[str, list[float]] = {name: [] for name in steps}
    names = list(steps)
    for k in range(rounds + 3):
        for name in names[k % len(names) :] + names[: k % len(names)]:
            begun = time.perf_counter()
            steps[name](k)
            if k >= 3:  # the first rounds warm up
                times[name].append(time.perf_counter() - begun)
    return times


def memory(name: str, steps: int = 12) -> tuple[float, float]:
    """Peak resident MiB of a fresh process that makes some steps of one variant: in all, and above its imports."""
    command = [sys.executable, __file__, "--memory-of", name, "--rounds", str(steps)]
    before, peak = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    return float(peak), float(peak) - float(before)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--memory-of", choices=VARIANTS)
    options = parser.parse_args()
    if options.memory_of:
        before = peak_memory_mib(torch.device("cpu"))
        step = VARIANTS[options.memory_of]()
        for k in range(options.rounds):
            step(k)
        print(before, peak_memory_mib(torch.device("cpu")))
        return
    times = interleaved(options.rounds)
    peaks = {name: memory(name) for name in VARIANTS if name != "views alone"}
    # A step's ratio is taken within its round, where both variants met the same machine.
    ratios = {name: [a / b for a, b in zip(ts, times[BASELINE], strict=True)] for name, ts in times.items()}
    rows = []
    for name, seconds in times.items():
        quartiles = statistics.quantiles(ratios[name], n=4)
        rows.append(
            {
                "variant": name,
                "median_ms": 1e3 * statistics.median(seconds),
                "ratio": statistics.median(ratios[name]),
                "ratio_quartiles": [quartiles[0], quartiles[2]],
                "images_per_second": BATCH / statistics.median(seconds),
                "peak_mib": peaks[name][0] if name in peaks else None,
                "peak_ratio": peaks[name][0] / peaks[BASELINE][0] if name in peaks else None,
                "above_imports_ratio": peaks[name][1] / peaks[BASELINE][1] if name in peaks else None,
            }
        )
    settings = {
        "model": "ViT width 128, depth 4, 16 tokens; heads 512 -> 128",
        "batch": BATCH,
        "rounds": options.rounds,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "machine": platform.machine(),
    }
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "step.json").write_text(json.dumps({"settings": settings, "rows": rows}, indent=2) + "\n")
    lines = [
        "# The cost of a step",
        "",
        f"`make bench`: {settings['model']}; batch {BATCH}, {options.rounds} interleaved rounds, "
        f"{settings['threads']} threads, "
        f"torch {settings['torch']}. Ratios are medians of ratios within a round, with their quartiles.",
        "",
        "| step | median ms | ratio to plain BYOL | quartiles | images/s | peak MiB | ratio | ratio above imports |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        low, high = row["ratio_quartiles"]
        peak = "- | - | -"
        if row["peak_mib"]:
            peak = f"{row['peak_mib']:.0f} | {row['peak_ratio']:.3f} | {row['above_imports_ratio']:.3f}"
        lines.append(
            f"| {row['variant']} | {row['median_ms']:.1f} | {row['ratio']:.3f} | {low:.3f} - {high:.3f} | "
            f"{row['images_per_second']:.0f} | {peak} |"
        )
    text = "\n".join(lines) + "\n"
    (options.out / "step.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
