"""Claims judged from written rows, at every scale; the page and its JSON; no claim of the paper is left out."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from byov._core.errors import BadInput
from byov.cli.main import main
from byov.studies.framework import ledger
from byov.studies.framework.checklist import NOT_JUDGED, REQUIRED, SECTIONS, NotJudged, missing, sections
from byov.studies.framework.claims import CANNOT_TELL, OPPOSITE, SHOWN, Claim, Effect


def effects(rows: list[dict[str, Any]]) -> list[Effect]:
    return [Effect(row["seed"], row["x"]) for row in rows]


CLAIM = Claim("4.1, Figure 2", "|x| is better", "2.83 points", "points of x", 2.83, effects)
SAME = Claim("Appendix G, Table 1", "x stays", "no number", "points of x", 1.0, effects, equal=True)


@pytest.fixture
def studies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two studies: one made at three scales, one never."""
    modules = {"fig2": SimpleNamespace(CLAIMS=[CLAIM]), "plain": SimpleNamespace(), "g": SimpleNamespace(CLAIMS=[SAME])}
    monkeypatch.setattr(ledger, "names", lambda: list(modules))
    monkeypatch.setattr(ledger, "find", modules.__getitem__)
    monkeypatch.setattr(ledger, "NOT_JUDGED", [NotJudged("1.1", "it scales", "no such machine.")])
    values = {"micro": (2.0,), "mini": (3.0, 3.1, 2.9), "mini-fashion_mnist": (-3.0, -3.1, -2.9)}
    for scale, found in values.items():
        folder = tmp_path / "studies" / "fig2" / scale
        folder.mkdir(parents=True)
        data = {"micro": "digits", "mini": "cifar10"}.get(scale, "fashion_mnist")
        settings = {"study": "fig2", "scale": scale, "seeds": len(found), "data": data, "images": None}
        rows = [{"seed": seed, "x": x} for seed, x in enumerate(found)]
        (folder / "fig2.json").write_text(json.dumps({"settings": settings, "rows": rows}))
    (tmp_path / "studies" / "fig2" / "mini" / "fig2.png").write_bytes(b"picture")
    return tmp_path / "studies"


def test_a_claim_is_judged_at_every_scale_that_there_is(studies: Path) -> None:
    judged, never = ledger.entries(ledger.made_studies(studies))
    assert [j.made.scale for j in judged.judged] == ["micro", "mini", "mini-fashion_mnist"]
    assert [j.verdict.word for j in judged.judged] == [CANNOT_TELL, SHOWN, OPPOSITE]
    assert [j.made.command for j in judged.judged] == [
        "byov study fig2 --scale micro --seeds 1",
        "byov study fig2 --scale mini --seeds 3",
        "byov study fig2 --scale mini --seeds 3 --data fashion_mnist",
    ]
    assert (never.study, never.judged) == ("g", [])


def test_a_folder_as_source_is_given_back_in_the_command() -> None:
    made = ledger.Made("fig2", "mini-folder-my-own-images", {"data": "folder:my/own images", "seeds": 2}, [], None)
    assert made.command == "byov study fig2 --scale mini --seeds 2 --data 'folder:my/own images'"


def test_the_command_writes_page_numbers_and_figures(studies: Path, tmp_path: Path) -> None:
    out = tmp_path / "docs" / "results.md"
    with pytest.raises(SystemExit, match="0"):
        main(["ledger", "--studies", str(studies), "--out", str(out)])
    page, kept = out.read_text(), json.loads(out.with_suffix(".json").read_text())
    assert (
        "| \\|x\\| is better (4.1, Figure 2) | 2.83 points; size 2.83 points of x | +2, ± 0 by the images alone" in page
    )
    assert "|  |  | +3 [+2.75, +3.25] (3 seeds, mini, cifar10) | from 0.25 | shown¹ |  |" in page
    assert "- fig2 (mini, cifar10): `byov study fig2 --scale mini --seeds 3`. It was not measured whether" in page
    assert "x stays (Appendix G, Table 1) **=** | no number; margin 1 points of x | `byov study g" in page
    assert "- No verdict: it scales (1.1). no such machine." in page
    assert "| mini | 1 | 0 | 0 | 0 | 0 | 1 |" in page and "## Appendix G" in page and "## 4.2" not in page
    assert "[figures/fig2-mini.png](figures/fig2-mini.png)" in page
    assert (out.parent / "figures" / "fig2-mini.png").read_bytes() == b"picture"
    mini = kept["claims"][0]["scales"]["mini"]
    assert [effect["value"] for effect in mini["effects"]] == [3.0, 3.1, 2.9]
    assert mini["word"] == SHOWN and mini["settings"]["data"] == "cifar10"
    assert kept["counts"]["mini-fashion_mnist"]["opposite"] == 1


def test_without_any_study_all_is_not_run(studies: Path, tmp_path: Path) -> None:
    page = ledger.page(ledger.entries([]), [], [], "results.json")
    assert "No study has been run yet." in page and page.count("not run |") == 2 and "None yet." in page


