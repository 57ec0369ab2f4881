"""Files are written whole or not at all."""

import contextlib
import errno
import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

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


def test_a_folder_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    place = tmp_path / "a" / "folder"
    with pytest.raises(KeyError), files.folder_written_whole(place) as folder:
        files.write_text(folder / "file", "half")
        raise KeyError
    assert not list(place.parent.iterdir())
    with files.folder_written_whole(place) as folder:
        files.write_text(folder / "file", "whole")
        assert not place.exists() and folder.parent == place.parent
    assert [p.name for p in place.parent.iterdir()] == ["folder"] and (place / "file").read_text() == "whole"


@pytest.mark.parametrize("keep", [True, False])
def test_a_folder_that_another_process_has_put_there_meanwhile(tmp_path: Path, keep: bool) -> None:
    place = tmp_path / "folder"
    outcome = contextlib.nullcontext() if keep else pytest.raises(OSError, match="not empty")
    with outcome, files.folder_written_whole(place, keep_existing=keep) as folder:
        files.write_text(folder / "file", "second")
        files.write_text(place / "file", "first")
    assert (place / "file").read_text() == "first" and [p.name for p in tmp_path.iterdir()] == ["folder"]


def test_a_prefix_selects_and_is_stripped() -> None:
    assert files.without_prefix({"a.b": 1, "a.a.c": 2, "b": 3, "ba.": 4}, "a.") == {"b": 1, "a.c": 2}


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o077, 0o600), (0o002, 0o664)])
def test_files_have_the_mode_that_the_umask_gives(tmp_path: Path, umask: int, mode: int) -> None:
    before = os.umask(umask)
    try:
        files.write_text(tmp_path / "text", "a")
        files.write_atomically(tmp_path / "tensors", lambda path: save_file({"a": torch.ones(1)}, path))
    finally:
        os.umask(before)
    assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {mode}


def test_a_name_of_any_length_can_be_written(tmp_path: Path) -> None:
    files.write_text(tmp_path / ("a" * 255), "long")
    assert [path.read_text() for path in tmp_path.iterdir()] == ["long"]
