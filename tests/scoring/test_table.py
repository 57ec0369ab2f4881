"""Scoring a folder into a table: what is written, what is skipped, and how it resumes."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image
from torch import Tensor

from byov._core.errors import BadInput
from byov.data.sources import Stream, open_stream
from byov.scoring import table as scoring
from byov.scoring.scores import Scores
from byov.scoring.table import Scored, check_place, chunk_size, page_path, score_images, skipped_path

SIDE, IMAGES, BROKEN = 16, 200, (5, 70, 71, 199)
SETTINGS: dict[str, Any] = {"run": "a run", "draws": 3}


class Brightness:
    """Oddness is the mean pixel, uncertainty 255 less that; counts its images, and stops after some chunks."""

    def __init__(self, percentiles: bool = True, stop_after: int = 1000) -> None:
        self.percentiles, self.left, self.seen = percentiles, stop_after, 0

    def scores(self, images: Tensor) -> Scores:
        if not self.left:
            raise KeyboardInterrupt
        self.left -= 1
        self.seen += len(images)
        mean = images.double().mean((1, 2, 3))
        shares = (mean / 2.55, 100 - mean / 2.55) if self.percentiles else (None, None)
        return Scores(mean, shares[0], 255 - mean, shares[1], images[:, :, 0, :2].flatten(1))


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """200 pictures in two folders, each of one grey; 4 are broken, and one has an unsupported format."""
    root = tmp_path_factory.mktemp("photos")
    for i in range(IMAGES):
        path = root / "ab"[i // 100] / f"{i:03d}.png"
        path.parent.mkdir(exist_ok=True)
        Image.new("RGB", (20, 24), (i, i, i)).save(path)
        if i in BROKEN:
            path.write_bytes(path.read_bytes()[:40])
    (root / "b" / "phone.heic").touch()
    return root


@pytest.fixture
def stream(photos: Path, monkeypatch: pytest.MonkeyPatch) -> Stream:
    """In chunks of 64."""
    monkeypatch.setattr(scoring, "CHUNK_IMAGES", 64)
    return open_stream(str(photos), SIDE)


COLUMNS = ["path", "oddness", "oddness_percentile", "uncertainty", "uncertainty_percentile"]
WHOLE = [i for i in range(IMAGES) if i not in BROKEN]
NAMES = [f"{'ab'[i // 100]}/{i:03d}.png" for i in WHOLE]


def test_a_row_per_image_in_parquet(stream: Stream, tmp_path: Path) -> None:
    out, said, reported = tmp_path / "new" / "odd.parquet", [], []
    scored = score_images(Brightness(), stream, out, SETTINGS, say=said.append, progress=lambda *a: reported.append(a))
    table = pq.read_table(out)
    assert table.column_names == [*COLUMNS, "embedding"]
    assert table["path"].to_pylist() == NAMES == scored.names
    assert table["oddness"].to_pylist() == WHOLE
    assert table["uncertainty"].to_pylist() == [255 - i for i in WHOLE]
    shares = np.array(WHOLE) / 2.55
    np.testing.assert_allclose(table["oddness_percentile"].to_numpy(), shares, rtol=1e-6)
    np.testing.assert_allclose(table["uncertainty_percentile"].to_numpy(), 100 - shares, rtol=1e-6)
    assert table.schema.field("embedding").type.list_size == 6
    assert table["embedding"].to_pylist() == [[i] * 6 for i in WHOLE]
    assert json.loads(table.schema.metadata[b"byov"]) == SETTINGS
    assert scored.positions.tolist() == WHOLE
    for name in COLUMNS[1:]:
        assert getattr(scored, name).tolist() == table[name].to_pylist()
    skipped = skipped_path(out).read_text().splitlines()
    assert [line.split(":")[0] for line in skipped] == [
        "a/005.png",
        "a/070.png",
        "a/071.png",
        "b/199.png",
        "b/phone.heic",
    ]
    assert len(said) == 1 and said[0].startswith("warning: 5 of 201 files") and str(skipped_path(out)) in said[0]
    assert reported[-1] == (f"scoring {stream.name}", 200, 200)
    assert sorted(path.name for path in out.parent.iterdir()) == ["odd.parquet", "odd.parquet.skipped.txt"]


def test_csv_has_no_embedding_and_reads_back_the_same(stream: Stream, tmp_path: Path) -> None:
    out = tmp_path / "odd.csv"
    scored = score_images(Brightness(percentiles=False), stream, out, SETTINGS, say=lambda text: None)
    assert scored.oddness_percentile is scored.uncertainty_percentile is None
    with out.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == COLUMNS
    assert [row["path"] for row in rows] == NAMES
    for name in ("oddness", "uncertainty"):
        assert [np.float32(row[name]) for row in rows] == getattr(scored, name).tolist()
        assert {row[f"{name}_percentile"] for row in rows} == {""}


def test_csv_has_both_percentiles(stream: Stream, tmp_path: Path) -> None:
    out = tmp_path / "odd.csv"
    scored = score_images(Brightness(), stream, out, SETTINGS, say=lambda text: None)
    with out.open(newline="") as file:
        rows = list(csv.DictReader(file))
    for name in COLUMNS[1:]:
        assert [np.float32(row[name]) for row in rows] == getattr(scored, name).tolist()


def test_no_path_in_csv_is_a_formula_and_all_still_name_their_files(tmp_path: Path) -> None:
    names = ["=1+2.png", "+a.png", "-b.png", "@c.png", "\td.png", "=dir/e.png", "f=1.png", "\uff1dg.png"]
    photos, out = tmp_path / "photos", tmp_path / "odd.csv"
    for name in names:
        (photos / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (20, 20)).save(photos / name)
    score_images(Brightness(), open_stream(str(photos), SIDE), out, SETTINGS, say=lambda text: None)
    with out.open(newline="", encoding="utf-8") as file:
        paths = [row["path"] for row in csv.DictReader(file)]
    assert {path.lower()[:2] for path in paths} == {"./", "f="}
    assert sorted((photos / path).relative_to(photos) for path in paths) == sorted(map(Path, names))


def test_without_embedding(stream: Stream, tmp_path: Path) -> None:
    out = tmp_path / "odd.parquet"
    score_images(Brightness(), stream, out, SETTINGS, embedding=False, say=lambda text: None)
    assert pq.read_schema(out).names == COLUMNS


def test_a_stop_loses_one_chunk_at_most(stream: Stream, tmp_path: Path) -> None:
    whole, out, said = tmp_path / "whole.parquet", tmp_path / "odd.parquet", []
    score_images(Brightness(), stream, whole, SETTINGS, say=lambda text: None)
    with pytest.raises(KeyboardInterrupt):
        score_images(Brightness(stop_after=2), stream, out, SETTINGS, say=said.append)
    assert not out.exists() and not said
    check_place(out, page=True)
    second = Brightness()
    score_images(second, stream, out, SETTINGS, say=said.append)
    assert second.seen == len([i for i in WHOLE if i >= 128])
    assert "128 of 200 images are done" in said[0]
    assert pq.read_table(out).equals(pq.read_table(whole))
    assert not list(tmp_path.glob(".*"))


def test_a_stop_while_the_page_is_made(stream: Stream, tmp_path: Path) -> None:
    out = tmp_path / "odd.parquet"

    def half_a_page(scored: Scored) -> None:
        page_path(out).write_text("half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        score_images(Brightness(), stream, out, SETTINGS, page=half_a_page, say=lambda text: None)
    assert not out.exists()
    check_place(out, page=True)  # the page belongs to this table

    seen: list[Scored] = []
    score_images(Brightness(stop_after=0), stream, out, SETTINGS, page=seen.append, say=lambda text: None)
    assert seen[0].names == NAMES and out.exists()


def test_tables_of_other_settings_do_not_mix(stream: Stream, tmp_path: Path) -> None:
    out = tmp_path / "odd.parquet"
    with pytest.raises(KeyboardInterrupt):
        score_images(Brightness(stop_after=1), stream, out, SETTINGS, say=lambda text: None)
    with pytest.raises(BadInput, match=r"differs in draws\): remove it"):
        score_images(Brightness(), stream, out, SETTINGS | {"draws": 4}, say=lambda text: None)
    assert not out.exists()


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    out = tmp_path / "odd.parquet"
    check_place(out, page=True)
    for taken, page in ((page_path(out), True), (skipped_path(out), False), (out, False)):
        taken.touch()
        with pytest.raises(BadInput, match=f"{taken.name} exists already"):
            check_place(out, page)
        taken.unlink()
    page_path(out).touch()
    check_place(out, page=False)
    with pytest.raises(BadInput, match=r"\.parquet or \.csv"):
        check_place(tmp_path / "odd.txt", page=True)


def test_a_parquet_and_a_csv_table_of_one_name_stand_next_to_each_other(stream: Stream, tmp_path: Path) -> None:
    for out in (tmp_path / "odd.parquet", tmp_path / "odd.csv"):
        check_place(out, page=True)
        score_images(Brightness(), stream, out, SETTINGS, say=lambda text: None)
        page_path(out).touch()
        assert skipped_path(out).is_file()
    assert sorted(path.name for path in tmp_path.glob("*.html")) == ["odd.csv.html", "odd.html"]


def test_a_path_is_the_real_one_and_its_name_one_line(tmp_path: Path) -> None:
    photos = tmp_path / "photos"
    photos.mkdir()
    for i, name in enumerate(("a\nb.png", "c\x1b.png", "plain é.png", "surrogate \udcff.png")):
        Image.new("L", (9, 9), i).save(photos / name)
    (photos / "broken\n.png").touch()
    for out in (tmp_path / "odd.parquet", tmp_path / "odd.csv"):
        scored = score_images(Brightness(), open_stream(str(photos), SIDE), out, SETTINGS, say=lambda text: None)
        if out.suffix == ".csv":
            with out.open(newline="", encoding="utf-8") as file:
                paths = [row["path"] for row in csv.DictReader(file)]
        else:
            paths = pq.read_table(out)["path"].to_pylist()
        assert paths[:3] == ["a\nb.png", "c\x1b.png", "plain é.png"] and paths[3].isprintable()
        assert all((photos / path).is_file() for path in paths[:3])
        assert scored.names == ["a\\nb.png", "c\\x1b.png", "plain é.png", paths[3]]
        assert skipped_path(out).read_text() == "broken\\n.png: empty file\n"


DAMAGE: dict[str, Callable[[list[Path]], None]] = {
    "shortened": lambda chunks: _put(chunks[0], chunks[0].read_bytes()[:100]),
    "duplicated": lambda chunks: _put(chunks[0], chunks[1].read_bytes()),
    "a flipped bit": lambda chunks: _put(chunks[0], _flipped(chunks[0].read_bytes())),
}


def _put(path: Path, content: bytes) -> None:
    path.write_bytes(content)


def _flipped(content: bytes) -> bytes:
    return content[:-9] + bytes([content[-9] ^ 64]) + content[-8:]


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_chunk_is_scored_again(stream: Stream, tmp_path: Path, damage: Any) -> None:
    out = tmp_path / "odd.parquet"
    with pytest.raises(KeyboardInterrupt):
        score_images(Brightness(stop_after=2), stream, out, SETTINGS, say=lambda text: None)
    damage(sorted(tmp_path.rglob("chunk-*")))
    again = Brightness()
    score_images(again, stream, out, SETTINGS, say=lambda text: None)
    assert again.seen == len([i for i in WHOLE if i < 64 or i >= 128])
    assert pq.read_table(out)["path"].to_pylist() == NAMES


def test_rows_that_are_not_finite_are_not_written(stream: Stream, tmp_path: Path) -> None:
    class Diverged(Brightness):
        def scores(self, images: Tensor) -> Scores:
            return super().scores(images)._replace(uncertainty=torch.full((len(images),), float("nan")))

    with pytest.raises(BadInput, match="the uncertainty of some images is not finite"):
        score_images(Diverged(), stream, tmp_path / "odd.parquet", SETTINGS, say=lambda text: None)
    assert not (tmp_path / "odd.parquet").exists()


def test_a_full_disk_is_one_sentence_and_it_resumes_later(stream: Stream, tmp_path: Path, files_up_to: Any) -> None:
    out = tmp_path / "odd.parquet"
    with files_up_to(300), pytest.raises(BadInput, match="no space left"):
        score_images(Brightness(), stream, out, SETTINGS, say=lambda text: None)
    with pytest.raises(KeyboardInterrupt):
        score_images(Brightness(stop_after=3), stream, out, SETTINGS, say=lambda text: None)
    before = sorted(path.name for path in tmp_path.rglob("chunk-*"))
    assert len(before) == 3
    with files_up_to(300), pytest.raises(BadInput, match="no space left"):
        score_images(Brightness(), stream, out, SETTINGS, say=lambda text: None)
    assert sorted(path.name for path in tmp_path.rglob("chunk-*")) == before and not out.exists()
    score_images(Brightness(), stream, out, SETTINGS, say=lambda text: None)
    assert pq.read_table(out)["path"].to_pylist() == NAMES


def test_a_chunk_without_one_whole_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scoring, "CHUNK_IMAGES", 64)
    photos = tmp_path / "photos"
    photos.mkdir()
    for i in range(70):
        path = photos / f"{i:02d}.png"
        if i < 66:
            path.write_bytes(b"")
        else:
            Image.new("L", (9, 9), i).save(path)
    stream = open_stream(str(photos), SIDE)
    scored = score_images(Brightness(), stream, tmp_path / "odd.parquet", SETTINGS, say=lambda text: None)
    assert scored.names == ["66.png", "67.png", "68.png", "69.png"] and len(scored.skipped) == 66
    assert pq.read_table(tmp_path / "odd.parquet")["oddness"].to_pylist() == [66, 67, 68, 69]
    for i in range(66, 70):
        (photos / f"{i}.png").write_bytes(b"no image")
    with pytest.raises(BadInput, match=r"none of the images in .* \(empty file\)"):
        score_images(Brightness(), open_stream(str(photos), SIDE), tmp_path / "none.csv", SETTINGS)
    assert not list(tmp_path.glob("*none*")) and not list(tmp_path.glob(".*"))


def test_chunks_are_bounded_in_images_and_bytes() -> None:
    def stream(side: int) -> Stream:
        return Stream("x", [], "", 3, side)

    assert chunk_size(stream(32)) == 2048
    assert chunk_size(stream(224)) * 3 * 224**2 <= scoring.CHUNK_BYTES < (chunk_size(stream(224)) + 1) * 3 * 224**2
    assert chunk_size(stream(1024)) == 64
