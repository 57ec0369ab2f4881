"""Whatever happens to numba's cache, a compiled loop computes the same."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
import numpy as np
import pytest

from byov._compiled import disk_cache

CODE = """
from byov._compiled.kernels import compiled


@compiled
def doubled(numbers):
    for i in range(len(numbers)):
        numbers[i] = 2 * numbers[i]
"""


@pytest.fixture
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], Any]:
    """Import a compiled function again, as another process does; its cache is in tmp_path / "cache"."""
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path / "cache"))
    path = tmp_path / "loops.py"
    path.write_text(CODE)

    def imported() -> Any:
        spec = importlib.util.spec_from_file_location("loops", path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module.doubled

    return imported


def hits(function: Any) -> int:
    numbers = np.arange(4.0)
    function(numbers)
    assert numbers.tolist() == [0, 2, 4, 6]
    return sum(function.stats.cache_hits.values())


def files(tmp_path: Path, suffix: str) -> Path:
    return next((tmp_path / "cache").rglob(f"*.{suffix}"))


def flipped(content: bytes, place: int) -> bytes:
    return content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :]


@pytest.mark.parametrize("suffix", ["nbi", "nbc"])
@pytest.mark.parametrize(
    "damage",
    [
        lambda whole: b"",
        lambda whole: whole[:30],
        lambda whole: whole[:-10],
        lambda whole: flipped(whole, len(whole) - 20),
        lambda whole: b"x" * 500,
    ],
    ids=["empty", "cut short", "cut at the end", "a flipped bit", "another file"],
)
def test_a_damaged_file_is_compiled_again_and_replaced(tmp_path: Path, fresh, suffix: str, damage) -> None:
    assert hits(fresh()) == 0 and hits(fresh()) == 1
    path = files(tmp_path, suffix)
    path.write_bytes(damage(path.read_bytes()))
    assert hits(fresh()) == 0 and hits(fresh()) == 1


def test_a_full_disk_costs_the_cache_only(tmp_path: Path, fresh, files_up_to) -> None:
    with files_up_to(100):
        assert hits(fresh()) == 0 and hits(fresh()) == 0
    assert hits(fresh()) == 0 and hits(fresh()) == 1


def test_a_cache_of_a_numba_without_digests_is_replaced(tmp_path: Path, fresh, monkeypatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(disk_cache, "_CheckedFiles", disk_cache.IndexDataCacheFile)
        assert hits(fresh()) == 0
    assert hits(fresh()) == 0 and hits(fresh()) == 1
