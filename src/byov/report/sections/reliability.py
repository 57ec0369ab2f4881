"""Reliability diagrams: at the means and, where there are draws, of the mean over them."""

from __future__ import annotations

from collections.abc import Sequence

from markupsafe import Markup

from byov.report.elements import Picture, Section
from byov.report.plots import svg_charts
from byov.report.run_data import Run, finite


def reliability_section(runs: Sequence[Run]) -> Section:
    note = "Bars: accuracy at that confidence. Marks: mean confidence; a bar below its mark is overconfident."
    pictures = []
    for i, run in enumerate(runs):
        for prefix, what in (("", ""), ("draws.", ", mean over draws")):
            if bins := run.bins(prefix):
                error = run.results.get(f"{prefix}ece")
                title = f"{run.name}{what}" + (f", ECE {error:.3f}" if finite(error) else "")
                svg = svg_charts.reliability(bins, i, f"reliability-{prefix}{i}")
                pictures.append(Picture(title, note, Markup(svg)))
    return Section(
        "Reliability",
        "reliability",
        "Whether a probability means what it says: the linear probe on the frozen encoder, test images.",
        pictures,
        legend=False,
        empty="No run is evaluated yet, so there is no reliability diagram.",
    )
