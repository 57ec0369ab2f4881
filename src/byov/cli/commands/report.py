"""`byov report`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from byov._core.errors import BadInput
from byov._core.files import disk_space_checked
from byov.cli import process, tables
from byov.cli.parsing import parse


@dataclass(frozen=True)
class Options:
    """Write one self-contained page about one or more runs, and print their table."""

    runs: Annotated[tuple[Path, ...], Positional, arg(metavar="RUN [RUN ...]")]
    """The run folders."""
    out: Annotated[Path, arg(metavar="PAGE")] = Path("report.html")
    """The page to write."""


def run(arguments: list[str]) -> int:
    options = parse(Options, "report", arguments)
    if not options.runs:
        raise BadInput("name the runs to report on: `byov report RUN [RUN ...] --out report.html`.")
    from byov.report.page import COLUMNS, summary_rows, write_report
    from byov.report.run_data import load_runs

    with disk_space_checked(options.out):
        path = write_report(options.runs, options.out)
    rows = [(row.name, *(cell.text for cell in row.cells)) for row in summary_rows(load_runs(list(options.runs)))]
    print(tables.grid([("", *(column.title for column in COLUMNS)), *rows], "l" + "r" * len(COLUMNS)))
    print(f"written: {path}")
    return process.DONE
