"""Choose the temperature and the learning rate of the log-variances; the chosen pair is called the working point.

A point works where BYOV is as accurate as BYOL and its draws are informative. Averaged over seeds:
  (a) the probe at the means is within 2 points of the fair BYOL,
  (b) 20 aligned draws are within 2 points of the means,
  (c) the median sigma has settled: it changes by less than 20% when the steps double and the rate of the log-variances
      halves, as it does by default (`schedules.log_variance_rate`: at a fixed rate sigma grows),
  (d) the median sigma has left its initial value: it has grown or shrunk by at least half. (One that never moved would
      count as settled.)
All are measured with a probe on held-out training images; the test images are only reported. Of the points that work,
the hottest is chosen: its sigma is as large as accuracy allows, and so tells most. The map is made with the first seed.
Then, hottest first, points that have left their initial sigma and are within twice the tolerance of (a) and (b) get the
other seeds, and those that still satisfy (a) and (b) get twice the steps, until one has settled.
"""

from __future__ import annotations

from dataclasses import replace
from math import exp, log10
from statistics import mean
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from byov.config import Config
from byov.evaluation.measures import held_out
from byov.evaluation.predictive import below, probe_predictions
from byov.evaluation.probe import Labelled, Subject, load_labelled
from byov.inference.run import Run
from byov.metrics import brier, ece, nll, top_k_accuracy
from byov.report.plots.seed_plots import BLUE, ORANGE, PURPLE
from byov.studies.framework.claims import Row, Rows, select
from byov.studies.framework.compare import weight_spread
from byov.studies.framework.lab import Lab

TITLE = "the working point: temperature x learning rate of the log-variances"
TRAINS_MORE = True  # than `runs` names, once the first results are known
TEMPERATURES = (1e-4, 1e-3, 1e-2, 1e-1)
RATES = (5e-3, 2e-2)
CHOOSE = "validation."  # prefix of the measures to choose by
POINTS, SETTLED, LEFT = 0.02, 0.20, 1.5  # within 2 points of top-1; under 20% change; by half at least


def _point(lab: Lab, temperature: float, rate: float, seed: int, longer: int = 1) -> Config:
    changes: dict[str, Any] = {
        "optim.variances": "adam",  # Newton's have no rate
        "posterior.temperature": temperature,
        "optim.log_variance_lr": rate / longer,
    }
    config = lab.config("byov", seed, changes)
    return lab.config("byov", seed, {**changes, "optim.epochs": longer * config.optim.epochs})


def runs(lab: Lab) -> list[Config]:
    """BYOL with all seeds and the map of the first, from its middle outwards, so that early results tell most.

    What follows from these is trained once they are known.
    """
    centre = mean(log10(t) for t in TEMPERATURES)
    outwards = sorted(TEMPERATURES, key=lambda t: abs(log10(t) - centre))
    return [*lab.configs("byol"), *(_point(lab, t, r, 0) for t in outwards for r in RATES)]


def results(lab: Lab) -> Rows:
    """A row for each run: BYOL's have no temperature."""
    rows = [_row(lab, None, None, seed) for seed in range(lab.seeds)]
    rows += [_row(lab, t, r, 0) for t in TEMPERATURES for r in RATES]
    for t, r in _accurate(rows, tolerance=2 * POINTS):  # hottest first
        rows += _trained_rows(lab, t, r, range(1, lab.seeds))
        if not point(rows, t, r)["accurate"]:
            continue
        rows += _trained_rows(lab, t, r, range(lab.seeds), longer=2)
        if point(rows, t, r)["settled"]:
            break
    return rows


def _trained_rows(lab: Lab, temperature: float, rate: float, seeds: range, longer: int = 1) -> Rows:
    lab.train(_point(lab, temperature, rate, seed, longer) for seed in seeds)
    return [_row(lab, temperature, rate, seed, longer) for seed in seeds]


def _row(lab: Lab, temperature: float | None, rate: float | None, seed: int, longer: int = 1) -> Row:
    if temperature is None or rate is None:
        config = lab.config("byol", seed)
    else:
        config = _point(lab, temperature, rate, seed, longer)
    start = exp(config.posterior.init_log_variance / 2)
    row = {"temperature": temperature, "log_variance_lr": rate, "seed": seed, "steps": longer, "initial_sigma": start}
    draws = lab.scale.draws
    found = lab.measured("working-point", config, lambda run: point_measures(run, draws), {"draws": draws})
    return row | {key: value for key, value in found.items() if key != "settings"}


# --------------------------------------------------------------------------------------------------------- measurement