def test_rows_of_another_version_and_broken_files_are_reported(studies: Path) -> None:
    path = studies / "fig2" / "mini" / "fig2.json"
    kept = json.loads(path.read_text())
    path.write_text(json.dumps(kept | {"rows": [{"seed": 0}]}))
    with pytest.raises(BadInput, match=r"KeyError: 'x'\): make them again with `byov study fig2 --scale mini"):
        ledger.entries(ledger.made_studies(studies))
    for x in (None, "much"):
        path.write_text(json.dumps(kept | {"rows": [{"seed": seed, "x": x} for seed in (0, 1)]}))
        with pytest.raises(BadInput, match="TypeError"):
            ledger.entries(ledger.made_studies(studies))
    path.write_text(json.dumps(kept | {"rows": [{"seed": 0, "x": 1.0}, {"seed": 0, "x": 2.0}]}))
    with pytest.raises(BadInput, match="more than one effect per seed"):
        ledger.entries(ledger.made_studies(studies))
    path.write_text("{")
    with pytest.raises(BadInput, match="make it again"):
        ledger.made_studies(studies)
    with pytest.raises(SystemExit, match="2"):
        main(["ledger", "--studies", str(studies / "nowhere")])


# ----------------------------------------------------------------------------------------------------------- the paper


@pytest.mark.parametrize(
    ("where", "named"),
    [
        ("Abstract; 4.1, Figure 2", ["Abstract", "4.1"]),
        ("Appendix D, Figure 5", ["D"]),
        ("App. G, Table 1", ["G"]),
        ("abstract", ["Abstract"]),
        ("4.3, Figure 4 (right)", ["4.3"]),
        ("5", ["5"]),
        ("Table 1", []),
        ("5 (and 1.1: aligned)", ["5", "1.1"]),
        ("4.4; reader's summary, next check 3", ["4.4"]),
        ("BYOL talk, what prevents collapse", []),
    ],
)
def test_sections_of_a_place(where: str, named: list[str]) -> None:
    assert sections(where) == named


def test_a_claim_without_a_row_is_noticed() -> None:
    known = [(section, f"it says {key} of it") for section, key in REQUIRED]
    assert missing(known) == []
    assert missing(known[1:]) == [REQUIRED[0]]


def test_every_claim_of_the_paper_has_a_row() -> None:
    rows = [(entry.claim.where, entry.claim.says) for entry in ledger.entries([])]
    rows += [(each.where, each.says) for each in NOT_JUDGED]
    assert {section for section, _ in REQUIRED} == set(SECTIONS)
    assert missing(rows) == []


def test_claims_can_be_judged() -> None:
    """A size is a size, no rows are no effects, and no sentence stands there twice."""
    found = ledger.entries([])
    assert all(entry.claim.effects([]) == [] for entry in found)
    assert all(entry.claim.size > 0 for entry in found)
    said = [(entry.claim.where, entry.claim.says) for entry in found]
    assert len(set(said)) == len(said)


def test_the_ledger_in_the_docs_is_that_of_the_rows_saved_there() -> None:
    docs = Path(__file__).parents[3] / "docs"
    found = ledger.as_json(ledger.entries(ledger.made_studies(docs / "rows")))
    kept = json.loads((docs / "results.json").read_text(encoding="utf-8"))
    assert found["counts"] == kept["counts"]
    assert [claim["says"] for claim in found["claims"]] == [claim["says"] for claim in kept["claims"]]


# ------------------------------------------------------------------------------- what the working point had decided


def test_earlier_verdicts_stand_beside_the_new_ones(studies: Path, tmp_path: Path) -> None:
    first = tmp_path / "first.md"
    ledger.write(studies, first)
    path = studies / "fig2" / "mini" / "fig2.json"
    kept = json.loads(path.read_text())
    path.write_text(json.dumps(kept | {"rows": [{"seed": seed, "x": -3.0 + 0.1 * seed} for seed in range(3)]}))
    with pytest.raises(SystemExit, match="0"):
        out = tmp_path / "second.md"
        main(["ledger", "--studies", str(studies), "--out", str(out), "--before", str(first.with_suffix(".json"))])
    assert "| opposite¹ | shown |" in out.read_text()
    scales = json.loads(out.with_suffix(".json").read_text())["claims"][0]["scales"]
    assert (scales["mini"]["word"], scales["mini"]["before"]) == (OPPOSITE, SHOWN)
    with pytest.raises(BadInput, match="check --before"):
        ledger.read_before(path)


def learned(seed: int, over_pixels: float) -> dict[str, Any]:
    found = {"method": "byov", "seed": seed, "untrained.difference": 0.1 + 0.001 * seed, "untrained.error": 0.001}
    return found | {"pixels.difference": over_pixels + 0.001 * seed, "pixels.error": 0.001}


def test_the_verdict_says_that_the_encoder_has_not_learned(studies: Path) -> None:
    path = studies / "fig2" / "mini" / "fig2.json"
    kept = json.loads(path.read_text())
    for over, expected in ((0.02, "shown |"), (-0.02, f"shown{ledger.NOT_LEARNED} |")):
        path.write_text(json.dumps(kept | {"learned": [learned(seed, over) for seed in range(3)]}))
        found = ledger.entries(ledger.made_studies(studies))
        page = ledger.page(found, [], [], "results.json")
        assert f"from 0.25 | {expected}" in page
        fit = "1 of 1 studies" if over > 0 else "0 of 1 studies"
        assert f"- mini, cifar10: the encoders are shown to have learned in {fit}." in page
    assert "BYOV's probe is not shown to beat raw pixels (-1.9 points)." in page


def test_digits_are_exploratory(studies: Path) -> None:
    page = ledger.page(ledger.entries(ledger.made_studies(studies)), [], [], "results.json")
    assert "(1 seed, micro, digits, exploratory)" in page and "cifar10, exploratory" not in page
