"""Figure 2: priors x weights of the KL, at the means and over draws, beside the deterministic BYOL.

The paper prints its best of nine settings, chosen on the test images: that flatters. Here the setting that is judged is
fixed beforehand (the standard prior, beta 0 -> 1); the best of nine has claims of its own, and is chosen for each seed
on the other seeds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import partial
from statistics import mean
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from byov.config import Config
from byov.report.plots.seed_plots import BLUE, ORANGE, PURPLE
from byov.studies.framework.claims import Claim, Effect
from byov.studies.framework.compare import Arms, compare, effects
from byov.studies.framework.lab import Lab
from byov.studies.measurements.training_history import gradient_spike

TITLE = "Figure 2: accuracy and calibration by prior and beta, beside BYOL"
PRIORS = {  # as the pictures have them
    "standard": r"$N(0, I)$",
    "teacher_mean": r"$N(\mu_T, I)$",
    "teacher_moments": r"$N(\mu_T, \Sigma_T)$",
}
BETAS = (0.1, 0.3, 1.0)
BYOL = "BYOL"
PANELS = {
    "top1": "top-1 (%) ↑",
    "top5": "top-5 (%) ↑",
    "ece": "ECE (points) ↓",
    "brier": "Brier (points) ↓",
    "reliability": "Brier reliability (points) ↓",
    "resolution": "Brier resolution (points) ↑",
}
COLOURS = dict(zip(PRIORS, (BLUE, ORANGE, PURPLE), strict=True))
MARKERS = dict(zip(PRIORS, "osD", strict=True))
DASHES = {"means": "-", "draws": "--"}
BARS = "mean and range over seeds"


def name(prior: str, beta: float) -> str:
    """Of an arm."""
    return f"{prior} {beta:g}"


SETTINGS: dict[str, dict[str, Any]] = {
    name(prior, beta): {"prior": prior, "beta": beta} for prior in PRIORS for beta in BETAS
}
FIXED, DRAWN = name("standard", 1.0), name("standard", 0.3)
MEAN, MOMENTS = name("teacher_mean", 1.0), name("teacher_moments", 1.0)
COMPARISONS = {  # reference: the arms set beside it, image by image
    BYOL: list(SETTINGS),
    FIXED: [MEAN, MOMENTS],
    DRAWN: [],  # its draws beside its own means
}


def arms(lab: Lab) -> Arms:
    """The config of each arm, by seed."""
    byov = {
        arm: partial(
            lab.config,
            "byov",
            changes={"posterior.prior": at["prior"], "posterior.beta_start": 0.0, "posterior.beta_end": at["beta"]},
        )
        for arm, at in SETTINGS.items()
    }
    return {BYOL: partial(lab.config, "byol"), **byov}


def runs(lab: Lab) -> list[Config]:
    return [config(seed) for seed in range(lab.seeds) for config in arms(lab).values()]


def results(lab: Lab) -> list[dict[str, Any]]:
    """The rows of `compare`, for each reference (`against`); with the spikes of the gradient while training."""
    all_arms, columns = arms(lab), {BYOL: {"prior": None, "beta": None}, **SETTINGS}
    rows = []
    for reference, others in COMPARISONS.items():
        found = compare(lab, {arm: all_arms[arm] for arm in (reference, *others)}, reference, columns)
        rows += [row | {"against": reference} for row in found]
    return with_spikes(lab, all_arms, rows)


def with_spikes(lab: Lab, all_arms: Arms, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows of trained arms, with the largest spike of each run's gradient."""
    pairs = {(row["arm"], row["seed"]) for row in rows}
    spikes = {(arm, seed): gradient_spike(lab.path(all_arms[arm](seed))) for arm, seed in pairs}
    return [row | {"gradient_spike": spikes[row["arm"], row["seed"]]} for row in rows]


# ---------------------------------------------------------------------------------------------------------- the picture


