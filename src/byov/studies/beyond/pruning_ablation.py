"""Ablation of SNR pruning: what mean, sigma and layer each contribute; whole units; retraining.

SNR = |mean| / sigma combines three things: a weight's magnitude, its own sigma, and the typical sigma of its layer.
Each is removed in turn. A factor per layer changes no order within the layer, so `magnitude_by_layer` differs from
`magnitude` only where all layers are ranked together: there it shows how much of SNR is the scale of the layers.

The first of the next checks and the third open question in the reader's summary.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import mean, stdev
from typing import Any, Literal

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter
from torch import Tensor, nn

from byov._core.callbacks import Say
from byov._core.randomness import RandomStream, permutation
from byov.config import Config
from byov.data.transforms import resized
from byov.evaluation.probe import Subject
from byov.inference.run import Run, load
from byov.metrics import top_k_accuracy
from byov.metrics.resampling import RESAMPLES
from byov.posterior import Posterior
from byov.pruning.criteria import (
    By,
    Pruning,
    choose_masks,
    drop_weights,
    prunable_weights,
    sparsity_of,
    weight_scores,
)
from byov.pruning.prune import (
    BATCH,
    encoder_masks,
    encoder_of,
    images_per_second,
    prune,
    pruned_subject,
    stored_bytes,
    top1_and_ece,
    without,
)
from byov.pruning.structured import compact
from byov.report.plots.seed_plots import COLOURS, MARKERS, STYLE
from byov.studies.framework.claims import Claim, Effect, Effects, Row, Rows, differences, select
from byov.studies.framework.lab import Lab
from byov.studies.measurements.pruned import room_above, start_caveats, start_of, tested_subject, top1_difference
from byov.training.loop import Trainer

TITLE = "ablation of SNR pruning: mean, sigma, layers; whole units; retraining; bytes and speed"
Scope = Literal["layer", "global"]
PARTS = {
    "snr": "SNR",
    "magnitude": "magnitude",
    "variance": "1 / sigma alone",
    "snr_shuffled": "SNR, sigma shuffled",
    "magnitude_by_layer": "magnitude / layer's sigma",
}
SCOPES: tuple[Scope, ...] = ("layer", "global")
SPARSITIES = (0.25, 0.5, 0.75, 0.9)
UNITS = (0.25, 0.5)  # sparsities of whole units
RETRAINED, ROUNDS = 0.9, 3  # the sparsity that is reached in so many rounds of pruning and training
ROUND = 30  # a round takes the run's own epochs divided by this
IMAGES = 2000  # test images at most
JUDGED = 0.5  # the sparsity that claims are judged at


def runs(lab: Lab) -> list[Config]:
    return lab.configs("byov", "byol")


def results(lab: Lab) -> Rows:
    """A row for each run, kind (single weights, units, retrained), score, scope and sparsity."""
    settings = {"parts": list(PARTS), "scopes": SCOPES, "sparsities": SPARSITIES, "units": UNITS, "images": IMAGES}
    settings |= {"retrained": RETRAINED, "rounds": ROUNDS, "round_epochs": f"1/{ROUND}", "resamples": RESAMPLES}
    return [
        {"method": config.method, **row}
        for config in runs(lab)
        for row in lab.measured_rows("pruning-ablation", config, partial(ablation_rows, say=lab.say), settings)
    ]


# --------------------------------------------------------------------------------------------------------- measurement


def ablation_rows(run: Run, say: Say) -> Rows:
    """Return all rows of one run: single weights and, where weights are random, whole units and retraining."""
    subject = tested_subject(run, say, IMAGES)
    rows = [_unpruned(subject), *weight_rows(subject)]
    if not run.deterministic:
        rows += [*unit_rows(subject), *retrained_rows(subject, say)]
    start = start_of(run)
    return [row | start for row in rows]


def part_scores(posterior: Posterior, part: str, seed: int = 0) -> dict[str, Tensor]:
    """Score every prunable weight of the encoder, by parameter name; the lowest is pruned first.

    `snr`, `magnitude` and `variance` are those of `byov prune`; `snr_shuffled` gives each weight the sigma of another
    weight of its layer; `magnitude_by_layer` divides by the layer's mean sigma instead of the weight's own.
    """
    if part in ("snr", "magnitude", "variance"):
        return weight_scores(posterior, part)  # type: ignore[arg-type]
    sigmas = {name: 1 / score for name, score in weight_scores(posterior, "variance").items()}
    magnitudes = weight_scores(posterior, "magnitude")
    if part == "magnitude_by_layer":
        return {name: magnitudes[name] / sigma.mean() for name, sigma in sigmas.items()}
    if part != "snr_shuffled":
        raise ValueError(f"there is no part {part!r}: use one of {', '.join(PARTS)}.")
    return {
        name: magnitudes[name]
        / sigma.flatten()[permutation(sigma.numel(), RandomStream.SHUFFLED_SIGMA, seed, place)].view_as(sigma)
        for place, (name, sigma) in enumerate(sigmas.items())
    }


def _unpruned(subject: Subject) -> Row:
    probabilities = subject.probe.probabilities(subject.test_features)
    measures = _measures(subject, encoder_of(subject.run), probabilities)
    return {"kind": "none", "by": None, "scope": None, "asked": 0.0, "sparsity": 0.0, **measures} | {
        "refitted.top1": measures["top1"],
        "speed": 1.0,
    }


def weight_rows(subject: Subject) -> Iterator[Row]:
    """Every part, scope and sparsity; where nothing is random, by magnitude alone."""
    run, posterior = subject.run, subject.run.learner.posterior
    prunable = prunable_weights(posterior)
    others = [] if run.deterministic else [part for part in PARTS if part != "magnitude"]
    scores = {part: part_scores(posterior, part, run.config.seed) for part in ("magnitude", *others)}
    for scope in SCOPES:
        for sparsity in SPARSITIES:
            by_magnitude: Tensor | None = None
            for part, score in scores.items():
                masks = drop_weights(score, sparsity, scope)
                pruned = pruned_subject(subject, masks)
                own = subject.probe.probabilities(pruned.test_features)
                by_magnitude = own if by_magnitude is None else by_magnitude  # magnitude comes first
                row = {"kind": "weights", "by": part, "scope": scope, "asked": sparsity}
                row |= {"sparsity": sparsity_of(masks, prunable)}
                row |= _measures(subject, pruned.encoder, own)
                row |= top1_difference("top1", own, by_magnitude, subject.data.test_labels)
                last = sparsity == RETRAINED and scope == "layer" and part in ("snr", "magnitude")
                yield row | {"refitted.top1": _refitted(pruned) if last else None, "speed": 1.0}


def _measures(subject: Subject, encoder: nn.Module, probabilities: Tensor) -> Row:
    """Accuracy and calibration through the unpruned encoder's probe, and the encoder's compressed size."""
    found = top1_and_ece(probabilities, subject.data.test_labels)
    return found | {"compressed_bytes": stored_bytes(encoder, compressed=True)}


def _refitted(pruned: Subject) -> float:
    return top_k_accuracy(pruned.probe.probabilities(pruned.test_features), pruned.data.test_labels, 1)


def unit_rows(subject: Subject) -> Iterator[Row]:
    """Yield rows for pruned neurons and heads (or channels): the network gets smaller, so its speed is measured too."""
    run = subject.run
    posterior, encoder = run.learner.posterior, encoder_of(run)
    prunable = prunable_weights(posterior)
    batch = resized(subject.test_images[:BATCH], subject.side)
    by: By
    for by in ("magnitude", "snr"):
        for sparsity in UNITS:
            masks = choose_masks(posterior, Pruning(by, sparsity, structured=True), sparsity, {})
            smaller = compact(without(encoder, masks), encoder_masks(masks))
            pruned = replace(subject, encoder=smaller)
            before, after = images_per_second([encoder, smaller], batch)
            own = subject.probe.probabilities(pruned.test_features)
            row = {"kind": "units", "by": by, "scope": "layer", "asked": sparsity}
            row |= {"sparsity": sparsity_of(masks, prunable), **_measures(subject, smaller, own)}
            yield row | {"refitted.top1": _refitted(pruned), "speed": after / before, "images_per_second": after}


def retrained_rows(subject: Subject, say: Say) -> Iterator[Row]:
    """Yield rows for rounds of pruning by SNR and training, in a temporary folder, measured on the same images.

    No run is retrained after pruning by magnitude: the rows show what retraining recovers, not what SNR adds to it.
    """
    run, after = subject.run, []
    how = Pruning("snr", RETRAINED, rounds=ROUNDS, epochs=max(1, run.config.optim.epochs // ROUND))

    def train(trainer: Trainer) -> None:
        trainer.run()
        after.append(encoder_of(load(trainer.folder, run.encoder.means.device.type)))

    with tempfile.TemporaryDirectory() as folder:
        found = prune(run, Path(folder) / "pruned", how, curve=(), say=say, train=train)
    for number, (encoder, reported) in enumerate(zip(after, found["rounds"], strict=True), 1):
        pruned = replace(subject, encoder=encoder)
        own = subject.probe.probabilities(pruned.test_features)
        row = {"kind": "retrained", "by": "snr", "scope": "layer", "asked": how.sparsity_after(number, 0.0)}
        row |= {
            "sparsity": reported["sparsity"],
            **_measures(subject, encoder, own),
            "refitted.top1": _refitted(pruned),
        }
        last = number == how.rounds
        yield row | {"compressed_bytes": found["bytes"]["pruned_compressed"] if last else None, "speed": 1.0}


# -------------------------------------------------------------------------------------------------------------- claims


def score_effects(rows: Rows, by: str, against: str = "magnitude") -> list[Effect]:
    """Points of top-1 that one score keeps more than another: half of each layer's weights pruned, probe not refitted.

    Each row is compared with magnitude. Without replicates, the errors of two such differences are added in squares.
    """
    mine, other = ({e.seed: e for e in differences(rows, "top1", by=name, **WHERE)} for name in (by, against))
    return [minus(effect, other[seed]) for seed, effect in mine.items()]


def minus(one: Effect, other: Effect) -> Effect:
    """Return the difference of two effects over the same images."""
    value = one.value - other.value
    if one.replicates is None or other.replicates is None:
        return Effect(one.seed, value, math.hypot(one.error, other.error))
    replicates = tuple(a - b for a, b in zip(one.replicates, other.replicates, strict=True))
    return Effect(one.seed, value, stdev(replicates), replicates)


def _room(against: str) -> Effects:
    """Make the rule for how far the unpruned encoder lies above the one pruned by a score."""
    return lambda rows: room_above(select(rows, by=against, **WHERE), select(rows, method="byov", kind="none"))


WHERE: dict[str, Any] = {"method": "byov", "kind": "weights", "scope": "layer", "asked": JUDGED}


def _caveats(rows: Rows) -> list[str]:
    return start_caveats(select(rows, method="byov"))


# The paper's 12 points are its maximum over sparsities. At a fixed sparsity: one point, as in fig4-pruning.
LEAST = 1.0
CLAIMS = [
    Claim(
        where="reader's summary, mechanism 2",
        says="A weight's own sigma matters: SNR keeps more accuracy than SNR with sigma shuffled within the layer.",
        paper="up to 12 points of top-1 (SNR against magnitude)",
        unit="points of top-1",
        size=LEAST,
        effects=lambda rows: score_effects(rows, "snr", "snr_shuffled"),
        room=_room("snr_shuffled"),
        caveats=_caveats,
    ),
    Claim(
        where="reader's summary, mechanism 2",
        says="A weight's variance shows its importance better than its magnitude does.",
        paper="up to 12 points of top-1 (SNR against magnitude)",
        unit="points of top-1",
        size=LEAST,
        effects=lambda rows: score_effects(rows, "variance"),
        room=_room("magnitude"),
        caveats=_caveats,
    ),
]


# -------------------------------------------------------------------------------------------------------------- figure


def draw(rows: Rows, scale: str) -> Figure:
    """Accuracy over sparsity by part, per layer and global; units and retraining; accuracy over bytes."""
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(11, 3.6), layout="constrained")
        layer, everywhere, probed, size = figure.subplots(1, 4)
        for axes, scope in zip((layer, everywhere), SCOPES, strict=True):
            for i, by in enumerate(PARTS):
                _line(axes, select(rows, method="byov", kind="weights", scope=scope, by=by), i, PARTS[by])
            _line(axes, select(rows, method="byol", kind="weights", scope=scope, by="magnitude"), 6, "BYOL, magnitude")
            axes.set_title("lowest of each layer" if scope == "layer" else "lowest of all layers", fontsize=8)
            axes.set_ylabel("top-1, probe not refitted (%)")
        fitted = [row for row in select(rows, method="byov") if row["refitted.top1"] is not None]
        for i, (kind, by, label) in enumerate(
            (
                ("weights", "snr", "weights, SNR"),
                ("weights", "magnitude", "weights, magnitude"),
                ("units", "snr", "units, SNR"),
                ("units", "magnitude", "units, magnitude"),
                ("retrained", "snr", "SNR, retrained each round"),
            )
        ):
            here = select(fitted, kind=kind, by=by)
            _line(probed, here, i, label, "refitted.top1")
            _line(size, [row for row in here if row["compressed_bytes"]], i, label, "refitted.top1", "compressed_bytes")
        unpruned = select(fitted, kind="none")
        for axes in (probed, size):
            axes.axhline(100 * mean(row["top1"] for row in unpruned), color="0.3", linewidth=1)
            axes.set_ylabel("top-1, probe refitted (%)")
        probed.set_title("units and retraining (line: unpruned)", fontsize=8)
        units = select(fitted, kind="units")
        for by, asked in sorted({(row["by"], row["asked"]) for row in units}):
            here = select(units, by=by, asked=asked)
            x, y, speed = (mean(row[key] for row in here) for key in ("compressed_bytes", "refitted.top1", "speed"))
            above = 4 if by == "magnitude" else -9  # the dots overlap
            place, offset = (x / 1024, 100 * y), (4, above)
            size.annotate(f"{speed:.1f}x", place, textcoords="offset points", xytext=offset, fontsize=6)
        size.margins(x=0.15)
        size.set_title("compressed size (units: speed)", fontsize=8)
        size.set_xlabel(f"KiB after zlib (unpruned: {mean(r['compressed_bytes'] for r in unpruned) / 1024:.0f})")
        for axes in (layer, everywhere, probed):
            axes.set_xlabel("sparsity")
            axes.xaxis.set_major_formatter(PercentFormatter(1))
        handles, texts = everywhere.get_legend_handles_labels()
        figure.legend(handles, texts, loc="outside lower left", ncols=3, fontsize=7)
        handles, texts = probed.get_legend_handles_labels()
        figure.legend(handles, texts, loc="outside lower right", ncols=3, fontsize=7)
        figure.suptitle(f"Ablation of SNR pruning ({scale}); bands: all seeds")
        return figure


def _line(axes: Axes, rows: Rows, slot: int, label: str, measure: str = "top1", x: str = "sparsity") -> None:
    """Draw the mean over seeds with a band from smallest to largest, by the requested sparsity."""
    points = []
    for asked in sorted({row["asked"] for row in rows}):
        here = select(rows, asked=asked)
        found = [100 * row[measure] for row in here]
        points.append((mean(row[x] for row in here) / (1024 if x != "sparsity" else 1), found))
    if not points:
        return
    places, values = [place for place, _ in points], [found for _, found in points]
    colour = COLOURS[slot % len(COLOURS)]
    marker = MARKERS[slot % len(MARKERS)]
    axes.plot(places, [mean(found) for found in values], color=colour, marker=marker, ms=4, lw=1.2, label=label)
    axes.fill_between(places, list(map(min, values)), list(map(max, values)), color=colour, alpha=0.15, linewidth=0)
