"""numba's cache of compiled loops on disk, made safe: a damaged, full or read-only cache costs compile time only.

numba's own trusts its files: one that was cut short ends the command with a traceback, one with a flipped bit is run as
machine code, and a full disk is reported as if it were the disk of the run. Here every file begins with a digest of the
rest, a file that does not match it is compiled again, and no failure of the cache reaches the caller.
"""

from __future__ import annotations

import hashlib
import pickle
from pathlib import Path
from typing import Any

from numba.core.caching import FunctionCache, IndexDataCacheFile

DIGEST = 32  # bytes


class _CheckedFiles(IndexDataCacheFile):
    """One index file and its data files."""

    def _dump(self, obj: Any) -> bytes:
        data: bytes = super()._dump(obj)  # type: ignore[no-untyped-call]
        return hashlib.sha256(data).digest() + data

    def _load_index(self) -> dict[Any, str]:
        try:
            with Path(self._index_path).open("rb") as file:
                current = pickle.load(file) == self._version
                stamp, names = _checked(file.read()) if current else (None, {})
        except Exception:  # a damaged pickle raises anything
            return {}
        return dict(names) if stamp == self._source_stamp else {}

    def _load_data(self, name: str) -> Any:
        return _checked(Path(self._data_path(name)).read_bytes())  # type: ignore[no-untyped-call]


def _checked(data: bytes) -> Any:
    if hashlib.sha256(data[DIGEST:]).digest() != data[:DIGEST]:
        raise ValueError("the digest does not match")
    return pickle.loads(data[DIGEST:])


class DiskCache(FunctionCache):
    """The cache of one compiled function; RuntimeError if there is no folder for it."""

    def __init__(self, function: Any) -> None:
        super().__init__(function)  # type: ignore[no-untyped-call]
        impl = self._impl
        stamp = impl.locator.get_source_stamp()
        self._cache_file = _CheckedFiles(self._cache_path, impl.filename_base, stamp)  # type: ignore[no-untyped-call]

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        try:
            return super().load_overload(sig, target_context)  # type: ignore[no-untyped-call]
        except Exception:  # whatever is wrong with a file, compiling replaces it
            return None

    def save_overload(self, sig: Any, data: Any) -> None:
        try:
            super().save_overload(sig, data)  # type: ignore[no-untyped-call]
        except Exception:  # a full disk, for example: it is compiled again next time
            return
