"""Commands side by side: all run, no more than asked for at a time, and what one says is kept."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from byov.studies.children import Order, side_by_side

# Writes when it began and ended, says its thread count, and ends with the code that it is given.
PROGRAM = """
import os, sys, time
begun = time.monotonic(); time.sleep(0.3)
open(sys.argv[1], "w").write(f"{begun} {time.monotonic()}")
print(os.environ["OMP_NUM_THREADS"]); print("byov: the last word"); sys.exit(int(sys.argv[2]))
"""


def orders(folder: Path, codes: list[int]) -> list[Order]:
    return [
        Order([sys.executable, "-c", PROGRAM, str(folder / str(i)), str(code)], folder / "logs" / f"{i}.log")
        for i, code in enumerate(codes)
    ]


def most_at_once(folder: Path, count: int) -> int:
    times = [tuple(map(float, (folder / str(i)).read_text().split())) for i in range(count)]
    return max(sum(begun <= at < ended for begun, ended in times) for at, _ in times)


@pytest.mark.parametrize("jobs", [1, 2])
def test_all_run_and_no_more_than_the_jobs_at_a_time(tmp_path: Path, jobs: int) -> None:
    found = dict(side_by_side(orders(tmp_path, [0, 3, 0, 0]), jobs))
    assert {place: child.code for place, child in found.items()} == {0: 0, 1: 3, 2: 0, 3: 0}
    assert all(child.last_words == "the last word" for child in found.values())
    assert most_at_once(tmp_path, 4) <= jobs


def test_each_has_its_share_of_the_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    (_, child), *_ = side_by_side(orders(tmp_path, [0]), 2)
    assert child.log.read_text().splitlines()[0] == "4"


def test_what_is_under_way_is_stopped_when_no_one_waits_any_more(tmp_path: Path) -> None:
    sleeper = Order([sys.executable, "-c", "import time; time.sleep(600)"], tmp_path / "log")
    running = side_by_side([*orders(tmp_path, [0]), sleeper], 2)
    next(running)
    running.close()
    assert not (tmp_path / "log").read_text()


def test_one_that_says_nothing_has_last_words_too(tmp_path: Path) -> None:
    (_, child), *_ = side_by_side([Order([sys.executable, "-c", ""], tmp_path / "log")], 1)
    assert child.last_words == "it said nothing"
