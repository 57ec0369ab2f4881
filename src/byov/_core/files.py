"""Write files and folders whole or not at all, and report a full disk in one sentence.

Until it is whole, a file or folder has a temporary name, which names the process that writes it. What a killed process
left is removed by the next owner of the lock on its place (`lock.py`).
"""

from __future__ import annotations

import contextlib
import errno
import glob
import json
import os
import re
import shutil
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from byov._core.errors import BadInput
from byov._core.owner import Owner, is_gone, this_process

V = TypeVar("V")

ABANDONED_SECONDS = 3600  # without a write, on another machine: its process was killed
LONGEST = 150  # characters of a name that its temporary name repeats: names have at most 255
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
    temporary = _temporary(path)
    try:
        with disk_space_checked(path):
            temporary.touch()
            mode = temporary.stat().st_mode
            write(temporary)
            temporary.chmod(mode)  # the umask's, whatever a library prefers
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
    temporary = _temporary(folder)
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


def _temporary(path: Path) -> Path:
    """Return a name next to `path` that no other write uses, also on a shared disk."""
    machine, pid, started = this_process()
    return path.with_name(f".{path.name[:LONGEST]}.{machine}-{pid}-{started}-{uuid.uuid4().hex[:8]}.tmp")


def remove_abandoned(found: Iterable[Path]) -> None:
    """Remove those of some temporary files and folders whose process has ended."""
    for path in found:
        if _is_abandoned(path):
            shutil.rmtree(path, ignore_errors=True)
            with contextlib.suppress(OSError):
                path.unlink()


def leftovers(path: Path) -> Iterator[Path]:
    """Yield the temporary files and folders of `path`, of this process and others."""
    return path.parent.glob(f".{glob.escape(path.name[:LONGEST])}.*.tmp")


def _is_abandoned(path: Path) -> bool:
    named = re.search(r"\.([0-9a-f]{8})-(\d+)-(\d+)-[0-9a-f]{8}\.tmp$", path.name)
    gone = True if named is None else is_gone(Owner(named[1], int(named[2]), int(named[3])))
    if gone is None:
        try:
            parts = [path, *path.rglob("*")] if path.is_dir() else [path]
            gone = time.time() - max(part.stat().st_mtime for part in parts) > ABANDONED_SECONDS
        except OSError:  # renamed since
            gone = False
    return gone


def write_text(path: Path, text: str) -> None:
    """Write a text file atomically."""
    write_atomically(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file atomically; NaN and infinity, which JSON lacks, raise ValueError."""
    write_text(path, json.dumps(value, indent=2, allow_nan=False) + "\n")


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON file that holds an object; ValueError if it is damaged."""
    return parse_json(path.read_text(encoding="utf-8"))


def parse_json(text: str) -> dict[str, Any]:
    """Read an object from a JSON text; ValueError for anything else."""
    try:
        tree = json.loads(text)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    if not isinstance(tree, dict):
        raise ValueError("it is not an object")
    return tree


def free_space(path: Path) -> int:
    """Return the bytes that are free where a file or folder, which need not exist, would be."""
    place = next(folder for folder in (path, *path.resolve().parents) if folder.is_dir())
    return shutil.disk_usage(place).free


def without_prefix(named: Mapping[str, V], prefix: str) -> dict[str, V]:
    """Select the entries whose names start with `prefix`, and strip it from their names."""
    return {name.removeprefix(prefix): value for name, value in named.items() if name.startswith(prefix)}