def point_measures(run: Run, draws: int) -> Row:
    """Measure a probe at the means, the same probe over aligned and unaligned draws, and the spread of the weights.

    Under `validation.` the probe is fitted to four fifths of the training images and tested on the rest: these measures
    are for choosing. The other keys belong to the test images: for reporting.
    """
    data = load_labelled(run, run.config.data, lambda what, done, total: None)
    held = held_out(data.train_labels)
    known, asked = data.train.subset((~held).nonzero()[:, 0]), data.train.subset(held.nonzero()[:, 0])
    validation = _probed(run, replace(data, train=known, test=asked), draws)
    return weight_spread(run) | below(CHOOSE, validation) | _probed(run, data, draws)


def _probed(run: Run, data: Labelled, draws: int) -> Row:
    """Measures of a probe that is fitted to the training images and tested on the test images."""
    subject, found = Subject(run, run.encoder, data, run.image_shape[-1], lambda what, done, total: None), {}
    means, over = probe_predictions(subject, draws)
    probabilities = {"": means}
    if over is not None:
        probabilities |= {"draws.": over.aligned.mean.float(), "draws_unaligned.": over.unaligned.mean.float()}
        found["draws.mutual_information"] = float(over.aligned.mutual_information.mean())
    for prefix, p in probabilities.items():
        found[f"{prefix}top1"] = top_k_accuracy(p, data.test_labels, 1)
        found |= {f"{prefix}{m.__name__}": m(p, data.test_labels) for m in (ece, brier, nll)}
    return found


# ---------------------------------------------------------------------------------------------------------- the choice


def _average(rows: Rows, key: str, **where: Any) -> float:
    return mean(float(row[key]) for row in select(rows, **where))


def point(rows: Rows, temperature: float, rate: float, tolerance: float = POINTS) -> Row:
    """Average a point of the map over its seeds, compare it with BYOL of the same seeds, and check (a) to (d)."""
    here: Row = {"temperature": temperature, "log_variance_lr": rate, "steps": 1}
    top1, draws = _average(rows, f"{CHOOSE}top1", **here), _average(rows, f"{CHOOSE}draws.top1", **here)
    seeds = {row["seed"] for row in select(rows, **here)}
    byol = mean(row[f"{CHOOSE}top1"] for row in rows if row["temperature"] is None and row["seed"] in seeds)
    sigma = _average(rows, "median_sigma", **here)
    grown = sigma / _average(rows, "initial_sigma", **here)
    longer = [row["median_sigma"] for row in select(rows, **{**here, "steps": 2})]
    change = mean(longer) / sigma - 1 if longer else None
    return {
        "to_byol": top1 - byol,
        "draws_to_means": draws - top1,
        "median_sigma": sigma,
        "sigma_magnitude_spearman": _average(rows, "sigma_magnitude_spearman", **here),
        "change": change,
        "accurate": top1 >= byol - tolerance and draws >= top1 - tolerance,
        "left": max(grown, 1 / grown) >= LEFT,
        "settled": change is not None and abs(change) < SETTLED,
    }


def _accurate(rows: Rows, tolerance: float = POINTS) -> list[tuple[float, float]]:
    """The points that satisfy (a), (b) and (d), largest sigma first."""
    points = [(t, r, point(rows, t, r, tolerance)) for t in TEMPERATURES for r in RATES]
    works = [(t, r, p["median_sigma"]) for t, r, p in points if p["accurate"] and p["left"]]
    return [(t, r) for t, r, _ in sorted(works, key=lambda it: -it[2])]


def chosen(rows: Rows) -> tuple[float, float] | None:
    """Return the temperature and learning rate of the working point, if there is one."""
    return next(((t, r) for t, r in _accurate(rows) if point(rows, t, r)["settled"]), None)


# ------------------------------------------------------------------------------------------------------------ the table

COLUMNS = {  # averaged over seeds: title, key, factor and format
    "held out: means": ("validation.top1", 100, ".1f"),
    "draws": ("validation.draws.top1", 100, ".1f"),
    "test: means": ("top1", 100, ".1f"),
    "draws ": ("draws.top1", 100, ".1f"),
    "draws, not aligned": ("draws_unaligned.top1", 100, ".1f"),
    "ECE: means": ("ece", 1, ".3f"),
    "draws  ": ("draws.ece", 1, ".3f"),
    "median sigma": ("median_sigma", 1, ".4f"),
    "Spearman of sigma and magnitude": ("sigma_magnitude_spearman", 1, ".2f"),
}


