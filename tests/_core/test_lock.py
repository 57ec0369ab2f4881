"""A second process gets a sentence; a lock whose owner has ended is taken over."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from byov._core import lock as locks
from byov._core.errors import BadInput
from byov._core.files import leftovers, remove_abandoned, write_text
from byov._core.lock import ABANDONED_SECONDS, Lock, beside
from byov._core.owner import is_gone, this_process

HOLD = """
import sys, time
from pathlib import Path
from byov._core.lock import Lock
held = Lock(Path(sys.argv[1]), "it")
print("held", flush=True)
time.sleep(60)
"""


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[Callable[[], subprocess.Popen[str]]]:
    """Start another process that holds the lock."""
    started: list[subprocess.Popen[str]] = []

    def start() -> subprocess.Popen[str]:
        command = [sys.executable, "-c", HOLD, str(tmp_path / ".lock")]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        started.append(process)
        assert process.stdout is not None and process.stdout.readline() == "held\n"
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()


def test_a_second_process_is_told_who_has_it_and_takes_over_after_a_kill(tmp_path: Path, holder) -> None:
    other = holder()
    with pytest.raises(BadInput, match=rf"^the run is in use by another byov \(process {other.pid} on "):
        Lock(tmp_path / ".lock", "the run")
    other.kill()
    while not is_gone(locks._owner(tmp_path / ".lock")):  # it need not have been waited for
        time.sleep(0.01)
    mine = Lock(tmp_path / ".lock", "the run")
    assert mine.is_ours() and json.loads(mine.path.read_text())["pid"] == os.getpid()
    mine.release()
    assert not list(tmp_path.iterdir())


def test_a_process_shares_its_own_lock_and_the_last_release_removes_it(tmp_path: Path) -> None:
    first, second = Lock(tmp_path / "new" / ".lock", "it"), Lock(tmp_path / "new" / ".lock", "it")
    first.release()
    first.release()
    assert second.is_ours()
    del second
    gc.collect()
    assert not list((tmp_path / "new").iterdir())


def record(path: Path, **changes: object) -> None:
    machine, pid, started = this_process()
    path.write_text(json.dumps({"machine": machine, "pid": pid, "started": started, "host": "elsewhere", **changes}))


def test_a_process_id_that_was_given_away_again_is_no_owner(tmp_path: Path) -> None:
    record(tmp_path / ".lock", started=1)  # this process id, but an earlier process
    assert Lock(tmp_path / ".lock", "it").is_ours()


@pytest.mark.parametrize("content", [None, "half a li"])
def test_of_another_machine_the_age_decides(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / ".lock"
    record(path, machine="00000000") if content is None else path.write_text(content)
    with pytest.raises(BadInput, match="in use"):
        Lock(path, "it")
    long_ago = time.time() - ABANDONED_SECONDS - 5
    os.utime(path, (long_ago, long_ago))
    assert Lock(path, "it").is_ours()


def test_the_owner_touches_its_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = Lock(tmp_path / ".lock", "it")
    os.utime(mine.path, (1, 1))

    class Enough(Exception):
        pass

    naps = iter([None, Enough])

    def nap(seconds: float) -> None:
        if (enough := next(naps)) is not None:
            raise enough

    monkeypatch.setattr(time, "sleep", nap)
    with pytest.raises(Enough):
        locks._beat()
    assert mine.path.stat().st_mtime > 1e9


def test_a_lock_that_was_removed_is_not_ours(tmp_path: Path) -> None:
    mine = Lock(tmp_path / ".lock", "it")
    mine.path.unlink()
    assert not mine.is_ours()
    record(mine.path, machine="00000000")
    mine.release()
    assert mine.path.exists(), "it belongs to another process now"


def test_temporary_files_of_ended_processes_are_removed(tmp_path: Path, holder) -> None:
    machine, pid, started = this_process()
    alive = holder()
    start = locks._owner(tmp_path / ".lock").started
    kept = [f".a.{machine}-{pid}-{started}-00000000.tmp", f".a.{machine}-{alive.pid}-{start}-00000000.tmp"]
    kept += [".a.00000000-5-5-00000000.tmp", f".b.{machine}-{pid}-1-00000000.tmp"]  # another machine, another file
    gone = [f".a.{machine}-{pid}-1-00000000.tmp", ".a.77.tmp", ".a.00000000-6-6-00000000.tmp"]
    for name in (*kept, *gone[:2]):
        (tmp_path / name).touch()
    (tmp_path / gone[2]).mkdir()
    os.utime(tmp_path / gone[2], (1, 1))
    write_text(tmp_path / "a", "a")
    remove_abandoned(leftovers(tmp_path / "a"))
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*kept, ".lock", "a"])


def test_the_lock_of_a_file_is_next_to_it() -> None:
    assert beside(Path("a/odd.csv")) == Path("a/.odd.csv.lock")
