"""`byov ledger`."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import arg

from byov._core.errors import BadInput
from byov._core.files import disk_space_checked
from byov.cli import process
from byov.cli.parsing import parse


@dataclass(frozen=True)
class Options:
    """Check the paper's claims against the studies made so far; trains nothing."""

    studies: Annotated[Path, arg(metavar="FOLDER")] = Path("studies")
    """Folder that `byov study --out` wrote."""
    out: Annotated[Path, arg(metavar="PAGE")] = Path("results.md")
    """Page to write; a JSON file with all numbers and a folder of figures are written next to it."""
    before: Annotated[Path | None, arg(metavar="JSON")] = None
    """JSON file of an earlier ledger: its verdicts are shown next to the new ones."""


def run(arguments: list[str]) -> int:
    options = parse(Options, "ledger", arguments)
    from byov.studies.framework import ledger

    if not options.studies.is_dir():
        raise BadInput(f"there is no folder {options.studies}: give the folder that `byov study --out` wrote.")
    with disk_space_checked(options.out):
        found = ledger.write(options.studies, options.out, options.before)
    if not any(entry.judged for entry in found):
        print(f"warning: no study was found in {options.studies}: no claim is judged.", file=sys.stderr)
    print(f"{len(found)} claims; written: {options.out}")
    return process.DONE
