"""Writing files whole or not at all, and saying "no space left" in words."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from byov._core.errors import BadInput

NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextlib.contextmanager
def disk_space_checked(path: Path) -> Iterator[None]:
    """Turns "no space left" into a sentence for the user, and what a Rust library says of the system into OSError."""
    try:
        yield
    except Exception as error:
        told = re.search(r"\(os error (\d+)\)", str(error))
        code: int = int(told[1]) if told else getattr(error, "errno", None) or 0
        if code in NO_SPACE:
            raise BadInput(
                f"no space left to write {path}: free some disk space and run the command again "
                "(a training run goes on with --resume); what was written before is whole."
            ) from error
        if told and code in errno.errorcode:
            raise OSError(code, os.strerror(code), str(path)) from error
        raise


def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Calls write(temporary path), then moves the result into place: a reader sees the old file or the new one."""
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


def write_text(path: Path, text: str) -> None:
    """Writes a text file, atomically."""
    write_atomically(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))


def write_json(path: Path, value: Any) -> None:
    """Writes a JSON file, atomically. NaN and infinity, which JSON does not know, are a ValueError."""
    write_text(path, json.dumps(value, indent=2, allow_nan=False) + "\n")
