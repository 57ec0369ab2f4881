"""One self-contained page about one or several runs: load the runs, make the sections, fill the template.

Styles and figures are inside the page; it has no script, no font and no external address. What a run lacks is stated in
words and is never an error. A section is a function from runs to a `Section`, listed in SECTIONS.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from byov._core.errors import BadInput
from byov._core.files import write_text
from byov.report.elements import Section, fill
from byov.report.plots import svg_charts
from byov.report.run_data import Run, load_runs
from byov.report.sections.evaluation import (
    COLUMNS,
    example_section,
    outside_section,
    reliability_section,
    selective_section,
    shift_section,
    summary_rows,
)
from byov.report.sections.pruning import pruning_section
from byov.report.sections.settings import different_settings, results_table, settings_table
from byov.report.sections.training import monitor_section, posterior_section, training_section

__all__ = ["COLUMNS", "render", "summary_rows", "write_report"]

SECTIONS: tuple[Callable[[Sequence[Run]], Section], ...] = (
    reliability_section,
    example_section,
    selective_section,
    outside_section,
    shift_section,
    training_section,
    monitor_section,
    posterior_section,
    pruning_section,
)


def write_report(runs: Sequence[Path], out: Path) -> Path:
    """Write one self-contained HTML page about one or several runs.

    Args:
        runs: Run folders, in the order of the page.
        out: The page; it is written whole or not at all.

    Returns:
        The path of the page.

    Raises:
        BadInput: If a folder is not a run, or `out` is a folder.

    Example:
        >>> byov.write_report([Path("runs/mine")], Path("report.html")).name
        'report.html'
    """
    if out.is_dir():
        raise BadInput(f"{out} is a folder: give the name of the page, such as {out / 'report.html'}.")
    page = render(load_runs([Path(run) for run in runs]))
    write_text(out, page)
    return out


def render(runs: Sequence[Run]) -> str:
    """Return the page as HTML."""
    sections = [section(runs) for section in SECTIONS]
    return fill(
        "template.html.j2",
        runs=runs,
        title=" · ".join(run.name for run in runs),
        legend=[_look(run, i) for i, run in enumerate(runs)],
        columns=COLUMNS,
        summary=summary_rows(runs),
        outdated=[run.outdated for run in runs if run.outdated],
        sections=[section for section in sections if section.filled],
        empty=[(section.title, section.empty) for section in sections if not section.filled],
        different=different_settings(runs),
        settings=settings_table(runs),
        results=results_table(runs),
        missing=[(run.name, run.missing) for run in runs if run.missing],
    )


def _look(run: Run, i: int) -> dict[str, str | int]:
    """Name, colour and dash of a run, the same in all figures."""
    dash = svg_charts.CSS_DASHES[i % len(svg_charts.CSS_DASHES)]
    return {"name": run.name, "slot": i % svg_charts.SERIES, "dash": dash}
