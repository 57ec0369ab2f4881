"""The page next to a table of scores: what is on it, that it is self-contained, and that it works in a browser."""

from __future__ import annotations

import base64
import io
import json
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from byov.data.images import ImageSet
from byov.data.sources import Stream, open_stream
from byov.report.gallery import (
    EACH,
    GROUPS,
    MEMBERS,
    Group,
    data_uri,
    histogram,
    ranks,
    render,
    selection,
    write_gallery,
)
from byov.scoring.table import Scored

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


def of(
    oddness: np.ndarray, names: list[str] | None = None, percentile: bool = True, uncertainty: np.ndarray | None = None
) -> Scored:
    """By default, the oddest is the most certain, so that sorting by the other score shows."""
    count = len(oddness)
    uncertainty = 10 - oddness if uncertainty is None else uncertainty
    embedding = np.random.default_rng(1).normal(size=(count, 8)).astype(np.float32)

    def shares(values: np.ndarray) -> np.ndarray | None:
        ranked = (np.argsort(np.argsort(values)) + 0.5) / count * 100
        return ranked.astype(np.float32) if percentile else None

    return Scored(
        names=names or [f"x#{i}" for i in range(count)],
        positions=np.arange(count),
        oddness=oddness.astype(np.float32),
        oddness_percentile=shares(oddness),
        uncertainty=uncertainty.astype(np.float32),
        uncertainty_percentile=shares(uncertainty),
        embedding=embedding,
        skipped=[],
    )


def in_memory(count: int, side: int = 8) -> Stream:
    pixels = torch.randint(0, 256, (count, 3, side, side), dtype=torch.uint8, generator=torch.manual_seed(0))
    return Stream("x", [f"x#{i}" for i in range(count)], "", 3, side, memory=ImageSet(pixels))


def shown(page: str) -> list[tuple[str, str, str]]:
    """Name, rank and kind of the images on a page, in its order."""
    return re.findall(r'<li class="item" data-name="([^"]*)" data-rank="(\d+)" data-kind="(\w*)" ', page)


# ------------------------------------------------------------------------------------------------------ what is chosen


def test_ranks_begin_with_the_oddest() -> None:
    assert ranks(np.array([0.1, 0.9, 0.5, 0.9], np.float32)).tolist() == [4, 1, 3, 2]


def test_both_ends_and_some_between_are_chosen() -> None:
    rank = ranks(np.random.default_rng(0).normal(size=1000).astype(np.float32))
    chosen = selection(rank, each=10)
    by_kind = {kind: [int(rank[row]) for row, k in chosen.items() if k == kind] for kind in ("odd", "middle", "usual")}
    assert by_kind["odd"] == list(range(1, 11)) and by_kind["usual"] == list(range(991, 1001))
    assert len(by_kind["middle"]) == 10 and by_kind["middle"][0] == 11 and by_kind["middle"][-1] == 990
    assert [rank[row] for row in chosen] == sorted(rank[row] for row in chosen)


@pytest.mark.parametrize("count", [1, 2, 3, 10, 179, 180, 181])
def test_few_images_are_all_shown_once(count: int) -> None:
    chosen = selection(ranks(np.arange(count, dtype=np.float32)))
    assert len(chosen) == min(count, 3 * EACH)
    assert next(iter(chosen.values())) == "odd"


def test_histogram_counts_every_finite_value() -> None:
    values = np.r_[np.random.default_rng(0).normal(size=5000), 1e6, np.nan].astype(np.float32)
    found = histogram(values)
    bars = found.bars
    assert sum(bar.count for bar in bars) == 5001 and max(bar.height for bar in bars) == 1
    assert bars[-1].high < 5  # one value far away does not press all others into one bar
    assert (found.below, found.above) == (5, 5)
    assert found.note == "The first bar includes 5 below the scale and the last bar includes 5 above the scale."
    percentiles = histogram(np.array([0, 2.4, 50, 100], np.float32), (0.0, 100.0))
    percent = percentiles.bars
    assert percentiles.note == ""
    assert [bar.count for bar in percent if bar.count] == [2, 1, 1] and (percent[0].low, percent[-1].high) == (0, 100)
    assert [bar.count for bar in histogram(np.full(7, 0.3, np.float32)).bars] == [7]
    assert histogram(np.array([np.nan], np.float32)).bars == []


def decoded(uri: str) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(uri.partition(",")[2]))))


