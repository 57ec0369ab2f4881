"""`byov data`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from tyro.conf import Positional, arg

from byov._core.errors import BadInput
from byov.cli import process, tables
from byov.cli.parsing import parse


@dataclass(frozen=True)
class Options:
    """List the image sources, or fetch one."""

    action: Positional[Literal["list", "get"]]
    """list: show the sources. get: fetch NAME and verify its digest."""
    name: Annotated[str | None, Positional, arg(metavar="[NAME]")] = None
    """The source to fetch."""


def run(arguments: list[str]) -> int:
    options = parse(Options, "data", arguments)
    from byov.data import fetch, sources

    if options.action == "list":
        head = ("name", "pixels", "train", "test", "here", "terms", "what")
        rows = [
            (r.name, r.size, f"{r.train:,}", f"{r.test:,}", "yes" if r.there else "no", r.terms, r.description)
            for r in sources.table()
        ]
        print(tables.grid([head, *rows], "llrrlll"))
        print("\n`byov data get NAME` fetches one. For your own images: folder:PATH (all below a folder) or npz:PATH.")
        return process.DONE
    if options.name is None:
        raise BadInput("name the source to fetch: `byov data get cifar10` (`byov data list` shows them).")
    if options.name == "digits":
        print("digits comes with scikit-learn: nothing to fetch.")
        return process.DONE
    from byov.cli.progress import StageProgress

    with StageProgress(process.console()) as progress:
        path = fetch.get(options.name, progress, progress.say)
    print(f"{options.name} is available and its digests are correct: {path}")
    return process.DONE
