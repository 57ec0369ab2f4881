"""Write files and folders whole or not at all, and report a full disk in one sentence."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from byov._core.errors import BadInput

V = TypeVar("V")

NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextlib.contextmanager
def disk_space_checked(path: Path) -> Iterator[None]:
    """Turn "no space left" into a sentence for the user, and a Rust library's system errors into OSError."""
    try:
        yield
    except Exception as error:
        reported = re.search(r"\(os error (\d+)\)", str(error))
        code: int = int(reported[1]) if reported else getattr(error, "errno", None) or 0
        if code in NO_SPACE:
            raise BadInput(
                f"no space left to write {path}: free some disk space and run the command again "
                "(resume a training run with --resume); what was written before is intact."
            ) from error
        if reported and code in errno.errorcode:
            raise OSError(code, os.strerror(code), str(path)) from error
        raise


def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Call write(temporary path), then move the result into place: a reader sees the old file or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with disk_space_checked(path):
            write(temporary)
            with temporary.open("rb+") as file:
                os.fsync(file.fileno())
            temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)  # so that the rename itself survives a power cut
    finally:
        os.close(folder)


@contextlib.contextmanager
def folder_written_whole(folder: Path, *, keep_existing: bool = False) -> Iterator[Path]:
    """Yield a temporary folder next to `folder`, and rename it into place when the block succeeds.

    If the block fails, nothing is left behind. With `keep_existing`, a folder that another process has put there
    meanwhile stays; without, only an empty folder may be in the way.
    """
    temporary = folder.with_name(f".{folder.name}.{uuid.uuid4().hex[:8]}.tmp")  # unique on a shared disk
    try:
        with disk_space_checked(folder):
            temporary.mkdir(parents=True)
            yield temporary
            try:
                temporary.rename(folder)
            except OSError:
                if not (keep_existing and folder.is_dir()):
                    raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def write_text(path: Path, text: str) -> None:
    """Write a text file atomically."""
    write_atomically(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file atomically; NaN and infinity, which JSON lacks, raise ValueError."""
    write_text(path, json.dumps(value, indent=2, allow_nan=False) + "\n")


def without_prefix(named: Mapping[str, V], prefix: str) -> dict[str, V]:
    """Select the entries whose names start with `prefix`, and strip it from their names."""
    return {name.removeprefix(prefix): value for name, value in named.items() if name.startswith(prefix)}
