"""Tables that the commands print."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def duration(seconds: float) -> str:
    return (
        f"about {seconds / 60:.0f} minutes on this machine"
        if seconds >= 90
        else "about a minute or less on this machine"
    )


def number(value: Any) -> str:
    return f"{value:,.4g}" if isinstance(value, float) else str(value)


def grid(rows: Sequence[Sequence[str]], align: str) -> str:
    """Align columns of text to the left (l) or to the right (r)."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    sides = {"l": str.ljust, "r": str.rjust}
    lines = ["  ".join(sides[a](cell, w) for cell, w, a in zip(row, widths, align, strict=True)) for row in rows]
    return "\n".join(line.rstrip() for line in lines)


def percentile_note(calibration: int) -> str:
    """Explain what the percentiles refer to, and their precision where it is low."""
    count = "one image that was" if calibration == 1 else f"{calibration:,} images that were"
    rough = f"; with so few, one near 50 is known to {50 / calibration**0.5:.0f} points" if calibration < 100 else ""
    return f"(percentile: among the {count} set aside when the run was trained{rough})"


def oddest(
    names: Sequence[str], oddness: Any, oddness_percentile: Any, uncertainty_percentile: Any, count: int = 5
) -> str:
    """List the oddest images, with the run's uncertainty about them."""

    def text(percentiles: Any, i: int) -> str:
        return "" if percentiles is None else f"{percentiles[i]:.1f}"

    rows = [
        (names[i], f"{oddness[i]:.4g}", text(oddness_percentile, i), text(uncertainty_percentile, i))
        for i in (-oddness).argsort(kind="stable")[:count]
    ]
    return grid([("oddest", "oddness", "percentile", "uncertainty percentile"), *rows], "lrrr")


def pruned(results: dict[str, Any]) -> str:
    """Show the pruning curve, then size and speed."""
    keys = [key for key in ("top1", "ece", "refitted.top1", "refitted.ece", "cosine") if key in results]
    rows = [(f"{row['sparsity']:.3f}", *(f"{row[key]:.4f}" for key in keys), "") for row in results["curve"]]
    for row in results["rounds"]:
        trained = f"trained {row['epochs']} epoch{'s' * (row['epochs'] != 1)}"
        rows.append((f"{row['sparsity']:.3f}", *(f"{row[key]:.4f}" for key in keys), trained))
    table = grid([("sparsity", *keys, ""), *rows], "r" * (1 + len(keys)) + "l")
    size, speed = results["bytes"], results["images_per_second"]
    costs = [
        ("encoder", "weights", "bytes", "compressed", "images/s"),
        *(
            (
                what,
                f"{results['weights'][what]:,}",
                f"{size[what]:,}",
                f"{size[f'{what}_compressed']:,}",
                f"{speed[what]:,.0f}",
            )
            for what in ("unpruned", "pruned")
        ),
    ]
    return f"{table}\n\n{grid(costs, 'lrrrr')}\n({results['note']})"


def measures(name: str, results: dict[str, Any]) -> str:
    """Show the run at its means and over draws, with few labels and fine-tuned, and what it has to beat."""
    keys = ("top1", "ece", "brier", "nll", "aurc", "knn")
    named = {
        "": name,
        "unscaled.": "  4/5 of the labels",
        "scaled.": "  with a temperature",
        "draws.": "  draws",
        "draws_unaligned.": "  draws, not aligned",
        "semi.1.": "  1% of the labels",
        "semi.10.": "  10% of the labels",
        "finetune.": "  fine-tuned",
        "baseline.": "  less the baseline",
        "untrained.": "untrained encoder",
        "pixels.": "raw pixels",
    }
    rows = [
        (row, *(four_digits(results.get(prefix + key)) for key in keys))
        for prefix, row in named.items()
        if f"{prefix}top1" in results
    ]
    return grid([("", *keys), *rows], "l" + "r" * len(keys))


def unlabelled(name: str, results: dict[str, Any]) -> str:
    """Show what was measured without labels, for the run and for what it has to beat."""
    rows = [
        (row, f"{results[f'retrieval.{key}']:.3f}", *more)
        for row, key, more in (
            (name, "encoder", (f"{results['effective_rank']:.1f}", f"{results['feature_std']:.3f}")),
            ("untrained encoder", "untrained", ("", "")),
            ("raw pixels", "pixels", ("", "")),
        )
    ]
    return grid([("", "own image found", "effective rank", "feature std"), *rows], "lrrr")


def shifted(results: dict[str, Any]) -> str:
    """Show the metrics under shifts, averaged over the shifts; empty without --shifts."""
    keys = [tuple(key.split(".")) for key in results if key.startswith("shifts.") and key.endswith(".top1")]
    names = sorted({key[1] for key in keys if len(key) == 4})
    severities = sorted({key[2] for key in keys if len(key) == 4})
    if not keys:
        return ""

    def average(severity: str, measure: str) -> str:
        values = [results.get(f"shifts.{name}.{severity}.{measure}") for name in names]
        known = [value for value in values if value is not None]
        return four_digits(sum(known) / len(known) if known else None)

    measures = ("top1", "ece", "brier", "nll")
    rows = [
        (f"  severity {severity}", *(average(severity, measure) for measure in measures)) for severity in severities
    ]
    return grid([(f"mean of {len(names)} shifts", *measures), *rows], "l" + "r" * len(measures))


def ood(results: dict[str, Any]) -> str:
    """Show the AUROC of each uncertainty in detecting images of other sources; empty without --ood."""
    named = {
        "max_softmax": "probe's confidence",
        "mahalanobis": "class means",
        "label_free_kth_cosine": "oddness",
        "label_free_combined": "draws' disagreement",
    }
    sources = [key.removeprefix("ood.").removesuffix(".images") for key in results if key.startswith("ood.")]
    sources = [source for source in sources if f"ood.{source}.images" in results]
    found = [(title, [results.get(f"ood.{s}.{score}.auroc") for s in sources]) for score, title in named.items()]
    kept = [(title, column) for title, column in found if any(value is not None for value in column)]
    if not sources:
        return ""
    rows = [(f"  {source}", *(four_digits(column[i]) for _, column in kept)) for i, source in enumerate(sources)]
    return grid([("OOD detection, AUROC", *(title for title, _ in kept)), *rows], "l" + "r" * len(kept))


def agreement(found: dict[str, Any]) -> str:
    """Show how a run's predictive std correlates with that of a supervised one, with 95% intervals."""
    pairs = [("predictive std, Spearman", "spearman"), ("given both confidences", "partial_spearman")]
    rows = [
        (f"{prefix}{what}", f"{found[key + name]:.3f}", "{:.3f} to {:.3f}".format(*found[key + name + "_interval"]))
        for prefix, key in (("", ""), ("two supervised runs: ", "ceiling."))
        for what, name in pairs
        if key + name in found
    ]
    return grid(rows, "lrl")


def four_digits(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"
