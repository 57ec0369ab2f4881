"""Has sigma settled? Compare runs that differ in where sigma starts, in length or in temperature.

    byov train digits --posterior.init-log-variance -8 --out runs/start-8      # likewise -10, -11, -14
    byov train digits --optim.epochs 90 --out runs/twice
    byov evaluate runs/start-8 --draws 20                                      # and so on
    python benchmarks/settled.py runs/start-10 runs/start-8 runs/start-11 runs/twice --picture settled.png

A row per run. "Largest difference" is that of a layer's median sigma from the first run, over layers whose sigma is not
the prior's; only weight matrices count for "of matrices". "Balance" is the median over layers, of the last third of the
run, of sigma^2 (1 / v + N h / (beta T)): 1 where sigma has settled.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

from byov.config import read_config
from byov.runs.folder import RunFolder, read_log

AT_PRIOR = 0.5  # of the prior's sigma


def layers(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Return the rows of each layer by epoch."""
    found: dict[str, list[dict[str, Any]]] = {}
    for row in read_log(RunFolder(folder).posterior).rows:
        found.setdefault(row["layer"], []).append(row)
    return found


def summary(folder: Path, first: Path) -> dict[str, Any]:
    """Return one row of the table."""
    config, own, others = read_config(RunFolder(folder).config), layers(folder), layers(first)
    sigmas = {name: rows[-1]["sigma_median"] for name, rows in own.items()}
    gaps = {
        name: sigma / others[name][-1]["sigma_median"] - 1
        for name, sigma in sigmas.items()
        if sigma < AT_PRIOR and others[name][-1]["sigma_median"] < AT_PRIOR
    }
    matrices = [gap for name, gap in gaps.items() if own[name][-1]["weights"] >= 2048]
    balances = [statistics.mean(r.get("balance", 0.0) for r in rows[-len(rows) // 3 :]) for rows in own.values()]
    steps = json.loads(RunFolder(folder).summary.read_text())
    results = RunFolder(folder).results / "evaluation.json"
    measured = json.loads(results.read_text()) if results.is_file() else {}
    return {
        "run": folder.name,
        "start": config.posterior.init_log_variance,
        "steps": steps["steps"],
        "temperature": config.posterior.temperature,
        "median sigma": steps["median_sigma"],
        "largest difference": max(gaps.values(), key=abs),
        "of matrices": max(matrices, key=abs),
        "balance": statistics.median(balances),
        "elbo_margin": steps.get("elbo_margin"),
        "top1": measured.get("top1"),
        "draws.top1": measured.get("draws.top1"),
        "draws_unaligned.top1": measured.get("draws_unaligned.top1"),
    }


def picture(folders: list[Path], out: Path) -> None:
    """Draw the median sigma of some layers over the epochs, one line per run."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    known = layers(folders[0])
    names = [name for name, rows in known.items() if rows[-1]["weights"] >= 2048]
    chosen = names[:: max(1, len(names) // 6)][:6]
    figure, axes = pyplot.subplots(2, 3, figsize=(10, 5.5), sharex=True, sharey=True, layout="constrained")
    for axis, name in zip(axes.flat, chosen, strict=False):
        for folder in folders:
            rows = layers(folder)[name]
            last = rows[-1]["step"]
            axis.plot([r["step"] / last for r in rows], [r["sigma_median"] for r in rows], label=folder.name)
        axis.set(yscale="log", title=name.replace("encoder.backbone.", ""))
        axis.title.set_fontsize(9)
    axes[0, 0].legend(fontsize=8, frameon=False)
    figure.supxlabel("part of the run")
    figure.supylabel("median sigma")
    figure.savefig(out, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--picture", type=Path)
    options = parser.parse_args()
    rows = [summary(folder, options.runs[0]) for folder in options.runs]
    print("| " + " | ".join(rows[0]) + " |")
    print("|" + "---|" * len(rows[0]))
    for row in rows:
        print("| " + " | ".join(f"{v:.4g}" if isinstance(v, float) else str(v) for v in row.values()) + " |")
    if options.picture:
        picture(options.runs, options.picture)


if __name__ == "__main__":
    main()
