"""The cache: entries are made once, found only with the same settings, and made again if damaged."""

from pathlib import Path

import pytest
import torch

from byov._core.cache import Cache, Entry, digest, read_entry, write_entry


def test_an_entry_is_made_once_and_found_with_the_same_settings_only(tmp_path: Path) -> None:
    made: list[str] = []

    def make(name: str) -> Entry:
        made.append(name)
        return Entry({"row": torch.arange(3.0)}, {"top1": len(made), "bins": [[1, 0.5]]})

    cache = Cache(tmp_path / "partial", ["weights"])
    first = cache.get("probe", lambda: make("first"), {"k": 1})
    again = Cache(tmp_path / "partial", ["weights"]).get("probe", lambda: make("again"), {"k": 1})
    assert made == ["first"] and again.header == first.header == {"top1": 1, "bins": [[1, 0.5]]}
    assert torch.equal(again.tensors["row"], torch.arange(3.0))
    cache.get("probe", lambda: make("other settings"), {"k": 2})
    cache.get("draws", lambda: make("other name"), {"k": 1})
    other = Cache(tmp_path / "partial", ["other weights"])
    assert other.read("probe", {"k": 1}) is None
    other.write("probe", make("other weights"), {"k": 1})
    assert made == ["first", "other settings", "other name", "other weights"]

    cache.clear()
    assert list((tmp_path / "partial").iterdir()) == [other.path("probe", {"k": 1})]
    other.clear()
    assert not (tmp_path / "partial").exists()


@pytest.mark.parametrize("damage", [lambda data: data[:20], lambda data: b"", lambda data: b"x" * len(data)])
def test_a_damaged_file_is_made_again(tmp_path: Path, damage) -> None:
    cache = Cache(tmp_path)
    cache.get("probe", lambda: Entry({}, 1))
    path = cache.path("probe")
    path.write_bytes(damage(path.read_bytes()))
    assert cache.get("probe", lambda: Entry({}, 2)).header == 2 and read_entry(path) is not None


def test_a_header_without_tensors_and_a_file_of_another_program(tmp_path: Path) -> None:
    write_entry(tmp_path / "a", Entry({}, {"rounds": []}))
    assert read_entry(tmp_path / "a") == Entry({}, {"rounds": []})
    from safetensors.torch import save_file

    save_file({"x": torch.zeros(1)}, tmp_path / "b")
    assert read_entry(tmp_path / "b") is None
    with pytest.raises(ValueError):
        write_entry(tmp_path / "c", Entry({}, float("nan")))


def test_the_digest_sees_values_shapes_and_types() -> None:
    tensors = [torch.zeros(4), torch.zeros(2, 2), torch.zeros(4, dtype=torch.int32), torch.tensor([0.0, 0, 0, 1])]
    assert len({digest(tensor) for tensor in tensors}) == 4 and digest(tensors[0]) == digest(torch.zeros(4))


def test_a_flipped_bit_and_a_copy_under_another_name_are_no_entries(tmp_path: Path) -> None:
    cache = Cache(tmp_path)
    cache.write("first", Entry({"row": torch.arange(64.0)}, ["a.png"]))
    cache.write("second", Entry({"row": torch.ones(64)}, ["b.png"]))
    whole = cache.path("first").read_bytes()
    cache.path("second").write_bytes(whole)
    assert cache.read("second") is None
    for place in (20, whole.index(b"a.png"), len(whole) - 40):  # in the names, the header, a number
        cache.path("first").write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        assert cache.read("first") is None
    cache.path("first").write_bytes(whole)
    assert cache.read("first") is not None
