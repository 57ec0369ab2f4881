"""Judge every claim of the paper by the studies that were made, at every scale, and write the page: `byov ledger`.

A study's CLAIMS are judged by the rows it wrote (`FOLDER/STUDY/SCALE/STUDY.json`); nothing is trained or measured here.
Verdicts of an earlier ledger may be shown next to them.
"""

from __future__ import annotations

import math
import shlex
import shutil
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from byov import __version__
from byov._core.errors import BadInput
from byov._core.files import read_json, write_atomically, write_json, write_text
from byov.evaluation.probe import plain_name
from byov.studies.framework.checklist import BEYOND, NOT_JUDGED, SECTIONS, NotJudged, sections
from byov.studies.framework.claims import WORDS, Claim, Effect, Rows, Verdict, verdict
from byov.studies.framework.lab import find, names
from byov.studies.measurements.learned import learned_caveats

NOT_RUN = "not run"
NOT_MEASURED = "it was not measured whether the encoders have learned"
NOT_CROSSED = "intervals are upper bounds, for the rows hold no replicates over images"
EXPLORATORY = ("digits",)  # 1,442 images of 8 pixels and 355 to test: a scale to try the studies, not the claims


@dataclass(frozen=True)
class Made:
    """A study at one scale, as it was written."""

    study: str
    scale: str
    settings: dict[str, Any]
    rows: Rows
    figure: Path | None
    learned: Rows = field(default_factory=list)
    """Whether the encoders have learned (`measurements/learned.py`); empty for studies from before it was measured."""

    @property
    def exploratory(self) -> bool:
        """Whether the images are too few and too easy for a verdict to carry weight."""
        return self.settings["data"] in EXPLORATORY

    @property
    def place(self) -> str:
        """The scale and the data, with what a reader should think of them."""
        return f"{self.scale}, {self.settings['data']}{', exploratory' if self.exploratory else ''}"

    @property
    def command(self) -> str:
        """The command that makes it again."""
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
    before: str | None = None
    """The word of the earlier ledger for this claim and scale; None: it had none."""

    @property
    def learned(self) -> list[str]:
        """What the encoders are not shown to beat, as sentences; empty if they have learned."""
        return learned_caveats(self.made.learned)


@dataclass(frozen=True)
class Entry:
    """A claim, and the verdict of each scale."""

    study: str
    claim: Claim
    judged: list[Judged]


def made_studies(folder: Path) -> list[Made]:
    """Read all studies in a folder, the scales in the order of their names."""
    return [
        _read(path, name)
        for name in names()
        for path in sorted((folder / name).glob(f"*/{name}.json"), key=lambda path: path.parent.name)
    ]


def _read(path: Path, name: str) -> Made:
    try:
        saved = read_json(path)
        settings, rows, learned = saved["settings"], saved["rows"], saved.get("learned", [])
    except (ValueError, KeyError, TypeError) as error:
        raise BadInput(f"{path} is not a file of `byov study` ({error}): make it again.") from error
    figure = path.with_suffix(".png")
    return Made(name, path.parent.name, settings, rows, figure if figure.is_file() else None, learned)


Before = Mapping[tuple[str, str, str], str]
"""The words of an earlier ledger, by study, claim and scale."""


def entries(made: list[Made], before: Before | None = None) -> list[Entry]:
    """Judge all claims of all studies, in the studies' order."""
    return [
        Entry(name, claim, [_judged(claim, each, before or {}) for each in made if each.study == name])
        for name in names()
        for claim in getattr(find(name), "CLAIMS", [])
    ]


def _judged(claim: Claim, made: Made, before: Before) -> Judged:
    try:
        found = verdict(claim, made.rows)
        if found.seeds and not found.crossed:
            found = replace(found, caveats=(*found.caveats, NOT_CROSSED))
        return Judged(made, claim.effects(made.rows), found, before.get((made.study, claim.says, made.scale)))
    except (KeyError, ValueError, TypeError, ZeroDivisionError) as error:  # the study has changed since, for example
        raise BadInput(
            f"the rows of {made.study} at {made.scale} do not fit the claim “{claim.says}” "
            f"({type(error).__name__}: {error}): make them again with `{made.command}`."
        ) from error