def test_small_pictures_lose_nothing_large_ones_little() -> None:
    small = np.random.default_rng(0).integers(0, 256, (3, 8, 8), dtype=np.uint8)
    assert (decoded(data_uri(small)) == small.transpose(1, 2, 0)).all()
    assert (decoded(data_uri(small[:1])) == small[0]).all()
    large = np.broadcast_to(np.arange(224, dtype=np.uint8), (3, 224, 224))
    uri = data_uri(large)
    assert uri.startswith("data:image/jpeg") and len(uri) < 20_000
    assert np.abs(decoded(uri).astype(int) - large.transpose(1, 2, 0)).mean() < 2


# ---------------------------------------------------------------------------------------------------------- the page


def test_a_page_of_many_images_is_bounded(tmp_path: Path) -> None:
    scored = of(np.random.default_rng(0).gamma(2, size=1000))
    groups = [Group(list(range(10 * g, 10 * g + 9)), 0.99) for g in range(50)]
    page = render(scored, in_memory(1000), groups, [("draws", "20")])
    assert len(shown(page)) == 3 * EACH + GROUPS * MEMBERS
    rank = ranks(scored.oddness)
    assert all(int(place) == rank[int(name[2:])] for name, place, _ in shown(page))
    assert shown(page)[0][1:] == ("1", "odd") and shown(page)[3 * EACH - 1][1:] == ("1000", "usual")
    text = re.sub(r"\s+", " ", re.sub(r"<[^>]*>", " ", page))
    for words in (
        "1,000 images, ranked by oddness",
        "180 of 1,000",
        "50 groups",
        "the 24 most similar",
        "9 images, cosine 0.9900",
        "draws 20",
    ):
        assert words in text, words


def test_values_beyond_a_histogram_are_counted_on_the_page() -> None:
    page = render(of(np.r_[np.linspace(1, 2, 2000), 900.0], percentile=False), in_memory(2001), [])
    assert page.count("The first bar includes 2 below the scale and the last bar includes 2 above the scale.") == 2


def test_near_duplicates_are_found_and_shown(tmp_path: Path) -> None:
    scored = of(np.linspace(1, 2, 30))
    scored.embedding[20] = scored.embedding[4]
    write_gallery(scored, in_memory(30), tmp_path / "odd.html", [])
    page = (tmp_path / "odd.html").read_text(encoding="utf-8")
    assert [name for name, _, _ in shown(page)[30:]] == ["x#4", "x#20"]
    assert [path.name for path in tmp_path.iterdir()] == ["odd.html"]


def test_nothing_outside_is_needed() -> None:
    page = render(of(np.linspace(1, 2, 9)), in_memory(9), [])
    assert "default-src 'none'; img-src data:" in page
    assert not re.findall(r'(?:src|href|srcset|action)="(?!data:image/)', page)
    assert "http://" not in page and "https://" not in page and "@import" not in page and "url(" not in page


def test_names_are_escaped() -> None:
    evil = '<img src=x onerror="1">&.png'
    page = render(of(np.array([1.0]), [evil]), in_memory(1), [])
    assert "<img src=x" not in page and "&lt;img src=x onerror=&#34;1&#34;&gt;&amp;.png" in page


def test_without_percentiles_and_with_a_file_that_has_gone(tmp_path: Path) -> None:
    for i in range(3):
        Image.new("L", (90, 90), 80 * i).save(tmp_path / f"{i}.png")
    stream = open_stream(str(tmp_path), 16)
    (tmp_path / "1.png").unlink()
    page = render(of(np.array([1.0, 2.0, 3.0]), list(stream.names), percentile=False), stream, [])
    assert page.count("file not found") == 1 and page.count("data:image/jpeg") == 2
    assert "Percentile against" not in page and 'percentile">' not in page and not re.search(r">P\d", page)
    assert '<span title="oddness">odd 3</span>' in page
    assert '<span class="percentile" title="uncertainty">unsure 7</span>' in page


def test_the_page_counts_skipped_files_and_calibration_images() -> None:
    scored = replace(of(np.array([1.0, 2.0])), skipped=[("a.png", "empty file")])
    page = render(scored, in_memory(2), [], calibration=7)
    assert "1 file could not be used" in page and page.count("Percentile against 7 images set aside") == 2
    assert '<span title="oddness percentile">odd P75</span>' in page
    assert '<span class="percentile" title="uncertainty percentile">unsure P25</span>' in page
    assert page.count("<svg") == 2 and "Histogram of oddness" in page and "Histogram of uncertainty" in page
    assert "Percentile against 1 image set aside" in render(scored, in_memory(2), [], calibration=1)
    assert "Percentile against images set aside" in render(scored, in_memory(2), [])


