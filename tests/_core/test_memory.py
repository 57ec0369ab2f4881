"""Free memory as the system tells it, and the budget of all threads."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from byov._core import memory
from byov._core.errors import BadInput
from byov._core.memory import Budget


def test_a_container_counts_and_its_page_cache_is_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = memory.available()
    monkeypatch.setattr(memory, "_CGROUPS", ((tmp_path, "memory.max", "memory.current"),))
    (tmp_path / "memory.current").write_text("70000000\n")
    (tmp_path / "memory.stat").write_text("anon 1\nactive_file 20000000\ninactive_file 5000000\n")
    (tmp_path / "memory.max").write_text("100000000\n")
    assert memory.available() == 55_000_000
    (tmp_path / "memory.max").write_text("max\n")
    after = memory.available()
    assert before is None or (after is not None and after > 55_000_000)


def test_what_does_not_fit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available", lambda: 3 << 29)
    with pytest.raises(BadInput, match=r"all takes 2.0 GiB of memory, of which 1.5 GiB are free: take less\."):
        memory.require(2 << 30, "all", "take less")
    memory.require(1 << 30, "all", "take less")
    monkeypatch.setattr(memory, "available", lambda: None)
    memory.require(1 << 60, "all", "take less")


def test_a_budget_is_never_exceeded_and_all_get_their_turn() -> None:
    budget, lock, used, most = Budget(10), threading.Lock(), 0, 0

    def work(count: int) -> int:
        nonlocal used, most
        with budget.taken(count):
            with lock:
                used += count
                most = max(most, used)
            with lock:
                used -= count
        return count

    with ThreadPoolExecutor(8) as threads:
        assert sum(threads.map(work, [1, 10, 3, 7, 5] * 100)) == 2600
    assert most <= 10


def test_a_budget_is_given_back_after_a_failure() -> None:
    budget = Budget(10)
    with pytest.raises(KeyError), budget.taken(10):
        raise KeyError
    with pytest.raises(MemoryError), budget.taken(11):
        pass
    with budget.taken(10):
        pass
