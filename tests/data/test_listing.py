"""What is found below a folder, in which order, and when its digest changes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from byov.data import listing
from byov.data.listing import list_images


def put(root: Path, *names: str) -> Path:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(b"x")
    return root


def paths(root: Path) -> list[str]:
    return [file.path for file in list_images(root).files]


def test_any_nesting_sorted_and_by_suffix(tmp_path: Path) -> None:
    put(tmp_path, "b.JPG", "a.jpeg", "z/y/x/deep.Png", "z/a.gif", "m/notes.txt", "none", "a b/ü.webp", "two.tar.tif")
    assert paths(tmp_path) == ["a b/ü.webp", "a.jpeg", "b.JPG", "two.tar.tif", "z/a.gif", "z/y/x/deep.Png"]
    assert list_images(tmp_path).files[0].size == 1


def test_hidden_ones_are_left_out(tmp_path: Path) -> None:
    put(tmp_path, ".a.jpg", "._b.jpg", ".thumbs/c.jpg", "d/.e/f.jpg", "d/g.jpg")
    assert paths(tmp_path) == ["d/g.jpg"]


def test_links(tmp_path: Path) -> None:
    root = put(tmp_path / "root", "real/a.jpg", "b.jpg")
    put(tmp_path / "elsewhere", "c.jpg")
    (root / "file.jpg").symlink_to(tmp_path / "elsewhere" / "c.jpg")
    (root / "folder").symlink_to(tmp_path / "elsewhere")
    (root / "again").symlink_to(root / "real")  # listed under its own name
    (root / "real" / "up").symlink_to(root)
    (root / "self").symlink_to(root / "self")
    (root / "self.jpg").symlink_to(root / "self.jpg")
    (root / "nowhere.jpg").symlink_to(tmp_path / "nothing.jpg")
    assert paths(root) == ["b.jpg", "file.jpg", "folder/c.jpg", "nowhere.jpg", "real/a.jpg", "self.jpg"]
    assert [file.size for file in list_images(root).files] == [1, 1, 1, -1, 1, -1]


def test_a_pipe_is_no_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.jpg")
    assert paths(tmp_path) == []


def test_photographs_in_other_formats_are_named(tmp_path: Path) -> None:
    put(tmp_path, "a.HEIC", "b.jpg", "c.doc")
    assert list_images(tmp_path).unread == [("a.HEIC", "the format heic is not read")]


def test_a_closed_folder_is_named_and_passed_by(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(tmp_path, "a/b.jpg", "closed/c.jpg")
    scandir = os.scandir

    def guarded(path: str) -> Any:
        if path.endswith("closed"):
            raise PermissionError(13, "Permission denied", path)
        return scandir(path)

    monkeypatch.setattr(listing.os, "scandir", guarded)
    found = list_images(tmp_path)
    assert [file.path for file in found.files] == ["a/b.jpg"]
    assert found.unread == [("closed/", "permission denied")]
    with pytest.raises(PermissionError):
        list_images(tmp_path / "closed")


def test_the_digest_tells_of_every_change(tmp_path: Path) -> None:
    put(tmp_path, "a.jpg", "b/c.jpg", "notes.txt")
    seen = {list_images(tmp_path).digest()}

    def changed() -> bool:
        before = len(seen)
        seen.add(list_images(tmp_path).digest())
        return len(seen) > before

    assert not changed()
    put(tmp_path, "notes.txt", "more.txt", ".d.jpg")
    assert not changed()
    put(tmp_path, "d.jpg")
    assert changed()
    (tmp_path / "a.jpg").write_bytes(b"xy")
    assert changed()
    os.utime(tmp_path / "a.jpg", ns=(1, 1))
    assert changed()
    (tmp_path / "a.jpg").rename(tmp_path / "e.jpg")
    assert changed()
    (tmp_path / "b" / "c.jpg").unlink()
    assert changed()


def test_names_that_are_no_text(tmp_path: Path) -> None:
    try:
        Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff\n.jpg")).write_bytes(b"x")
    except OSError:
        pytest.skip("this file system takes no such names")
    found = list_images(tmp_path)
    assert len(found.files) == 1 and len(found.digest()) == 64


def test_it_tells_how_many_were_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listing, "TELL_EVERY", 2)
    put(tmp_path, "a/1.jpg", "a/2.jpg", "b/1.jpg", "c/1.jpg")
    told: list[int] = []
    list_images(tmp_path, told.append)
    assert told == [2, 4]


@pytest.fixture
def fresh(tmp_path: Path) -> Iterator[Any]:
    """Makes a new folder whenever called: hypothesis runs many examples in one test."""
    yield (tmp_path / f"{i}" for i in range(10_000)).__next__


NAME = st.text("aB1 -_é", min_size=1, max_size=3)


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(names=st.sets(st.lists(NAME, min_size=1, max_size=4).map("/".join), max_size=12), data=st.data())
def test_the_order_of_creation_does_not_matter(fresh: Any, names: set[str], data: st.DataObject) -> None:
    files = [f"{name}.jpg" for name in names]
    first, second = fresh(), fresh()
    for root in (first, second):
        root.mkdir()
        put(root, *data.draw(st.permutations(files)))
    assert paths(first) == paths(second) == sorted(files)
