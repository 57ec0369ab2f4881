"""The rule for the working point, on maps made by hand; and the study's files, from runs that cost nothing."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from byov._core.errors import BadInput
from byov.studies.beyond import working_point
from byov.studies.beyond.working_point import RATES, TEMPERATURES, chosen, point
from byov.studies.framework import lab as labs
from byov.studies.framework.lab import Lab

COLD, COOL, WARM, HOT = TEMPERATURES


def row(temperature: float | None, rate: float | None, top1: float, draws: float, sigma: float, steps: int = 1) -> dict:
    return {
        "temperature": temperature,
        "log_variance_lr": rate,
        "seed": 0,
        "steps": steps,
        "top1": top1,
        "draws.top1": draws,
        "validation.top1": top1,
        "validation.draws.top1": draws,
        "draws_unaligned.top1": draws - 0.1,
        "median_sigma": sigma,
        "initial_sigma": 0.001,
        "sigma_magnitude_spearman": 0.1,
    }


def table() -> list[dict[str, Any]]:
    """WARM has (a), not (b); HOT has neither; COOL has both."""
    rows = [row(None, None, 0.50, 0.50, 0.0)]
    for rate in RATES:
        rows += [
            row(COLD, rate, 0.50, 0.50, 0.01),
            row(COOL, rate, 0.49, 0.48, 0.02),
            row(WARM, rate, 0.485, 0.40, 0.05),
            row(HOT, rate, 0.40, 0.39, 0.2),
        ]
    return rows


def test_a_point_has_its_distance_to_byol_and_of_its_draws_to_it() -> None:
    rows = table()
    here = point(rows, WARM, RATES[0])
    assert here["to_byol"] == pytest.approx(-0.015)
    assert here["draws_to_means"] == pytest.approx(-0.085)
    assert not here["accurate"] and here["change"] is None
    assert point(rows, COOL, RATES[0])["accurate"]
    assert not point(rows, HOT, RATES[0])["accurate"]


def test_the_hottest_settled_point_is_chosen() -> None:
    rows = table()
    assert chosen(rows) is None  # nothing was trained twice as long
    rows.append(row(COOL, RATES[0], 0.49, 0.48, 0.03, steps=2))  # sigma grows by half
    assert chosen(rows) is None
    rows.append(row(COLD, RATES[1], 0.49, 0.48, 0.0115, steps=2))
    assert chosen(rows) == (COLD, RATES[1])
    rows.append(row(COOL, RATES[1], 0.49, 0.48, 0.0239, steps=2))
    assert chosen(rows) == (COOL, RATES[1])


def test_a_sigma_that_never_left_its_start_is_not_chosen() -> None:
    rows = [{**r, "initial_sigma": 0.015} for r in (*table(), row(COOL, RATES[1], 0.49, 0.48, 0.02, steps=2))]
    assert point(rows, COOL, RATES[1])["settled"] and not point(rows, COOL, RATES[1])["left"]
    assert chosen(rows) is None
    rows = [{**r, "initial_sigma": 0.031} for r in rows]  # it may have shrunk
    assert chosen(rows) == (COOL, RATES[1])


def test_the_study_writes_rows_and_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(working_point, "results", lambda lab: table())
    monkeypatch.setattr(Lab, "train", lambda lab, configs: None)
    monkeypatch.setattr(Lab, "learned", lambda lab, configs: [{"method": configs[0].method}])
    folder = labs.make("working-point", Lab(tmp_path, "micro", say=lambda text: None))
    assert folder == tmp_path / "working-point" / "micro"
    kept = json.loads((folder / "working-point.json").read_text())
    assert kept["learned"] == [{"method": "byol"}]
    assert kept["rows"] == table() and kept["settings"]["data"] == "digits"
    with (folder / "working-point.csv").open() as file:
        assert len(list(csv.DictReader(file))) == len(table())
    lines = (folder / "working-point.md").read_text().splitlines()
    assert len(lines) == 3 + len(TEMPERATURES) * len(RATES)
    assert (
        lines[2].startswith("| BYOL |  | 1 | 50.0 |")
        and lines[3].endswith("| a b d |")
        and lines[-1].endswith("| b d |")
    )
    assert (folder / "working-point.png").read_bytes()[:4] == b"\x89PNG"
    assert "</svg>" in (folder / "working-point.svg").read_text()


def test_the_map_is_of_the_first_seed_and_the_baseline_of_all(tmp_path: Path) -> None:
    configs = working_point.runs(Lab(tmp_path, "micro", seeds=2))
    assert [(c.method, c.seed) for c in configs[:2]] == [("byol", 0), ("byol", 1)]
    points = {(c.posterior.temperature, c.optim.log_variance_lr, c.seed) for c in configs[2:]}
    assert points == {(t, r, 0) for t in TEMPERATURES for r in RATES}


def test_more_is_trained_only_where_it_matters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hottest point near the bar is dropped by its second seed; the next works and, doubled, is settled."""
    asked: list[tuple[float | None, int, int]] = []

    def found(lab: Lab, t: float | None, r: float | None, seed: int, longer: int = 1) -> dict[str, Any]:
        asked.append((t, seed, longer))
        top1 = 0.5 if t in (None, COLD, COOL) else 0.49 if (t, seed) == (WARM, 0) else 0.3
        return {**row(t, r, top1, top1, 10 * (t or 1.0), longer), "seed": seed}

    monkeypatch.setattr(working_point, "RATES", RATES[:1])
    monkeypatch.setattr(working_point, "_row", found)
    monkeypatch.setattr(Lab, "train", lambda lab, configs: None)
    rows = working_point.results(Lab(tmp_path, "micro", seeds=2))
    assert asked[6:] == [(WARM, 1, 1), (COOL, 1, 1), (COOL, 0, 2), (COOL, 1, 2)]
    assert chosen(rows) == (COOL, RATES[0])


def test_studies_are_found_by_their_files(tmp_path: Path) -> None:
    assert "working-point" in labs.names() and "lab" not in labs.names()
    with pytest.raises(BadInput, match="no study 'fig9'"):
        labs.find("fig9")
