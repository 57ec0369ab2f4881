"""The sections of the page about what an evaluation and a pruning found."""

from __future__ import annotations

import base64
import io
from pathlib import Path

import numpy as np
import pytest
from fabricated import change_results, full_run, pruning_results
from PIL import Image

from byov.data.sources import open_source
from byov.report.elements import Cell, Column
from byov.report.page import (
    EACH,
    example_section,
    outside_section,
    reliability_section,
    selective_section,
    shift_section,
    summary_rows,
)
from byov.report.plots import svg_charts
from byov.report.plots.svg_charts import CellMap, Line
from byov.report.run_data import load_run, load_runs
from byov.report.sections.pruning import pruning_section
from byov.report.sections.settings import different_settings


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[Line] | list[CellMap]]:
    """What is passed to the figures, by salt; nothing is drawn."""
    found: dict[str, list[Line] | list[CellMap]] = {}
    monkeypatch.setattr(svg_charts, "curves", lambda lines, salt, *_, **__: found.update({salt: list(lines)}) or "")
    monkeypatch.setattr(
        svg_charts, "cell_maps", lambda rows, columns, maps, salt: found.update({salt: list(maps)}) or ""
    )
    return found


def test_the_best_of_a_column_is_marked_to_the_digits_shown() -> None:
    up, down = Column("a", "", 1, 1, 100), Column("a", "", 2, -1)
    assert up.cells([0.5, 0.7, None]) == [Cell("50.0"), Cell("70.0", best=True), Cell("–")]
    assert down.cells([0.101, 0.104, 0.2]) == [Cell("0.10", best=True), Cell("0.10", best=True), Cell("0.20")]
    assert not any(cell.best for cell in [*up.cells([0.5]), *up.cells([0.5, 0.5])])


# --------------------------------------------------------------------------------------------------------------- shifts


def test_shifts_by_severity_and_less_those_of_the_baseline(tmp_path: Path, drawn: dict[str, list[CellMap]]) -> None:
    runs = load_runs([full_run(tmp_path / "byov"), full_run(tmp_path / "byol", "byol", ece=0.1, top1=0.93)])
    section = shift_section(runs)
    assert [picture.title for picture in section.pictures] == ["byov", "byol"] and section.notes == []
    ece, top1, ece_difference, top1_difference = drawn["shifts-byov"]
    severities = np.tile(np.arange(6), (2, 1))
    np.testing.assert_allclose(ece.values, 0.04 + severities / 100)
    np.testing.assert_allclose(top1.values, 95 - severities)
    np.testing.assert_allclose(ece_difference.values, -0.06)
    np.testing.assert_allclose(top1_difference.values, 2)
    assert (ece_difference.better, top1_difference.better) == (-1, 1)
    assert len(drawn["shifts-byol"]) == 2, "the baseline is not compared with itself"
    for one in (ece, drawn["shifts-byol"][0]):
        assert (one.low, one.high) == pytest.approx((0.04, 0.15)), "the same colours for both"


def test_the_baseline_of_the_evaluation_has_priority(tmp_path: Path, drawn: dict[str, list[CellMap]]) -> None:
    run = full_run(tmp_path / "byov")
    settings = {"data": "digits", "baseline": {"run": "somewhere/theirs"}}
    change_results(run, {"baseline.ece": -0.5, "baseline.shifts.blur.2.ece": -0.25, "settings": settings})
    runs = [load_run(run), load_run(full_run(tmp_path / "byol", "byol"))]
    assert "minus those of theirs" in shift_section(runs).pictures[0].note
    difference = drawn["shifts-byov"][2].values
    assert difference[1, 2] == -0.25 and (difference[:, 0] == -0.5).all()
    assert np.isnan(difference).sum() == 9, "the others are unknown"


def test_cells_show_numbers_and_colours_show_which_way_is_better() -> None:
    plain = CellMap("ECE", np.array([[0.0432]]), 0, 1)
    difference = CellMap("top-1, %", np.array([[0.0]]), -1, 1, better=1)
    assert plain.text(0.0432) == ".043" and plain.text(1.25) == "1.250"
    assert [difference.text(value) for value in (1.26, -0.04, 0.5)] == ["+1.3", "+0.0", "+0.5"]
    svg = svg_charts.cell_maps(["blur", "salt_pepper"], ["0"], [CellMap("ECE", np.array([[0.1], [np.nan]]), 0, 1)], "x")
    assert ">.100<" in svg and ">salt pepper<" in svg and svg.count("nan") == 0


# -------------------------------------------------------------------------------------------------------------- pruning


def test_pruning_curves_and_what_it_saves(tmp_path: Path, drawn: dict[str, list[Line]]) -> None:
    run = load_run(full_run(tmp_path / "run"))
    run.pruning["rounds"] = [{"sparsity": 0.9, "top1": 0.88}]
    section = pruning_section([load_run(full_run(tmp_path / "other")), run])
    assert [picture.title for picture in section.pictures] == ["Top-1 when pruned", "ECE when pruned"]  # no cosine
    lines = [line for line in drawn["Top-1 when pruned"] if line.slot == 1]
    assert lines == [
        Line([0.0, 0.5, 0.9], [0.95, 0.9, 0.4], 1),
        Line([0.9], [0.88], 1),
        Line([0.0, 0.5, 0.9], [row["refitted.top1"] for row in pruning_results()["curve"]], 1, thin=True),
    ]
    texts = [cell.text for cell in section.tables[0].rows[1].cells]
    assert texts == ["snr", "layer", "50%", "90.0", "95.0", "231,447", "372,001", "11,364", "11,364"]


