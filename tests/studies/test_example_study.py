"""The study that docs/studies.md shows is one: it makes its files, and its claim is judged. And the page names all."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import ModuleType

import pytest

from byov.studies.framework import lab as labs
from byov.studies.framework import ledger
from byov.studies.framework.lab import Lab

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "studies.md").read_text(encoding="utf-8")


def test_the_example_is_a_study(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    block = re.search(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    assert block is not None
    cold = ModuleType("cold")
    exec(compile(block[1], "docs/studies.md", "exec"), cold.__dict__)
    for module in (labs, ledger):
        monkeypatch.setattr(module, "find", lambda name: cold)
    monkeypatch.setattr(ledger, "names", lambda: ["cold"])
    folder = labs.make("cold", lab)
    rows = json.loads((folder / "cold.json").read_text())["rows"]
    assert {(row["arm"], row["seed"], row["at"]) for row in rows} >= {("cold", 1, "draws"), ("warm", 0, "means")}
    assert rows[0]["median_sigma"] > 0
    (entry,) = ledger.entries(ledger.made_studies(lab.folder))
    assert entry.judged[0].verdict.seeds == 2 and entry.judged[0].made.figure is not None


def test_the_page_names_every_study() -> None:
    assert set(re.findall(r"^\| `([\w-]+)` \|", PAGE, re.MULTILINE)) == set(labs.names())
