"""The ledger as a page: the rule in words, how many verdicts of each kind, a table for each section, the figures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from byov.studies.framework.checklist import BEYOND, SECTIONS, NotJudged, sections
from byov.studies.framework.claims import WORDS, Claim, Verdict

if TYPE_CHECKING:
    from byov.studies.framework.ledger import Entry, Judged, Made

NOT_RUN = "not run"
INTRODUCTION = """\
# The paper's claims, one by one

Made by `byov ledger`; all numbers, seed by seed, are in [{json}]({json}). Each claim was written down with its rule,
in the module of its study (`docs/studies.md`). Rules were last changed after a review, when parts of what digits' seed
0 says had been seen, but nothing of any other seed or data set. The paper's numbers are of ViTs on ImageNet-1k; ours
are of networks and images that 2 CPU cores can train. What is shown here is shown at this scale; what is not may still
hold at theirs. What the paper says in several places stands in the first of them.

**The rule.** An effect is signed so that positive means "as the paper says". A run is set beside the one that it is
compared with, of the same seed, on the same test images: one effect a seed. The estimate is the mean over seeds. Its
variance is that over seeds divided by their number, plus the mean squared standard error over the test images
(bootstrap, both runs on the same resampled images; all seeds share the images, so that more seeds do not make it
smaller). The 95% interval is Student's t with the degrees of freedom of Welch and Satterthwaite: one less than there
are seeds where the images add nothing, more where they do.

- **shown**: the interval lies above 0. **opposite**: it lies below.
- **not shown**: it holds 0, but not the paper's effect: one of that size would have been seen.
- **cannot tell**: it holds both, or there are fewer than two seeds.
- A claim that two things are *the same* is marked **=**. Shown: the interval lies within the margin; opposite: wholly
  outside; else cannot tell.

*Least effect* is the half width of the interval: what is smaller could not have been told from nothing. Where the
paper prints no number, the least effect that would matter was chosen beforehand (the study's module says why). One seed
says how a picture looks, and how far the choice of test images alone could move a number; it cannot say what another
seed would give, so it has no verdict. Of directional claims with nothing behind them, one in forty is "shown" by chance
and one in forty "opposite"; claims that share runs err together.
"""


def page(
    found: Sequence[Entry], not_judged: Sequence[NotJudged], figures: Sequence[tuple[Made, str]], numbers: str
) -> str:
    """Markdown. `numbers` is the name of the JSON, and figures are named by their places, all beside the page."""
    parts = [INTRODUCTION.format(json=numbers), _summary(found, not_judged)]
    for section in (*SECTIONS, None):
        mine = [entry for entry in found if _section(entry.claim.where) == section]
        others = [each for each in not_judged if _section(each.where) == section]
        if mine or others:
            title = BEYOND if section is None else SECTIONS[section]
            parts.append("\n".join([f"## {title}\n", *_table(mine), *_reasons(others)]) + "\n")
    return "\n".join([*parts, _figures(figures)])


def counts(found: Sequence[Entry]) -> dict[str, dict[str, int]]:
    """How many verdicts of each kind each scale has."""
    scales = sorted({judged.made.scale for entry in found for judged in entry.judged})
    return {scale: _counted(found, scale) for scale in scales}


def _counted(found: Sequence[Entry], scale: str) -> dict[str, int]:
    words = Counter(j.verdict.word for entry in found for j in entry.judged if j.made.scale == scale)
    return {word: words[word] for word in WORDS} | {NOT_RUN: len(found) - words.total()}


def _section(where: str) -> str | None:
    """The first section that is named; None for what is not of the paper."""
    return next((name for name in sections(where) if name in SECTIONS), None)


def _summary(found: Sequence[Entry], not_judged: Sequence[NotJudged]) -> str:
    head = ["scale", *WORDS, NOT_RUN]
    lines = [[scale, *map(str, words.values())] for scale, words in counts(found).items()]
    text = f"{len(found)} claims have a rule; {len(not_judged)} more have none, and say why.\n"
    return "\n".join(
        ["## Summary\n", text, *(_markdown([head, *lines]) if lines else ["No study has been run yet."]), ""]
    )


def _table(found: Sequence[Entry]) -> list[str]:
    if not found:
        return []
    head = ["claim", "paper", "ours [95% interval]", "least effect", "verdict", "command"]
    return [*_markdown([head, *(line for entry in found for line in _lines(entry))]), ""]


def _lines(entry: Entry) -> list[list[str]]:
    """One line a scale; the claim stands in the first."""
    claim = entry.claim
    first = [f"{claim.says.rstrip('.')} ({claim.where}){' **=**' if claim.equal else ''}", _paper(claim)]
    if not entry.judged:
        return [[*first, "", "", NOT_RUN, f"`byov study {entry.study} --seeds 3`"]]
    return [
        [
            *(first if i == 0 else ["", ""]),
            _ours(judged),
            _half(judged.verdict),
            judged.verdict.word,
            f"`{judged.made.command}`",
        ]
        for i, judged in enumerate(entry.judged)
    ]


def _paper(claim: Claim) -> str:
    """The number as printed; where there is none, what was chosen beforehand."""
    return f"{claim.paper}; {'margin' if claim.equal else 'size'} {claim.size:.3g} {claim.unit}"


def _ours(judged: Judged) -> str:
    made, verdict = judged.made, judged.verdict
    place = f"{made.scale}, {made.settings['data']}"
    if verdict.estimate is None:
        return f"nothing measured ({place})"
    if verdict.low is None or verdict.high is None:
        return f"{_signed(verdict.estimate)}, ± {1.96 * verdict.image_error:.2g} by the images alone (1 seed, {place})"
    low, high = _signed(verdict.low), _signed(verdict.high)
    return f"{_signed(verdict.estimate)} [{low}, {high}] ({verdict.seeds} seeds, {place})"


def _signed(value: float) -> str:
    """Three digits; what only rounding has left of a sum that is 0 is 0."""
    return f"{round(value, 9):+.3g}"


def _half(verdict: Verdict) -> str:
    return "" if verdict.half_width is None else f"{verdict.half_width:.2g}"


def _reasons(not_judged: Sequence[NotJudged]) -> list[str]:
    return [f"- No verdict: {each.says} ({each.where}). {each.reason}" for each in not_judged]


def _figures(figures: Sequence[tuple[Made, str]]) -> str:
    lines = [f"- {made.study}, {made.scale} ({made.settings['data']}): [{path}]({path})" for made, path in figures]
    return "\n".join(["## Figures\n", *(lines or ["None yet."]), ""])


def _markdown(table: Sequence[Sequence[str]]) -> list[str]:
    head, *lines = [[cell.replace("|", "\\|") for cell in line] for line in table]
    return [_line(head), "|" + "---|" * len(head), *map(_line, lines)]


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
