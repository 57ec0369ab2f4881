"""Measure every part, then write results.json and results.md: `make bench`.

    python benchmarks/run.py [--quick] [--only views memory] [--out FOLDER] [--render] [--threads N] [--busy]

Each part's numbers are saved to results.json as soon as they are measured. `--only` replaces those of some parts;
`--render` only writes the table again.
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import importlib.metadata
import json
import os
import platform
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
PARTS = (
    "bayesian_step",
    "byol_step",
    "views",
    "startup",
    "listing",
    "memory",
    "updates",
    "processes",
    "growth",
    "tricks",
    "compiled",
    "inference",
    "scoring",
    "predictive",
)
QUICK = ("bayesian_step", "byol_step", "views", "startup")  # a first look: the other parts only with --only
BUSY = {"OMP_WAIT_POLICY": "passive"}
SHOWN = (
    "torch",
    "torchvision",
    "byov-torch",
    "bayesian-torch",
    "torch-uncertainty",
    "blitz-bayesian-pytorch",
    "ivon-opt",
    "lightly",
    "kornia",
    "timm",
)


def main() -> None:
    options = _options()
    # Before torch is imported anywhere: the workers inherit it.
    if options.busy:
        os.environ |= BUSY
    if options.threads:
        os.environ["BENCH_THREADS"] = str(options.threads)
    from conductor import THREADS

    path = options.out / "results.json"
    if options.render and not path.is_file():
        print(f"{path} does not exist: measure first, without --render.", file=sys.stderr)
        sys.exit(2)
    options.out.mkdir(parents=True, exist_ok=True)
    results: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"parts": {}}
    for part in [] if options.render else options.only or (QUICK if options.quick else PARTS):
        print(f"{part} ...", flush=True)
        begun = time.perf_counter()
        numbers = importlib.import_module(part).measure(options.quick)
        seconds = time.perf_counter() - begun
        print(f"{part}: {seconds:.0f} s", flush=True)
        how = {"date": datetime.date.today().isoformat(), "seconds": seconds, "threads": THREADS}
        results["parts"][part] = how | {"quick": options.quick, "busy": options.busy, "numbers": numbers}
        results["machine"] = machine()
        path.write_text(json.dumps(results, indent=1) + "\n")
    from table import render

    text = render(results, HERE / "accuracy")
    (options.out / "results.md").write_text(text)
    print(text)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="four parts, few rounds: 3 minutes, not for the record")
    parser.add_argument("--only", nargs="+", choices=PARTS, help="these parts")
    parser.add_argument("--out", type=Path, default=HERE, help="folder of results.json and results.md")
    parser.add_argument("--render", action="store_true", help="measure nothing, write the table again")
    parser.add_argument("--threads", type=int, help="of every variant (default: one per core)")
    parser.add_argument(
        "--busy",
        action="store_true",
        help="others use the machine too: waiting threads sleep. By default OpenMP's spin, and two of them that share "
        "a core wait for each other: a step can then take ten times as long",
    )
    return parser.parse_args()


def machine() -> dict[str, Any]:
    """Describe the machine."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "cpu": names[0] if names else platform.processor() or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30,
        "python": platform.python_version(),
        "versions": {name: version for name in SHOWN if (version := _version(name))},
    }


def _version(package: str) -> str | None:
    """None if it is not installed: one part alone does not need all peers."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


if __name__ == "__main__":
    main()