def draw(rows: list[dict[str, Any]], scale: str) -> Figure:
    """A panel a measure: over beta, a line a prior (solid: at the means; dashed: over draws), BYOL a grey band."""
    rows = [row for row in rows if row["against"] == BYOL]
    with mpl.rc_context({"font.size": 8, "axes.grid": True, "grid.alpha": 0.3}):
        figure = Figure(figsize=(8, 4.8), layout="constrained")
        panels = figure.subplots(2, 3, sharex=True)
        for axes, (measure, label) in zip(panels.flat, PANELS.items(), strict=True):
            _draw_panel(axes, rows, measure)
            axes.set_title(label, fontsize=8)
        for axes in panels[1]:
            axes.set_xticks(range(len(BETAS)), [f"0 → {beta:g}" for beta in BETAS])
            axes.set_xlabel("β")
        handles, labels = panels[0, 0].get_legend_handles_labels()
        figure.legend(
            handles,
            labels,
            loc="outside lower center",
            ncols=7,
            frameon=False,
            fontsize=7,
            columnspacing=1,
            title=BARS,
            title_fontsize=7,
        )
        return figure


def _draw_panel(axes: Axes, rows: list[dict[str, Any]], measure: str) -> None:
    byol = [100 * row[measure] for row in rows if row["arm"] == BYOL]
    axes.axhspan(min(byol), max(byol), color="0.5", alpha=0.25, linewidth=0)
    axes.axhline(mean(byol), color="0.3", linewidth=1.2, label="BYOL")
    for i, prior in enumerate(PRIORS):
        for at, dash in DASHES.items():
            values = [_values(rows, name(prior, beta), at, measure) for beta in BETAS]
            x = [place + 0.08 * (i - 1) + 0.03 * (at == "draws") for place in range(len(BETAS))]  # side by side
            low, high = [min(v) for v in values], [max(v) for v in values]
            style: dict[str, Any] = {"color": COLOURS[prior], "linestyle": dash}
            filled = COLOURS[prior] if at == "means" else "white"
            axes.vlines(x, low, high, linewidth=0.8, alpha=0.7, **style)
            label = f"{PRIORS[prior]}, {at}"
            line = [mean(v) for v in values]
            axes.plot(x, line, marker=MARKERS[prior], ms=4, mfc=filled, linewidth=1.2, label=label, **style)


def _values(rows: list[dict[str, Any]], arm: str, at: str, measure: str) -> list[float]:
    return [100 * row[measure] for row in rows if (row["arm"], row["at"]) == (arm, at)]


# ----------------------------------------------------------------------------------------------------------- the claims

Effects = Callable[[list[dict[str, Any]]], list[Effect]]


def beside(reference: str, arm: str, measure: str, sign: int, at: str = "means") -> Effects:
    """How far an arm lies from a reference, image by image; positive where it is as the paper says."""
    return lambda rows: effects([row for row in rows if row["against"] == reference], arm, measure, at, sign)


def best_elsewhere(options: Iterable[list[Effect]]) -> list[Effect]:
    """For each seed the effect of the option that is best on average over the other seeds (of one seed: its own best).

    The largest of a seed's own effects would be positive by luck alone. The test images are the same for all seeds, so
    a little of that luck stays.
    """
    tables = [{effect.seed: effect for effect in option} for option in options]
    seeds = sorted({seed for table in tables for seed in table})

    def elsewhere(table: dict[int, Effect], seed: int) -> float:
        return mean(effect.value for other, effect in table.items() if other != seed or len(seeds) == 1)

    return [max((t for t in tables if seed in t), key=lambda t: elsewhere(t, seed))[seed] for seed in seeds]


def _best(measure: str, sign: int) -> Effects:
    """The same for the best setting."""
    return lambda rows: best_elsewhere(beside(BYOL, arm, measure, sign)(rows) for arm in SETTINGS)


def spikier(rows: list[dict[str, Any]], arm: str, reference: str) -> list[Effect]:
    """The largest spike of an arm's gradient over that of a reference: ln of their ratio."""
    spike = {(row["arm"], row["seed"]): row["gradient_spike"] for row in rows if row["gradient_spike"] is not None}
    seeds = sorted(seed for name, seed in spike if name == arm and (reference, seed) in spike)
    return [Effect(seed, spike[arm, seed] - spike[reference, seed]) for seed in seeds]


