"""Every claim of the paper, judged by the studies that have been made, at every scale: `byov ledger`.

A study's CLAIMS are judged by the rows it wrote (`FOLDER/STUDY/SCALE/STUDY.json`); nothing is trained or measured here.
"""

from __future__ import annotations

import json
import shlex
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from byov import __version__
from byov._core.errors import BadInput
from byov._core.files import write_atomically, write_json, write_text
from byov.evaluation.ood import plain_name
from byov.studies.framework import ledger_page
from byov.studies.framework.checklist import NOT_JUDGED
from byov.studies.framework.claims import Claim, Effect, Verdict, judge
from byov.studies.framework.make import find, names


@dataclass(frozen=True)
class Made:
    """A study at one scale, as it was written."""

    study: str
    scale: str
    settings: dict[str, Any]
    rows: list[dict[str, Any]]
    figure: Path | None

    @property
    def command(self) -> str:
        """What makes it again."""
        data = self.settings["data"]
        scale = self.scale.removesuffix(f"-{plain_name(data)}")
        other = "" if scale == self.scale else f" --data {shlex.quote(data)}"
        return f"byov study {self.study} --scale {scale} --seeds {self.settings['seeds']}{other}"


@dataclass(frozen=True)
class Judged:
    """A claim at one scale."""

    made: Made
    effects: list[Effect]
    verdict: Verdict


@dataclass(frozen=True)
class Entry:
    """A line of the ledger: a claim, and what each scale says of it."""

    study: str
    claim: Claim
    judged: list[Judged]


def made_studies(folder: Path) -> list[Made]:
    """All that is below a folder of studies, the scales in the order of their names."""
    return [
        _read(path, name)
        for name in names()
        for path in sorted((folder / name).glob(f"*/{name}.json"), key=lambda path: path.parent.name)
    ]


def _read(path: Path, name: str) -> Made:
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
        settings, rows = kept["settings"], kept["rows"]
    except (ValueError, KeyError, TypeError) as error:
        raise BadInput(f"{path} is not what `byov study` writes ({error}): make it anew.") from error
    figure = path.with_suffix(".png")
    return Made(name, path.parent.name, settings, rows, figure if figure.is_file() else None)


def entries(made: list[Made]) -> list[Entry]:
    """All claims of all studies, in the studies' order."""
    return [
        Entry(name, claim, [_judged(claim, each) for each in made if each.study == name])
        for name in names()
        for claim in getattr(find(name), "CLAIMS", [])
    ]


def _judged(claim: Claim, made: Made) -> Judged:
    try:
        effects = claim.effects(made.rows)
        return Judged(made, effects, judge(effects, claim.size, claim.equal))
    except (KeyError, ValueError, TypeError, ZeroDivisionError) as error:  # the study has changed since, say
        raise BadInput(
            f"the rows of {made.study} at {made.scale} do not fit the claim “{claim.says}” "
            f"({type(error).__name__}: {error}): make them anew with `{made.command}`."
        ) from error


def write(studies: Path, out: Path) -> list[Entry]:
    """Writes the page, beside it a JSON with all numbers, and the studies' figures in `figures`."""
    made = made_studies(studies)
    found = entries(made)
    places = [(each, _copied(each, out)) for each in made]
    figures = [(each, place) for each, place in places if (out.parent / place).is_file()]
    numbers = out.with_suffix(".json")
    write_json(numbers, as_json(found))
    write_text(out, ledger_page.page(found, NOT_JUDGED, figures, numbers.name))
    return found


def _copied(made: Made, out: Path) -> str:
    """The figure's place, as the page names it; it is there already where only the rows were kept."""
    name, figure = f"figures/{made.study}-{made.scale}.png", made.figure
    if figure is not None:
        write_atomically(out.parent / name, lambda temporary: shutil.copyfile(figure, temporary))
    return name


def as_json(found: list[Entry]) -> dict[str, Any]:
    return {
        "byov": __version__,
        "counts": ledger_page.counts(found),
        "claims": [_claim(entry) for entry in found],
        "not_judged": [asdict(each) for each in NOT_JUDGED],
    }


def _claim(entry: Entry) -> dict[str, Any]:
    claim = entry.claim
    known = {key: getattr(claim, key) for key in ("where", "says", "paper", "unit", "size", "equal")}
    return {"study": entry.study, **known, "scales": {j.made.scale: _scale(j) for j in entry.judged}}


def _scale(judged: Judged) -> dict[str, Any]:
    effects = [asdict(effect) for effect in judged.effects]
    found = asdict(judged.verdict) | {"half_width": judged.verdict.half_width}
    return {**found, "effects": effects, "settings": judged.made.settings, "command": judged.made.command}
