"""Sections of an evaluation are made once, and only taken over where nothing has changed."""

import math
from pathlib import Path

import torch

from byov.evaluation.partial_results import Kept, Section, digest


def test_a_section_is_made_once_and_then_read(tmp_path: Path) -> None:
    made: list[str] = []

    def make(name: str) -> Section:
        made.append(name)
        return Section({"top1": 0.1 + len(made), "none": math.nan, "bins": [[1, 0.5]]}, {"row": torch.arange(3.0)})

    kept = Kept(tmp_path / "partial", ["weights"])
    first = kept("probe", {"k": 1}, lambda: make("first"))
    assert first.measures == {"top1": 1.1, "none": None, "bins": [[1, 0.5]]}
    again = Kept(tmp_path / "partial", ["weights"])("probe", {"k": 1}, lambda: make("again"))
    assert made == ["first"] and again.measures == first.measures
    assert torch.equal(again.images["row"], torch.arange(3.0).double())
    kept("probe", {"k": 2}, lambda: make("other settings"))
    kept("draws", {"k": 1}, lambda: make("other section"))
    other = Kept(tmp_path / "partial", ["other weights"])
    other("probe", {"k": 1}, lambda: make("other weights"))
    assert made == ["first", "other settings", "other section", "other weights"]

    kept.clear()
    assert len(list((tmp_path / "partial").iterdir())) == 1  # the other evaluation's
    other.clear()
    assert not (tmp_path / "partial").exists()


def test_half_a_file_is_made_anew(tmp_path: Path) -> None:
    kept = Kept(tmp_path, [])
    kept("probe", None, lambda: Section({"top1": 1.0}))
    path = next(tmp_path.glob("probe-*"))
    path.write_bytes(path.read_bytes()[:20])
    assert kept("probe", None, lambda: Section({"top1": 2.0})).measures == {"top1": 2.0}


def test_the_digest_sees_values_shapes_and_types() -> None:
    tensors = [torch.zeros(4), torch.zeros(2, 2), torch.zeros(4, dtype=torch.int32), torch.tensor([0.0, 0, 0, 1])]
    assert len({digest(tensor) for tensor in tensors}) == 4 and digest(tensors[0]) == digest(torch.zeros(4))