FIGURE, NO_NUMBER = "4.1, Figure 2", "no number"
HERE = "at N(0, I), beta 0 -> 1, fixed beforehand"
BEST = "the best of nine settings, for each seed chosen on the other seeds"
# The paper calls .4 comparable, so the margin must be wider, and Table 1's 3.95 notably worse: a quarter of that.
COMPARABLE = 1.0
NOTABLY = 3.95  # Table 1, no_conv: the only gap between these two priors that is printed
SLIGHTLY = 0.29  # Table 1, no_conv: the same (there of the other sign)
SPIKE = math.log(2)  # twice as high: what one sees in a log

PRINTED: list[tuple[str, str, str, float, Effects]] = [  # where, what, points of what, how many, the rule
    (
        "Abstract; 4.1, Figure 2",
        f"BYOV has a better ECE than BYOL ({HERE})",
        "ECE",
        2.83,
        beside(BYOL, FIXED, "ece", -1),
    ),
    ("Abstract", f"BYOV has a better Brier score than BYOL ({HERE})", "Brier", 1.03, beside(BYOL, FIXED, "brier", -1)),
    (
        FIGURE,
        f"BYOV has a better reliability than BYOL ({HERE})",
        "reliability",
        1.03,
        beside(BYOL, FIXED, "reliability", -1),
    ),
    (FIGURE, f"The best BYOV has a better ECE than BYOL ({BEST})", "ECE", 2.83, _best("ece", -1)),
    (
        FIGURE,
        f"The best BYOV has a better reliability than BYOL ({BEST})",
        "reliability",
        1.03,
        _best("reliability", -1),
    ),
    (FIGURE, f"BYOV has a lower top-1 than BYOL ({HERE})", "top-1", 0.4, beside(BYOL, FIXED, "top1", -1)),
    (FIGURE, f"BYOV has a lower top-5 than BYOL ({HERE})", "top-5", 0.22, beside(BYOL, FIXED, "top5", -1)),
    (
        FIGURE,
        f"BYOV has a lower resolution than BYOL ({HERE})",
        "resolution",
        0.57,
        beside(BYOL, FIXED, "resolution", -1),
    ),
    (
        "4.1",
        "Plain draws are more accurate than the means (N(0, I), beta 0 -> 0.3)",
        "top-1",
        0.34,
        beside(DRAWN, DRAWN, "top1", +1, "draws_unaligned"),
    ),
    (
        "4.1",
        "Aligned draws are more accurate than the means (N(0, I), beta 0 -> 0.3; the paper's number is of plain draws)",
        "top-1",
        0.34,
        beside(DRAWN, DRAWN, "top1", +1, "draws"),
    ),
]
UNPRINTED: list[tuple[str, float, bool, Effects]] = [  # what (of top-1), a size chosen here, whether "no difference"
    (f"N(0, I) is as accurate as BYOL ({HERE})", COMPARABLE, True, beside(BYOL, FIXED, "top1", +1)),
    ("N(0, I) and N(μ_T, I) differ little (beta 0 -> 1)", COMPARABLE, True, beside(FIXED, MEAN, "top1", -1)),
    ("N(0, I) is slightly better than N(μ_T, I) (beta 0 -> 1)", SLIGHTLY, False, beside(FIXED, MEAN, "top1", -1)),
    ("N(μ_T, Σ_T) is notably worse than N(0, I) (beta 0 -> 1)", NOTABLY, False, beside(FIXED, MOMENTS, "top1", -1)),
]
UNSTABLE = "N(μ_T, Σ_T) makes training unstable (largest spike of the gradient's norm beside N(0, I)'s, beta 0 -> 1)"

CLAIMS = [
    *(Claim(where, says, f"{size:g} points", f"points of {of}", size, rule) for where, says, of, size, rule in PRINTED),
    *(Claim("4.1", says, NO_NUMBER, "points of top-1", size, rule, equal) for says, size, equal, rule in UNPRINTED),
    Claim("4.1", UNSTABLE, NO_NUMBER, "ln of the ratio", SPIKE, lambda rows: spikier(rows, MOMENTS, FIXED)),
]
