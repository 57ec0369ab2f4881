"""Temperature x learning rate of the log-variances: where BYOV is as accurate as BYOL, and draws still mean something.

A point works where, averaged over seeds,
  (a) the probe at the means is within 2 points of the fair BYOL,
  (b) 20 aligned draws are within 2 points of the means,
  (c) the median sigma is settled: it changes by less than 20% when the steps double and the rate of the log-variances
      halves, as it does by itself where none is given (`schedules.log_variance_rate`: at a fixed rate sigma grows),
  (d) it has left its start: it has grown or shrunk by half at least. A sigma that never moved is settled too.
All by a probe on held-out training images; the test images only report. The hottest point that works is chosen: sigma
is then as large as accuracy allows, and most can be read from it. The map is made with the first seed. Then, hottest
first, points that have left their start and come within twice the tolerance of (a) and (b) get the other seeds, and
those that still have (a) and (b) get twice the steps, until one is settled.
"""

from __future__ import annotations

from math import exp, log10
from statistics import mean
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from byov.config import Config
from byov.report.plots.seed_plots import BLUE, ORANGE, PURPLE
from byov.studies.framework.lab import Lab
from byov.studies.measurements.accuracy_and_spread import working_measures

TITLE = "the working point: temperature x learning rate of the log-variances"
TRAINS_MORE = True  # than `runs` names, when its first results are there
TEMPERATURES = (1e-4, 1e-3, 1e-2, 1e-1)
RATES = (5e-3, 2e-2)
CHOOSE = "validation."  # the measures to choose by
POINTS, SETTLED, LEFT = 0.02, 0.20, 1.5  # within 2 points of top-1; under 20% change; by half at least


def _point(lab: Lab, temperature: float, rate: float, seed: int, longer: int = 1) -> Config:
    changes: dict[str, Any] = {"posterior.temperature": temperature, "optim.log_variance_lr": rate / longer}
    config = lab.config("byov", seed, changes)
    return lab.config("byov", seed, {**changes, "optim.epochs": longer * config.optim.epochs})


def runs(lab: Lab) -> list[Config]:
    """BYOL of all seeds and the map of the first, from its middle outwards, so that an early look tells most.

    What follows from these is trained when it is known.
    """
    byol = [lab.config("byol", seed) for seed in range(lab.seeds)]
    centre = mean(log10(t) for t in TEMPERATURES)
    outwards = sorted(TEMPERATURES, key=lambda t: abs(log10(t) - centre))
    return [*byol, *(_point(lab, t, r, 0) for t in outwards for r in RATES)]


def results(lab: Lab) -> list[dict[str, Any]]:
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


def _trained_rows(lab: Lab, temperature: float, rate: float, seeds: range, longer: int = 1) -> list[dict[str, Any]]:
    lab.train(_point(lab, temperature, rate, seed, longer) for seed in seeds)
    return [_row(lab, temperature, rate, seed, longer) for seed in seeds]


def _row(lab: Lab, temperature: float | None, rate: float | None, seed: int, longer: int = 1) -> dict[str, Any]:
    if temperature is None or rate is None:
        config = lab.config("byol", seed)
    else:
        config = _point(lab, temperature, rate, seed, longer)
    start = exp(config.posterior.init_log_variance / 2)
    row = {"temperature": temperature, "log_variance_lr": rate, "seed": seed, "steps": longer, "initial_sigma": start}
    return row | _measured(lab, config)


def _measured(lab: Lab, config: Config) -> dict[str, Any]:
    draws = lab.scale.draws
    found = lab.measured("working-point", config, lambda run: working_measures(run, draws), {"draws": draws})
    return {key: value for key, value in found.items() if key != "settings"}


def _average(rows: list[dict[str, Any]], key: str, **where: Any) -> float:
    return mean(float(row[key]) for row in rows if all(row[k] == v for k, v in where.items()))


def point(rows: list[dict[str, Any]], temperature: float, rate: float, tolerance: float = POINTS) -> dict[str, Any]:
    """A point of the map, averaged over its seeds and beside BYOL of the same, and whether it works."""
    here: dict[str, Any] = {"temperature": temperature, "log_variance_lr": rate, "steps": 1}
    top1, draws = _average(rows, f"{CHOOSE}top1", **here), _average(rows, f"{CHOOSE}draws.top1", **here)
    seeds = {row["seed"] for row in rows if all(row[k] == v for k, v in here.items())}
    byol = mean(row[f"{CHOOSE}top1"] for row in rows if row["temperature"] is None and row["seed"] in seeds)
    sigma = _average(rows, "median_sigma", **here)
    grown = sigma / _average(rows, "initial_sigma", **here)
    longer = [row["median_sigma"] for row in rows if all(row[k] == v for k, v in {**here, "steps": 2}.items())]
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