# ---------------------------------------------------------------------------------------------------------- uncertainty


def test_risk_and_coverage(tmp_path: Path, drawn: dict[str, list[Line]]) -> None:
    run = load_run(full_run(tmp_path / "run"))
    assert run.default_score == "label_free_combined"
    images = len(run.images["means.top1"])
    section = selective_section([run])
    assert len(section.pictures) == 1
    strong, thin = drawn["risk"]
    assert (strong.thin, thin.thin) == (False, True)
    for x, y in zip(strong.x, strong.y, strict=True):  # of the k most certain, images 0, 10, 20, ... are wrong
        k = round(x * images)
        assert y == pytest.approx(((k + 9) // 10) / k)
    assert strong.x[-1] == 1 and strong.x[0] == pytest.approx(0.1, abs=1 / images)


def test_tables_of_scores(tmp_path: Path, drawn: object) -> None:
    run = load_run(full_run(tmp_path / "run"))
    table = selective_section([run]).tables[0]
    assert [row.name for row in table.rows] == ["max softmax", "label free knn cosine", "label free combined"]
    assert table.rows[0].cells == [Cell("0.900", True), Cell("0.010", True), Cell("–"), Cell("–")]
    outside = outside_section([run]).tables[0]
    assert outside.columns == ["mnist", "folder-x"]
    assert outside.rows[2].cells == [Cell("0.800", True), Cell("0.600")]


# ------------------------------------------------------------------------------------------------------------- examples


def test_the_most_and_the_least_certain_images(tmp_path: Path) -> None:
    section = example_section([load_run(full_run(tmp_path / "run"))])
    least, most = section.strips
    test = open_source("digits").load("test")
    assert test.labels is not None and test.classes is not None
    count = len(test)
    assert [image.score for image in least.images] == [f"{count - 1 - i:.3g}" for i in range(EACH)]
    assert [image.score for image in most.images] == [str(i) for i in range(EACH)]
    assert [image.percentile for image in most.images[:2]] == [f"P{50 / count:.1f}", f"P{150 / count:.1f}"]
    assert [image.wrong for image in most.images] == [True] + [False] * 7
    assert [image.label for image in most.images] == [test.classes[label] for label in test.labels[:EACH]]
    for i, image in enumerate(most.images):
        pixels = np.asarray(Image.open(io.BytesIO(base64.b64decode(image.source.partition(",")[2]))))
        assert (pixels == test.images[i, 0].numpy()).all()


@pytest.mark.parametrize(
    ("data", "words"), [("digits@train", "no test images"), ("npz:nowhere.npz", "nowhere.npz"), ("digits", "changed")]
)
def test_images_that_are_not_available_are_reported(tmp_path: Path, data: str, words: str) -> None:
    run = full_run(tmp_path / "run")
    change_results(run, {"settings": {"data": data}})
    loaded = load_run(run)
    if data == "digits":
        object.__setattr__(loaded, "evaluated_images", "of others")
    section = example_section([loaded, load_run(full_run(tmp_path / "whole"))])
    assert len(section.strips) == 2 and len(section.notes) == 1 and words in section.notes[0]
    assert not example_section([loaded]).filled and words in example_section([loaded]).empty


def test_scores_that_are_not_numbers_are_left_out(tmp_path: Path) -> None:
    from byov._core.cache import read_entry, write_entry

    run = full_run(tmp_path / "run")
    path = run / "results" / "evaluation.safetensors"
    entry = read_entry(path)
    assert entry is not None
    entry.tensors["score.label_free_combined"][3] = np.nan
    write_entry(path, entry)
    assert load_run(run).default_score == "label_free_knn_cosine"
    path.write_bytes(b"cut sho")
    assert "no scores per test image" in example_section([load_run(run)]).empty


# ------------------------------------------------------------------------------------------------------ draws, settings


def test_draws_have_a_row_and_a_diagram(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(svg_charts, "reliability", lambda *_: "<svg></svg>")
    run = full_run(tmp_path / "run")
    bins = [[1, 0.5, 0.5]] * 15
    change_results(run, {"draws.top1": 0.961, "draws.ece": 0.021, "draws.bins": bins, "settings": {"draws": 7}})
    loaded = load_run(run)
    row = summary_rows([loaded])[1]
    assert row.name == "run, mean over 7 draws" and [cell.text for cell in row.cells[:2]] == ["96.1", "0.021"]
    titles = [picture.title for picture in reliability_section([loaded]).pictures]
    assert titles == ["run, ECE 0.040", "run, mean over draws, ECE 0.021"]


def test_of_one_run_what_is_not_the_default(tmp_path: Path) -> None:
    table = different_settings([load_run(full_run(tmp_path / "run", "byol"))])
    assert table.columns == ["run", "default"]
    assert {row.key: row.values for row in table.rows} == {"method": ["byol", "byov"], "image_size": ["8", "–"]}