def table(rows: Rows) -> str:
    """Render the map in Markdown, with which of (a) to (d) each point satisfies."""
    head = [
        "temperature",
        "rate",
        "seeds",
        *(title.strip() for title in COLUMNS),
        "sigma with twice the steps",
        "satisfies",
    ]
    byol = select(rows, temperature=None)
    lines = [head, ["---"] * len(head), ["BYOL", "", str(len(byol)), *_cells(byol), "", ""]]
    for t, r in sorted({(row["temperature"], row["log_variance_lr"]) for row in rows if row["temperature"]}):
        mine = select(rows, temperature=t, log_variance_lr=r, steps=1)
        here = point(rows, t, r)
        longer = "" if here["change"] is None else f"{100 * here['change']:+.0f}%"
        lines.append([f"{t:g}", f"{r:g}", str(len(mine)), *_cells(mine), longer, _satisfied(here)])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def _cells(rows: Rows) -> list[str]:
    known = [[row[key] for row in rows if row.get(key) is not None] for key, _, _ in COLUMNS.values()]
    formats = [(factor, form) for _, factor, form in COLUMNS.values()]
    return [format(factor * mean(v), form) if v else "" for v, (factor, form) in zip(known, formats, strict=True)]


def _satisfied(here: Row) -> str:
    near, drawn = here["to_byol"] >= -POINTS, here["draws_to_means"] >= -POINTS
    letters = {"a": near, "b": drawn, "c": here["settled"], "d": here["left"]}
    return " ".join(letter for letter, holds in letters.items() if holds)


# -------------------------------------------------------------------------------------------------------------- figure

PLACES = {"top1": ("means", "-"), "draws.top1": ("draws", "--"), "draws_unaligned.top1": ("draws, not aligned", ":")}
COLOURS = (BLUE, ORANGE, PURPLE)  # of the rates


def draw(rows: Rows, scale: str) -> Figure:
    """Over the temperature: top-1 at the means and of draws, with BYOL's; sigma; sigma against magnitude."""
    with mpl.rc_context({"font.size": 9, "axes.grid": True, "grid.alpha": 0.4}):
        figure = Figure(figsize=(10, 3.6), layout="constrained")
        accuracy, sigma, rank = figure.subplots(1, 3)
        _draw_accuracy(accuracy, rows)
        _draw_sigma(sigma, rows)
        for rate, colour in zip(RATES, COLOURS, strict=False):
            t, values = _line(rows, rate, "sigma_magnitude_spearman")
            rank.plot(t, values, color=colour, marker="o", ms=3)
        titles = ("top-1 of the probe (%)", "median sigma", "Spearman of sigma and |mean|")
        for axes, title in zip((accuracy, sigma, rank), titles, strict=True):
            axes.set(xscale="log", xlabel="temperature", title=title)
        figure.legend(*accuracy.get_legend_handles_labels(), loc="outside lower center", ncols=6, fontsize=8)
        return figure


def _draw_accuracy(axes: Axes, rows: Rows) -> None:
    byol = [100 * row["top1"] for row in rows if row["temperature"] is None]
    axes.axhline(mean(byol), color="0.4", linewidth=1, label="BYOL")
    for (key, (label, dash)), first in zip(PLACES.items(), (True, False, False), strict=True):
        axes.plot([], [], dash, color="0.4", label=label)
        for rate, colour in zip(RATES, COLOURS, strict=False):
            t, values = _line(rows, rate, key)
            name = f"log-variance lr {rate:g}" if first else None
            axes.plot(t, [100 * v for v in values], dash, color=colour, marker="o", ms=3, label=name)


def _draw_sigma(axes: Axes, rows: Rows) -> None:
    for rate, colour in zip(RATES, COLOURS, strict=False):
        axes.plot(*_line(rows, rate, "median_sigma"), color=colour, marker="o", ms=3)
        axes.plot(*_line(rows, rate, "median_sigma", steps=2), "D", color=colour, mfc="none", ms=5)
    axes.plot([], [], "D", color="0.4", mfc="none", ms=5, label="with twice the steps")
    axes.axhline(rows[0]["initial_sigma"], color="0.4", linewidth=1, linestyle=":", label="at the start")
    axes.set_yscale("log")
    axes.legend(fontsize=7)


def _line(rows: Rows, rate: float, key: str, steps: int = 1) -> tuple[list[float], list[float]]:
    """Temperatures of a rate, and the measure there, averaged over seeds."""
    mine = select(rows, log_variance_lr=rate, steps=steps)
    t = sorted({row["temperature"] for row in mine})
    return t, [_average(mine, key, temperature=value) for value in t]
