"""Files are written whole or not at all."""

import errno
import json
import os
from pathlib import Path

import pytest

from byov._core import files
from byov._core.errors import BadInput


def fail_with(code: int):
    def fail(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    return fail


@pytest.mark.parametrize(("code", "kind"), [(errno.EIO, OSError), (errno.ENOSPC, BadInput), (errno.EDQUOT, BadInput)])
def test_a_failed_write_keeps_the_old_file_and_leaves_no_other(tmp_path: Path, monkeypatch, code: int, kind) -> None:
    path = tmp_path / "file"
    files.write_text(path, "old")
    monkeypatch.setattr(os, "fsync", fail_with(code))
    with pytest.raises(kind):
        files.write_text(path, "new")
    assert path.read_text() == "old" and [p.name for p in tmp_path.iterdir()] == ["file"]


def test_folders_are_made_and_json_is_read_back(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b.json"
    files.write_json(path, {"x": [1, 2.5, None]})
    assert json.loads(path.read_text()) == {"x": [1, 2.5, None]}


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_json_does_not_know_is_refused(tmp_path: Path, value: float) -> None:
    with pytest.raises(ValueError, match="JSON"):
        files.write_json(tmp_path / "file.json", {"x": [value]})
    assert not list(tmp_path.iterdir())


def test_no_space_is_also_known_in_the_words_of_a_rust_library(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="no space left"), files.disk_space_checked(tmp_path):
        raise RuntimeError("I/O error: No space left on device (os error 28)")
    with pytest.raises(PermissionError, match="denied"), files.disk_space_checked(tmp_path):
        raise RuntimeError("I/O error: Permission denied (os error 13)")
    with pytest.raises(RuntimeError, match="else"), files.disk_space_checked(tmp_path):
        raise RuntimeError("something else (os error 280)")