# -------------------------------------------------------------------------------------------------------- the browser

ACTIONS = """
window.addEventListener("load", async () => {
  const seen = {}, get = id => document.getElementById(id);
  const visible = () => [...get("items").children].filter(item => item.offsetParent).map(item => item.dataset.name);
  const set = (id, value) => { get(id).value = value; get(id).dispatchEvent(new Event("input", {bubbles: true})); };
  const say = () => document.querySelector("#large .what").textContent;
  seen.start = visible();
  set("sort", "usual"); seen.usual = visible();
  set("sort", "unsure"); seen.unsure = visible();
  set("sort", "name"); seen.byName = visible();
  set("filter", "CAT/"); seen.cats = visible(); seen.status = get("shown").textContent;
  set("kind", "odd"); seen.oddCats = visible();
  set("filter", "nothing has this name"); seen.none = visible();
  set("filter", ""); set("kind", ""); set("sort", "odd");
  const first = get("items").children[0].querySelector(".open");
  first.click();
  const picture = document.querySelector("#large img");
  await picture.decode();
  seen.large = {open: get("large").open, source: picture.src, width: picture.naturalWidth, says: say(),
                grown: picture.getBoundingClientRect().width > first.getBoundingClientRect().width};
  document.querySelector("#large .next").click(); seen.next = say();
  get("large").dispatchEvent(new KeyboardEvent("keydown", {key: "ArrowLeft"})); seen.back = say();
  document.querySelector("#large .close").click();
  seen.closed = !get("large").open; seen.focus = document.activeElement === first;
  seen.wide = document.documentElement.scrollWidth <= innerWidth;
  seen.fetched = performance.getEntriesByType("resource").filter(entry => !entry.name.startsWith("data:")).length;
  document.body.innerHTML = "<pre>" + btoa(JSON.stringify(seen)) + "</pre>";
});
"""


def driven(page: str, folder: Path, width: int) -> dict[str, Any]:
    """What a browser without a network shows during ACTIONS."""
    path = folder / "driven.html"
    path.write_text(page.replace("</body>", f"<script>{ACTIONS}</script></body>"), encoding="utf-8")
    command = [
        *(str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-sync"),
        *("--disable-background-networking", "--disable-dev-shm-usage", "--host-resolver-rules=MAP * ~NOTFOUND"),
        *(f"--user-data-dir={folder / 'profile'}", f"--window-size={width},900", "--virtual-time-budget=30000"),
        *("--dump-dom", path.as_uri()),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    found = re.search(r"<pre>([\w+/=]+)</pre>", done.stdout)
    assert found, done.stderr + done.stdout[-2000:]
    return json.loads(base64.b64decode(found[1]).decode("latin-1"))  # type: ignore[no-any-return]


@pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium here")
@pytest.mark.parametrize("width", [500, 1200])
def test_sorting_filtering_and_opening_in_a_browser(tmp_path: Path, width: int) -> None:
    names = [f"{'cat' if i % 3 == 0 else 'dog'}/{i:02d}.png" for i in range(12)]
    oddness, uncertainty = (np.random.default_rng(seed).permutation(12) / 10 for seed in (0, 1))
    scored = of(oddness, names, uncertainty=uncertainty)
    page = render(scored, in_memory(12), [Group([0, 3], 1.0)])
    seen = driven(page, tmp_path, width)
    odd_first, unsure_first = ([names[i] for i in np.argsort(-values)] for values in (oddness, uncertainty))
    assert seen["start"] == odd_first and seen["usual"] == odd_first[::-1] and seen["unsure"] == unsure_first
    assert seen["byName"] == sorted(names)
    cats = sorted(name for name in names if name.startswith("cat"))
    assert seen["cats"] == cats and seen["status"] == "4 shown" and seen["none"] == []
    assert seen["oddCats"] == [name for name in cats if name in odd_first[:4]]
    large = seen["large"]
    assert large["open"] and large["grown"] and large["width"] == 8
    first = int(np.argmax(oddness))
    unsure = (uncertainty[first] * 10 + 0.5) / 12 * 100
    assert large["source"] == data_uri(in_memory(12).picture(first, 0))  # type: ignore[arg-type]
    assert large["says"] == f"{names[first]} · #1 · odd P96 · unsure P{unsure:.0f}" == seen["back"]
    assert seen["next"].startswith(odd_first[1])
    assert seen["closed"] and seen["focus"] and seen["wide"] and seen["fetched"] == 0
