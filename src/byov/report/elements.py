"""What a page is made of: sections with pictures, tables and strips of images, and the templates they fill."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup, escape

from byov.report.run_data import finite


@dataclass(frozen=True)
class Cell:
    text: str
    best: bool = False


@dataclass(frozen=True)
class TableRow:
    name: str
    cells: list[Cell]
    slot: int | None = None
    """The number of the run, from 0, which fixes the colour; None for rows that are not a run."""


@dataclass(frozen=True)
class Table:
    """Named rows below the columns' titles."""

    title: str
    note: str
    columns: list[str]
    rows: list[TableRow]


@dataclass(frozen=True)
class Picture:
    title: str
    note: str
    svg: Markup
    wide: bool = False


@dataclass(frozen=True)
class Thumbnail:
    source: str
    """The picture, as a data URI."""
    label: str
    score: str
    percentile: str
    wrong: bool


@dataclass(frozen=True)
class Strip:
    """A row of images."""

    title: str
    note: str
    images: list[Thumbnail]


@dataclass(frozen=True)
class Section:
    title: str
    anchor: str
    intro: str
    pictures: list[Picture] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    strips: list[Strip] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """One sentence for each run that lacks what others have."""
    legend: bool = True
    empty: str = ""
    """The text if there is nothing to show."""

    @property
    def filled(self) -> bool:
        return bool(self.pictures or self.tables or self.strips)


@dataclass(frozen=True)
class Column:
    """A column of numbers: its key, title and format."""

    key: str
    title: str
    digits: int
    better: int
    """1: higher is better, -1: lower is better, 0: neither."""
    scale: float = 1.0
    """Accuracies are stored as fractions and shown as percent."""

    def text(self, value: object) -> str:
        return f"{value * self.scale:,.{self.digits}f}" if finite(value) else "–"

    def cells(self, values: Sequence[object]) -> list[Cell]:
        """Make the cells from top to bottom; the best are marked, as rounded, unless all are equal."""
        shown = [round(v * self.scale, self.digits) * self.better if finite(v) else None for v in values]
        known = [value for value in shown if value is not None]
        best = max(known) if self.better and len(set(known)) > 1 else None
        return [Cell(self.text(v), s is not None and s == best) for v, s in zip(values, shown, strict=True)]


def rows_of(names: Sequence[str], columns: Sequence[list[Cell]]) -> list[TableRow]:
    """Turn columns of cells into rows."""
    return [TableRow(name, list(cells)) for name, cells in zip(names, zip(*columns, strict=True), strict=True)]


def fill(template: str, **values: Any) -> str:
    """Fill a template of this package with values, escaped; a missing value is an error."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters["code_spans"] = _code_spans
    return environment.get_template(template).render(**values)


def _code_spans(text: str) -> Markup:
    """Set `commands` in a sentence as code."""
    return Markup(re.sub(r"`([^`]*)`", r"<code>\1</code>", str(escape(text))))
