"""Figure 2: priors x weights of the KL, at the means and over draws, compared with the deterministic BYOL.

The paper prints its best of nine settings, chosen on the test images, which is optimistic. Here the setting to judge is
fixed beforehand (the standard prior, beta 0 -> 1). The best of nine has separate claims, and is chosen for each seed on
the other seeds.
"""

from __future__ import annotations

from functools import partial
from statistics import mean
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from byov.config import Config
from byov.report.plots.seed_plots import BLUE, ORANGE, PURPLE
from byov.studies.framework.claims import NO_NUMBER, Claim, Effects, Rows, best_of_other_seeds, select
from byov.studies.framework.compare import (
    PRIORS,
    SPIKE,
    Arms,
    against,
    compare_each,
    configs_of,
    room_against,
    spike_ratios,
    with_spikes,
)
from byov.studies.framework.lab import Lab

TITLE = "Figure 2: accuracy and calibration by prior and beta, compared with BYOL"
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


SETTINGS: dict[str, dict[str, Any]] = {
    f"{prior} {beta:g}": {"prior": prior, "beta": beta} for prior in PRIORS for beta in BETAS
}
FIXED, DRAWN = "standard 1", "standard 0.3"
MEAN, MOMENTS = "teacher_mean 1", "teacher_moments 1"
COMPARISONS = {  # reference: the arms compared with it, image by image
    BYOL: list(SETTINGS),
    FIXED: [MEAN, MOMENTS],
    DRAWN: [],  # its draws compared with its own means
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
    return configs_of(lab, arms(lab))


def results(lab: Lab) -> Rows:
    """The rows of `compare_each`, with the largest spike of the gradient during training."""
    all_arms, columns = arms(lab), {BYOL: {"prior": None, "beta": None}, **SETTINGS}
    return with_spikes(lab, all_arms, compare_each(lab, all_arms, COMPARISONS, columns))


# -------------------------------------------------------------------------------------------------------------- figure


def draw(rows: Rows, scale: str) -> Figure:
    """One panel per measure: over beta, one line per prior (solid: means; dashed: draws), and BYOL as a grey band."""
    rows = select(rows, against=BYOL)
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


def _draw_panel(axes: Axes, rows: Rows, measure: str) -> None:
    byol = [100 * row[measure] for row in select(rows, arm=BYOL)]
    axes.axhspan(min(byol), max(byol), color="0.5", alpha=0.25, linewidth=0)
    axes.axhline(mean(byol), color="0.3", linewidth=1.2, label="BYOL")
    for i, prior in enumerate(PRIORS):
        for at, dash in DASHES.items():
            here = [select(rows, prior=prior, beta=beta, at=at) for beta in BETAS]
            values = [[100 * row[measure] for row in each] for each in here]
            x = [place + 0.08 * (i - 1) + 0.03 * (at == "draws") for place in range(len(BETAS))]  # side by side
            low, high = [min(v) for v in values], [max(v) for v in values]
            style: dict[str, Any] = {"color": COLOURS[prior], "linestyle": dash}
            filled = COLOURS[prior] if at == "means" else "white"
            axes.vlines(x, low, high, linewidth=0.8, alpha=0.7, **style)
            label = f"{PRIORS[prior]}, {at}"
            line = [mean(v) for v in values]
            axes.plot(x, line, marker=MARKERS[prior], ms=4, mfc=filled, linewidth=1.2, label=label, **style)


# -------------------------------------------------------------------------------------------------------------- claims


def _best(measure: str, sign: int) -> Effects:
    return lambda rows: best_of_other_seeds(against(BYOL, arm, measure, sign)(rows) for arm in SETTINGS)


FIGURE = "4.1, Figure 2"
HERE = "at N(0, I), beta 0 -> 1, fixed beforehand"
BEST = "the best of nine settings, for each seed chosen on the other seeds"
# The paper calls .4 comparable, so the margin must be wider, and Table 1's 3.95 notably worse: a quarter of that.
COMPARABLE = 1.0
NOTABLY = 3.95  # Table 1, no_conv: the only printed gap between these two priors
SLIGHTLY = 0.29  # Table 1, no_conv: likewise (there with the opposite sign)

PRINTED: list[tuple[str, str, str, float, Effects, Effects]] = [  # where, what, points of what, how many, effects, room
    (
        "Abstract; 4.1, Figure 2",
        f"BYOV has a better ECE than BYOL ({HERE})",
        "ECE",
        2.83,
        against(BYOL, FIXED, "ece", -1),
        room_against(BYOL, FIXED, "ece", -1),
    ),
    (
        "Abstract",
        f"BYOV has a better Brier score than BYOL ({HERE})",
        "Brier",
        1.03,
        against(BYOL, FIXED, "brier", -1),
        room_against(BYOL, FIXED, "brier", -1),
    ),
    (
        FIGURE,
        f"BYOV has a better reliability than BYOL ({HERE})",
        "reliability",
        1.03,
        against(BYOL, FIXED, "reliability", -1),
        room_against(BYOL, FIXED, "reliability", -1),
    ),
    (
        FIGURE,
        f"The best BYOV has a better ECE than BYOL ({BEST})",
        "ECE",
        2.83,
        _best("ece", -1),
        room_against(BYOL, FIXED, "ece", -1),
    ),
    (
        FIGURE,
        f"The best BYOV has a better reliability than BYOL ({BEST})",
        "reliability",
        1.03,
        _best("reliability", -1),
        room_against(BYOL, FIXED, "reliability", -1),
    ),
    (
        FIGURE,
        f"BYOV has a lower top-1 than BYOL ({HERE})",
        "top-1",
        0.4,
        against(BYOL, FIXED, "top1", -1),
        room_against(BYOL, FIXED, "top1", -1),
    ),
    (
        FIGURE,
        f"BYOV has a lower top-5 than BYOL ({HERE})",
        "top-5",
        0.22,
        against(BYOL, FIXED, "top5", -1),
        room_against(BYOL, FIXED, "top5", -1),
    ),
    (
        FIGURE,
        f"BYOV has a lower resolution than BYOL ({HERE})",
        "resolution",
        0.57,
        against(BYOL, FIXED, "resolution", -1),
        room_against(BYOL, FIXED, "resolution", -1),
    ),
    (
        "4.1",
        "Plain draws are more accurate than the means (N(0, I), beta 0 -> 0.3)",
        "top-1",
        0.34,
        against(DRAWN, DRAWN, "top1", +1, "draws_unaligned"),
        room_against(DRAWN, DRAWN, "top1", +1, "draws_unaligned"),
    ),
    (
        "4.1",
        "Aligned draws are more accurate than the means (N(0, I), beta 0 -> 0.3; the paper's number is of plain draws)",
        "top-1",
        0.34,
        against(DRAWN, DRAWN, "top1", +1, "draws"),
        room_against(DRAWN, DRAWN, "top1", +1, "draws"),
    ),
]
UNPRINTED: list[tuple[str, float, bool, str, str, int]] = [  # what (of top-1), a size chosen here, whether "the same"
    (f"N(0, I) is as accurate as BYOL ({HERE})", COMPARABLE, True, BYOL, FIXED, +1),
    ("N(0, I) and N(μ_T, I) differ little (beta 0 -> 1)", COMPARABLE, True, FIXED, MEAN, -1),
    ("N(0, I) is slightly better than N(μ_T, I) (beta 0 -> 1)", SLIGHTLY, False, FIXED, MEAN, -1),
    ("N(μ_T, Σ_T) is notably worse than N(0, I) (beta 0 -> 1)", NOTABLY, False, FIXED, MOMENTS, -1),
]
UNSTABLE = "N(μ_T, Σ_T) makes training unstable (largest spike of the gradient norm against N(0, I)'s, beta 0 -> 1)"

CLAIMS = [
    *(
        Claim(where, says, f"{size:g} points", f"points of {of}", size, rule, room=room)
        for where, says, of, size, rule, room in PRINTED
    ),
    *(
        Claim(
            "4.1",
            says,
            NO_NUMBER,
            "points of top-1",
            size,
            against(reference, arm, "top1", sign),
            equal,
            None if equal else room_against(reference, arm, "top1", sign),
        )
        for says, size, equal, reference, arm, sign in UNPRINTED
    ),
    Claim("4.1", UNSTABLE, NO_NUMBER, "ln of the ratio", SPIKE, lambda rows: spike_ratios(rows, MOMENTS, FIXED)),
]
