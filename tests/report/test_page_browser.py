"""The whole page in a browser without a network: at two widths nothing overflows, and every image is loaded."""

from __future__ import annotations

import base64
import json
import re
import shutil
import subprocess
from html import escape
from pathlib import Path
from typing import Any

import pytest
from fabricated import full_run

from byov.report.page import write_report

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")

LOOK = """
window.addEventListener("load", async () => {
  const frame = window.frames[0], document = frame.document;  // the page's policy lets no script run inside it
  const images = [...document.images], text = document.querySelector("#shifts svg text").getBoundingClientRect();
  await Promise.all(images.map(image => image.decode()));
  const seen = {
    width: frame.innerWidth, page: document.documentElement.scrollWidth,
    images: images.map(image => image.naturalWidth),
    anchors: [...document.querySelectorAll("nav a")].every(a => document.querySelector(a.getAttribute("href"))),
    drawings: [...document.querySelectorAll(".drawing > svg")].map(svg => svg.getBoundingClientRect().height),
    text: text.height,
    fetched: frame.performance.getEntriesByType("resource").filter(entry => !entry.name.startsWith("data:")).length,
  };
  window.document.body.innerHTML = "<pre>" + btoa(JSON.stringify(seen)) + "</pre>";
});
"""


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("page")
    runs = [
        full_run(folder / "a-rather-long-name-of-a-run-without-any-place-to-break-it"),
        full_run(folder / "b", "byol"),
    ]
    return write_report(runs, folder / "report.html").read_text(encoding="utf-8")


@pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium here")
@pytest.mark.parametrize("width", [480, 1200])
def test_nothing_overflows_and_nothing_is_fetched(page: str, tmp_path: Path, width: int) -> None:
    seen = looked_at(page, tmp_path, width)
    assert seen["page"] <= seen["width"] == width, "something is wider than the window"
    assert seen["images"] == [8] * 32 and seen["anchors"] and seen["fetched"] == 0
    assert len(seen["drawings"]) > 4 and min(seen["drawings"]) > 80
    assert seen["text"] >= 8, "the numbers of a heat map can be read"


def looked_at(page: str, folder: Path, width: int) -> dict[str, Any]:
    """What a browser shows; the page is in a frame, because a window cannot be narrower than 500 pixels."""
    frame = f'<iframe style="width: {width}px; height: 900px; border: 0" srcdoc="{escape(page)}"></iframe>'
    whole = f'<!doctype html><meta charset="utf-8"><body>{frame}<script>{LOOK}</script></body>'
    (folder / "page.html").write_text(whole, encoding="utf-8")
    command = [
        *(str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-sync"),
        *("--disable-background-networking", "--disable-dev-shm-usage", "--host-resolver-rules=MAP * ~NOTFOUND"),
        *(f"--user-data-dir={folder / 'profile'}", "--window-size=1300,1000", "--virtual-time-budget=30000"),
        *("--dump-dom", (folder / "page.html").as_uri()),
    ]
    for _ in range(3):  # on a busy machine the virtual clock may run out before the frame is loaded
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        if found := re.search(r"<pre>([\w+/=]+)</pre>", done.stdout):
            break
    assert found, done.stderr + done.stdout[-2000:]
    return json.loads(base64.b64decode(found[1]).decode("latin-1"))  # type: ignore[no-any-return]
