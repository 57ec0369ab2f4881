"""Commands side by side: all run, no more than asked for at a time, and what one says is kept."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from byov.studies.framework import workers
from byov.studies.framework.workers import Order, side_by_side

# Says its thread count and "byov: the last word", and ends with the code that it is given; but first, if it is given
# other files, it makes its own and waits for these.
PROGRAM = """
import os, pathlib, sys, time
own, code, *others = sys.argv[1:]
pathlib.Path(own).touch()
until = time.monotonic() + 60
while not all(map(os.path.exists, others)) and time.monotonic() < until:
    time.sleep(0.01)
print(os.environ["OMP_NUM_THREADS"]); print("byov: the last word")
sys.exit(int(code) if all(map(os.path.exists, others)) else 9)
"""


def order(folder: Path, name: str, code: int = 0, *others: str) -> Order:
    files = [str(folder / other) for other in others]
    command = [sys.executable, "-c", PROGRAM, str(folder / name), str(code), *files]
    return Order(command, folder / "logs" / f"{name}.log")


def test_all_are_run_and_told_by_their_place(tmp_path: Path) -> None:
    found = dict(side_by_side([order(tmp_path, name, code) for name, code in (("a", 0), ("b", 3), ("c", 0))], 2))
    assert {place: child.code for place, child in found.items()} == {0: 0, 1: 3, 2: 0}
    assert all(child.last_words == "the last word" for child in found.values())


def test_as_many_as_there_are_jobs_run_at_a_time(tmp_path: Path) -> None:
    two = [order(tmp_path, "a", 0, "b"), order(tmp_path, "b", 0, "a")]  # each waits for the other
    assert [child.code for _, child in side_by_side(two, 2)] == [0, 0]


def test_and_no_more(tmp_path: Path) -> None:
    program = "import os, sys; os.mkdir(sys.argv[1]); import time; time.sleep(0.2); os.rmdir(sys.argv[1])"
    alone = [sys.executable, "-c", program, str(tmp_path / "taken")]  # fails where another is at it
    orders = [Order(alone, tmp_path / f"{i}.log") for i in range(3)]
    assert [child.code for _, child in side_by_side(orders, 1)] == [0, 0, 0]


def test_each_has_its_share_of_the_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "cores", lambda: 8)
    (_, child), *_ = side_by_side([order(tmp_path, "a")], 2)
    assert child.log.read_text().splitlines()[0] == "4"


def test_what_is_under_way_is_ended_once_and_waited_for(tmp_path: Path) -> None:
    program = """
import pathlib, signal, sys, time
def ended(number, frame):
    pathlib.Path(sys.argv[1] + ".ended").open("a").write("once ")
signal.signal(signal.SIGTERM, ended)
pathlib.Path(sys.argv[1]).touch()
while not pathlib.Path(sys.argv[1] + ".ended").exists():
    time.sleep(0.01)
time.sleep(0.3)
"""
    sleepers = [Order([sys.executable, "-c", program, str(tmp_path / n)], tmp_path / f"{n}.log") for n in "xy"]
    running = side_by_side([order(tmp_path, "a", 0, "x", "y"), *sleepers], 3)
    next(running)
    running.close()
    assert [(tmp_path / f"{name}.ended").read_text() for name in "xy"] == ["once ", "once "]


def test_a_signal_and_an_earlier_log_are_not_mistaken_for_last_words(tmp_path: Path) -> None:
    (tmp_path / "log").write_bytes(b"what an earlier one said \xff\n")
    killed = Order([sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"], tmp_path / "log")
    (_, child), *_ = side_by_side([killed], 1)
    assert child.code == -9 and child.last_words == "it was ended by signal 9"
    (_, child), *_ = side_by_side([Order([sys.executable, "-c", ""], tmp_path / "log")], 1)
    assert child.last_words == "it said nothing"