def read_before(path: Path) -> dict[tuple[str, str, str], str]:
    """Read the words of an earlier ledger from the JSON that was written next to its page."""
    try:
        claims = read_json(path)["claims"]
        return {(c["study"], c["says"], scale): s["word"] for c in claims for scale, s in c["scales"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise BadInput(f"{path} is not the JSON of an earlier `byov ledger` ({error}): check --before.") from error


def write(studies: Path, out: Path, before: Path | None = None) -> list[Entry]:
    """Write the page, a JSON with all numbers next to it, and the studies' figures in `figures`.

    `before`: the JSON of an earlier ledger, whose verdicts are shown in a column next to the new ones.
    """
    made = made_studies(studies)
    found = entries(made, None if before is None else read_before(before))
    places = [(each, _copied(each, out)) for each in made]
    figures = [(each, place) for each, place in places if (out.parent / place).is_file()]
    numbers = out.with_suffix(".json")
    write_json(numbers, as_json(found))
    write_text(out, page(found, NOT_JUDGED, figures, numbers.name))
    return found


def _copied(made: Made, out: Path) -> str:
    """The figure's path relative to the page; where only rows were saved, the figure may exist already."""
    name, figure = f"figures/{made.study}-{made.scale}.png", made.figure
    if figure is not None:
        write_atomically(out.parent / name, lambda temporary: shutil.copyfile(figure, temporary))
    return name


# ------------------------------------------------------------------------------------------------------------ the JSON


def as_json(found: list[Entry]) -> dict[str, Any]:
    return {
        "byov": __version__,
        "counts": counts(found),
        "claims": [_claim(entry) for entry in found],
        "not_judged": [asdict(each) for each in NOT_JUDGED],
    }


def _claim(entry: Entry) -> dict[str, Any]:
    claim = entry.claim
    known = {key: getattr(claim, key) for key in ("where", "says", "paper", "unit", "size", "equal")}
    return {"study": entry.study, **known, "scales": {j.made.scale: _scale(j) for j in entry.judged}}


def _scale(judged: Judged) -> dict[str, Any]:
    effects = [{"seed": each.seed, "value": each.value, "error": each.error} for each in judged.effects]
    found = asdict(judged.verdict) | {"half_width": judged.verdict.half_width}
    known = {"before": judged.before, "exploratory": judged.made.exploratory, "learned": judged.learned}
    return {**found, **known, "effects": effects, "settings": judged.made.settings, "command": judged.made.command}


def counts(found: Sequence[Entry]) -> dict[str, dict[str, int]]:
    """Count the verdicts of each kind, by scale."""
    scales = sorted({judged.made.scale for entry in found for judged in entry.judged})
    return {scale: _counted(found, scale) for scale in scales}


def _counted(found: Sequence[Entry], scale: str) -> dict[str, int]:
    words = Counter(j.verdict.word for entry in found for j in entry.judged if j.made.scale == scale)
    return {word: words[word] for word in WORDS} | {NOT_RUN: len(found) - words.total()}


# ------------------------------------------------------------------------------------------------------------ the page

INTRODUCTION = """\
# The paper's claims, one by one

Written by `byov ledger`; all numbers, seed by seed, are in [{json}]({json}). Each claim and its rule are in the module
of its study (`docs/studies.md`). Claims, sizes and effects were last changed after a review. By then parts of the
results of seed 0 on digits had been seen, but nothing of any other seed or data set. Room, precondition and the
crossed interval were added on 2026-11-18, when the earlier verdicts (column *before*) were known. The paper's numbers
come from ViTs on ImageNet-1k; ours come from networks and images that 2 CPU cores can train. What is shown here is
shown at this scale; what is not may still hold at theirs. A claim that the paper makes in several places is listed at
the first of them.

**The rule.** An effect is signed so that positive means "as the paper says". A run is compared with its counterpart of
the same seed on the same test images: one effect per seed. The estimate is the mean over seeds. Seeds and test images
are crossed random effects. The variance of the estimate is the variance over seeds divided by their number, plus the
covariance of two seeds over the test images. The latter comes from a bootstrap in which all runs see the same resampled
images. All seeds share the images, so more seeds do not reduce it. The 95% interval is Student's t with the degrees of
freedom of Welch and Satterthwaite: one less than the number of seeds where the images add nothing, more where they do.

- **shown**: the interval lies above 0. **opposite**: it lies below.
- **not shown**: it contains 0, but not the paper's effect: one of that size would have been detected.
- **no room**: it would be *not shown* or *cannot tell*, but an effect of the paper's size could not have been observed.
- **cannot tell**: it contains both, or there are fewer than two seeds.
- A claim that two things are *the same* is marked **=**. Shown: the interval lies within the margin; opposite: wholly
  outside; else cannot tell.

*Observable* are effects from the half width of the interval, below which none could have been distinguished from 0, to
the room. The room is the distance from the reference (BYOL, for example) to the end of the scale: 1 for accuracy, or
the unpruned encoder for pruning. For ECE and reliability it ends at what sampling alone gives with that number of test
images: the value for labels drawn from the reference's own probabilities. Rows from before 2026-11-18 do not hold that
value, so their room is an upper bound.

Every claim has a precondition: the encoder has learned. Its probe must beat that of raw pixels and that of the
untrained encoder, by the same interval; else the verdict says so. Other caveats are marked ¹ and given at the end, by
study. *Before* is the verdict of an earlier ledger, of runs whose sigma had not settled. Scales on digits are
exploratory: 355 test images of 8 x 8 pixels.

Where the paper prints no number, the smallest effect that would matter was chosen beforehand (the study's module gives
the reason). One seed shows what a figure looks like, and how far the choice of test images alone could move a number.
It cannot show what another seed would give, so it has no verdict. If there is no effect, a directional claim is
"shown" by chance one time in forty and "opposite" one time in forty; claims that share runs err together.
"""


def page(
    found: Sequence[Entry], not_judged: Sequence[NotJudged], figures: Sequence[tuple[Made, str]], numbers: str
) -> str:
    """Render the page as Markdown; `numbers` is the JSON's name, and figures are named by their relative paths."""
    parts = [INTRODUCTION.format(json=numbers), _summary(found, not_judged)]
    for section in (*SECTIONS, None):
        mine = [entry for entry in found if _section(entry.claim.where) == section]
        others = [each for each in not_judged if _section(each.where) == section]
        if mine or others:
            title = BEYOND if section is None else SECTIONS[section]
            reasons = [f"- No verdict: {each.says} ({each.where}). {each.reason}" for each in others]
            parts.append("\n".join([f"## {title}\n", *_table(mine), *reasons]) + "\n")
    lines = [f"- {made.study}, {made.scale} ({made.settings['data']}): [{path}]({path})" for made, path in figures]
    notes = ["## Commands and caveats\n", *(_notes(found) or ["None yet."]), ""]
    return "\n".join([*parts, *notes, "## Figures\n", *(lines or ["None yet."]), ""])


def _section(where: str) -> str | None:
    """The first section that is named; None for claims that are not the paper's."""
    return next((name for name in sections(where) if name in SECTIONS), None)


def _summary(found: Sequence[Entry], not_judged: Sequence[NotJudged]) -> str:
    head = ["scale", *WORDS, NOT_RUN]
    lines = [[scale, *map(str, words.values())] for scale, words in counts(found).items()]
    text = f"{len(found)} claims have a rule; {len(not_judged)} more have none, and give the reason.\n"
    table = _markdown([head, *lines]) if lines else ["No study has been run yet."]
    return "\n".join(["## Summary\n", text, *table, "", *_preconditions(found)])


def _preconditions(found: Sequence[Entry]) -> list[str]:
    """For each scale, in how many studies the encoders are shown to have learned."""
    made = {(j.made.scale, j.made.study): j for entry in found for j in entry.judged}
    lines = []
    for scale in sorted({scale for scale, _ in made}):
        here = [judged for (name, _), judged in made.items() if name == scale]
        known = [judged for judged in here if judged.made.learned]
        fit = sum(not judged.learned for judged in known)
        text = f"the encoders are shown to have learned in {fit} of {len(known)} studies" if known else NOT_MEASURED
        lines.append(f"- {here[0].made.place}: {text}.")
    return [*lines, ""] if lines else []


def _table(found: Sequence[Entry]) -> list[str]:
    if not found:
        return []
    head = ["claim", "paper", "ours [95% interval]", "observable", "verdict", "before"]
    table = _markdown([head, *(line for entry in found for line in _lines(entry))])
    return [*table, ""]


def _notes(found: Sequence[Entry]) -> list[str]:
    """The command of each study and scale, and what must be known to read its verdicts."""
    known: dict[tuple[str, str], tuple[str, dict[str, None]]] = {}
    for entry in found:
        for judged in entry.judged:
            _, caveats = known.setdefault((entry.study, judged.made.place), (judged.made.command, {}))
            caveats |= dict.fromkeys([*judged.learned, *judged.verdict.caveats])
    return [
        f"- {study} ({place}): `{command}`{'. ' if caveats else ''}{_sentences(caveats)}"
        for (study, place), (command, caveats) in known.items()
    ]


def _sentences(caveats: Iterable[str]) -> str:
    return " ".join(f"{text[:1].upper()}{text[1:]}." for text in caveats)


def _lines(entry: Entry) -> list[list[str]]:
    """One line per scale; the claim is in the first."""
    claim = entry.claim
    first = [f"{claim.says.rstrip('.')} ({claim.where}){' **=**' if claim.equal else ''}", _paper(claim)]
    if not entry.judged:
        return [[*first, f"`byov study {entry.study} --seeds 3`", "", NOT_RUN, ""]]
    return [
        [
            *(first if i == 0 else ["", ""]),
            _ours(judged),
            _observable(judged.verdict),
            _word(judged),
            judged.before or "",
        ]
        for i, judged in enumerate(entry.judged)
    ]


def _observable(verdict: Verdict) -> str:
    """From the smallest effect that could have been distinguished from 0 to the largest that was possible."""
    smallest, room = verdict.half_width, verdict.room
    parts = [
        "" if smallest is None else f"from {smallest:.2g}",
        "" if room is None or math.isinf(room) else f"to {room:.2g}",
    ]
    return " ".join(part for part in parts if part)


MARK = "¹"
NOT_LEARNED = "; the encoder is not shown to have learned"


def _word(judged: Judged) -> str:
    """The verdict, and whether its precondition is known not to hold; marked if something else must be known."""
    if not judged.verdict.seeds:
        return judged.verdict.word
    failed = NOT_LEARNED if judged.made.learned and judged.learned else ""
    more = judged.verdict.caveats or not judged.made.learned
    return f"{judged.verdict.word}{failed}{MARK if more else ''}"


def _paper(claim: Claim) -> str:
    """The number as printed; without one, the size that was chosen beforehand."""
    return f"{claim.paper}; {'margin' if claim.equal else 'size'} {claim.size:.3g} {claim.unit}"


def _ours(judged: Judged) -> str:
    verdict, place = judged.verdict, judged.made.place
    if verdict.estimate is None:
        return f"nothing measured ({place})"
    if verdict.low is None or verdict.high is None:
        return f"{_signed(verdict.estimate)}, ± {1.96 * verdict.image_error:.2g} by the images alone (1 seed, {place})"
    low, high = _signed(verdict.low), _signed(verdict.high)
    return f"{_signed(verdict.estimate)} [{low}, {high}] ({verdict.seeds} seeds, {place})"


def _signed(value: float) -> str:
    """Three digits; the rounding error of a sum that is 0 becomes 0."""
    return f"{round(value, 9):+.3g}"


def _markdown(table: Sequence[Sequence[str]]) -> list[str]:
    head, *lines = [[cell.replace("|", "\\|") for cell in line] for line in table]
    return [_line(head), "|" + "---|" * len(head), *map(_line, lines)]


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
