"""From a study's name to its files: trains what is missing, then writes rows as JSON and CSV, and the figure."""

from __future__ import annotations

import csv
import io
import pkgutil
from collections.abc import Iterator
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol, cast

from matplotlib.figure import Figure

import byov.studies.beyond
import byov.studies.paper
from byov._core.errors import BadInput, TrainingFailed
from byov._core.files import write_atomically, write_json, write_text
from byov.config import Config
from byov.studies.framework.lab import Lab
from byov.studies.framework.workers import Order, side_by_side

PACKAGES = (byov.studies.paper, byov.studies.beyond)  # every module of theirs is a study


class Study(Protocol):
    """What a module must have to be a study."""

    TITLE: str

    def runs(self, lab: Lab) -> list[Config]: ...
    def results(self, lab: Lab) -> list[dict[str, Any]]: ...
    def draw(self, rows: list[dict[str, Any]], scale: str) -> Figure: ...


def names() -> list[str]:
    """All studies, by their files' names."""
    return sorted(_modules())


def find(name: str) -> Study:
    if name not in names():
        raise BadInput(f"there is no study {name!r}: use one of {', '.join(names())}, or all.")
    return cast(Study, import_module(_modules()[name]))


def _modules() -> dict[str, str]:
    """The module of every study, by the study's name."""
    return {
        module.name.replace("_", "-"): f"{package.__name__}.{module.name}"
        for package in PACKAGES
        for module in pkgutil.iter_modules(package.__path__)
    }


def make_all(lab: Lab) -> Iterator[tuple[str, str | None]]:
    """Makes all studies, as many at a time as runs are trained; gives out each one's name, and why it failed if it did.

    First the runs that they name, all together: fewer cores wait for the last run of a study. Then those that will
    train more (`TRAINS_MORE`) go first, since they take longest.
    """
    configs: list[Config] = []
    order: list[str] = []
    for name in sorted(names(), key=lambda name: not getattr(find(name), "TRAINS_MORE", False)):
        try:
            configs += find(name).runs(lab)
            order.append(name)
        except BadInput as error:
            yield name, str(error)
    with suppress(TrainingFailed):  # it was said; the studies that need such a run will try it again, and fail alone
        lab.train(configs)
    lab.say(f"{len(order)} studies to make, {lab.jobs} at a time; {lab.place('STUDY')}/log has what they say")
    orders = [Order(lab.command(name), lab.place(name) / "log") for name in order]
    for place, child in side_by_side(orders, lab.jobs):
        yield order[place], child.last_words if child.code else None


def make(name: str, lab: Lab) -> Path:
    """Makes one study; returns its folder. What is there is overwritten: it is made from runs, which are not."""
    study = find(name)
    lab.say(f"{name}: {study.TITLE} ({lab.name}: {lab.scale.time})")
    lab.train(study.runs(lab))
    rows = study.results(lab)
    folder = lab.place(name)
    settings = {
        "study": name,
        "scale": lab.name,
        "seeds": lab.seeds,
        "data": lab.scale.data,
        "images": lab.scale.images,
    }
    write_json(folder / f"{name}.json", {"settings": settings, "rows": rows})
    write_text(folder / f"{name}.csv", _csv(rows))
    if table := getattr(study, "table", None):
        write_text(folder / f"{name}.md", table(rows))
    figure = study.draw(rows, lab.name)
    for suffix in ("png", "svg"):
        path = folder / f"{name}.{suffix}"
        write_atomically(path, lambda temporary, suffix=suffix: figure.savefig(temporary, format=suffix, dpi=200))  # type: ignore[misc]
    return folder


def _csv(rows: list[dict[str, Any]]) -> str:
    columns = list(dict.fromkeys(key for row in rows for key in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()
