"""Commands in parallel: all run, no more at a time than asked for, each with its output in a file."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from byov._core.owner import _start_time
from byov.studies.framework import workers
from byov.studies.framework.workers import Task, run_in_parallel

# Says its thread count and "byov: the last line", and ends with the code that it is given; but first, if it is given
# other files, it makes its own and waits for these.
PROGRAM = """
import os, pathlib, sys, time
own, code, *others = sys.argv[1:]
pathlib.Path(own).touch()
until = time.monotonic() + 60
while not all(map(os.path.exists, others)) and time.monotonic() < until:
    time.sleep(0.01)
print(os.environ["OMP_NUM_THREADS"]); print("byov: the last line")
sys.exit(int(code) if all(map(os.path.exists, others)) else 9)
"""


def task(folder: Path, name: str, code: int = 0, *others: str) -> Task:
    files = [str(folder / other) for other in others]
    command = [sys.executable, "-c", PROGRAM, str(folder / name), str(code), *files]
    return Task(command, folder / "logs" / f"{name}.log")


def test_all_are_run_and_yielded_with_their_index(tmp_path: Path) -> None:
    found = dict(run_in_parallel([task(tmp_path, name, code) for name, code in (("a", 0), ("b", 3), ("c", 0))], 2))
    assert {index: worker.code for index, worker in found.items()} == {0: 0, 1: 3, 2: 0}
    assert all(worker.last_line == "the last line" for worker in found.values())


def test_as_many_as_there_are_jobs_run_at_a_time(tmp_path: Path) -> None:
    two = [task(tmp_path, "a", 0, "b"), task(tmp_path, "b", 0, "a")]  # each waits for the other
    assert [worker.code for _, worker in run_in_parallel(two, 2)] == [0, 0]


def test_and_no_more(tmp_path: Path) -> None:
    program = "import os, sys; os.mkdir(sys.argv[1]); import time; time.sleep(0.2); os.rmdir(sys.argv[1])"
    alone = [sys.executable, "-c", program, str(tmp_path / "taken")]  # fails where another is at it
    tasks = [Task(alone, tmp_path / f"{i}.log") for i in range(3)]
    assert [worker.code for _, worker in run_in_parallel(tasks, 1)] == [0, 0, 0]


def test_each_has_its_share_of_the_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "cores", lambda: 8)
    (_, worker), *_ = run_in_parallel([task(tmp_path, "a")], 2)
    assert worker.log.read_text().splitlines()[0] == "4"


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
    sleepers = [Task([sys.executable, "-c", program, str(tmp_path / n)], tmp_path / f"{n}.log") for n in "xy"]
    running = run_in_parallel([task(tmp_path, "a", 0, "x", "y"), *sleepers], 3)
    next(running)
    running.close()
    assert [(tmp_path / f"{name}.ended").read_text() for name in "xy"] == ["once ", "once "]


def test_a_signal_and_an_earlier_log_are_not_mistaken_for_its_last_line(tmp_path: Path) -> None:
    (tmp_path / "log").write_bytes(b"what an earlier one said \xff\n")
    killed = Task([sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"], tmp_path / "log")
    (_, worker), *_ = run_in_parallel([killed], 1)
    assert worker.code == -9 and worker.last_line == "it was ended by signal 9"
    (_, worker), *_ = run_in_parallel([Task([sys.executable, "-c", ""], tmp_path / "log")], 1)
    assert worker.last_line == "it printed nothing"


PARENT = """
import sys
from pathlib import Path
from byov.studies.framework.workers import Task, Worker
child = "import os, pathlib, time; pathlib.Path('pid').write_text(str(os.getpid())); time.sleep(60)"
Worker(Task([sys.executable, "-c", child], Path("log")), 1).process.wait()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a process with its parent")
def test_a_worker_ends_if_its_parent_is_killed(tmp_path: Path) -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT], cwd=tmp_path)
    while not (tmp_path / "pid").is_file() or not (tmp_path / "pid").read_text():
        assert parent.poll() is None
        time.sleep(0.01)
    parent.kill()
    parent.wait()
    pid = int((tmp_path / "pid").read_text())
    end = time.monotonic() + 30
    while _start_time(pid) is not None:
        assert time.monotonic() < end, "it still works"
        time.sleep(0.01)