def _accurate(rows: list[dict[str, Any]], tolerance: float = POINTS) -> list[tuple[float, float]]:
    """The points with (a), (b) and (d), those with the largest sigma first."""
    points = [(t, r, point(rows, t, r, tolerance)) for t in TEMPERATURES for r in RATES]
    works = [(t, r, p["median_sigma"]) for t, r, p in points if p["accurate"] and p["left"]]
    return [(t, r) for t, r, _ in sorted(works, key=lambda it: -it[2])]


def chosen(rows: list[dict[str, Any]]) -> tuple[float, float] | None:
    """Temperature and learning rate of the working point, if there is one."""
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


def table(rows: list[dict[str, Any]]) -> str:
    """The map in Markdown, with what each point has of (a) to (d)."""
    head = ["temperature", "rate", "seeds", *(title.strip() for title in COLUMNS), "sigma with twice the steps", "has"]
    byol = [row for row in rows if row["temperature"] is None]
    lines = [head, ["---"] * len(head), ["BYOL", "", str(len(byol)), *_cells(byol), "", ""]]
    for t, r in sorted({(row["temperature"], row["log_variance_lr"]) for row in rows if row["temperature"]}):
        mine = [row for row in rows if (row["temperature"], row["log_variance_lr"], row["steps"]) == (t, r, 1)]
        here = point(rows, t, r)
        longer = "" if here["change"] is None else f"{100 * here['change']:+.0f}%"
        lines.append([f"{t:g}", f"{r:g}", str(len(mine)), *_cells(mine), longer, _has(here)])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def _cells(rows: list[dict[str, Any]]) -> list[str]:
    known = [[row[key] for row in rows if row.get(key) is not None] for key, _, _ in COLUMNS.values()]
    formats = [(factor, form) for _, factor, form in COLUMNS.values()]
    return [format(factor * mean(v), form) if v else "" for v, (factor, form) in zip(known, formats, strict=True)]


def _has(here: dict[str, Any]) -> str:
    near, drawn = here["to_byol"] >= -POINTS, here["draws_to_means"] >= -POINTS
    letters = {"a": near, "b": drawn, "c": here["settled"], "d": here["left"]}
    return " ".join(letter for letter, has in letters.items() if has)


# ---------------------------------------------------------------------------------------------------------- the picture

PLACES = {"top1": ("means", "-"), "draws.top1": ("draws", "--"), "draws_unaligned.top1": ("draws, not aligned", ":")}
COLOURS = (BLUE, ORANGE, PURPLE)  # of the rates


def draw(rows: list[dict[str, Any]], scale: str) -> Figure:
    """Over the temperature: top-1 at the means and of draws beside BYOL's; sigma; sigma against magnitude."""
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


def _draw_accuracy(axes: Axes, rows: list[dict[str, Any]]) -> None:
    byol = [100 * row["top1"] for row in rows if row["temperature"] is None]
    axes.axhline(mean(byol), color="0.4", linewidth=1, label="BYOL")
    for (key, (label, dash)), first in zip(PLACES.items(), (True, False, False), strict=True):
        axes.plot([], [], dash, color="0.4", label=label)
        for rate, colour in zip(RATES, COLOURS, strict=False):
            t, values = _line(rows, rate, key)
            name = f"log-variance lr {rate:g}" if first else None
            axes.plot(t, [100 * v for v in values], dash, color=colour, marker="o", ms=3, label=name)


def _draw_sigma(axes: Axes, rows: list[dict[str, Any]]) -> None:
    for rate, colour in zip(RATES, COLOURS, strict=False):
        axes.plot(*_line(rows, rate, "median_sigma"), color=colour, marker="o", ms=3)
        axes.plot(*_line(rows, rate, "median_sigma", steps=2), "D", color=colour, mfc="none", ms=5)
    axes.plot([], [], "D", color="0.4", mfc="none", ms=5, label="with twice the steps")
    axes.axhline(rows[0]["initial_sigma"], color="0.4", linewidth=1, linestyle=":", label="at the start")
    axes.set_yscale("log")
    axes.legend(fontsize=7)


def _line(rows: list[dict[str, Any]], rate: float, key: str, steps: int = 1) -> tuple[list[float], list[float]]:
    """Temperatures of a rate, and the measure there, averaged over seeds."""
    mine = [row for row in rows if row["log_variance_lr"] == rate and row["steps"] == steps]
    t = sorted({row["temperature"] for row in mine})
    return t, [_average(mine, key, temperature=value) for value in t]
