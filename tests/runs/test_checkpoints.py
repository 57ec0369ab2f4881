import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from byov._core.errors import BadInput, TrainingFailed
from byov._core.files import without_prefix
from byov.runs import checkpoints


def test_round_trip(tmp_path) -> None:
    path = tmp_path / "deep" / "last.safetensors"
    tensors = {"a.b": torch.randn(3, 4), "a.c": torch.arange(3), "d": torch.zeros(0)}
    checkpoints.save(path, tensors, {"step": 7, "config": {"x": [1, 2]}})
    loaded, state = checkpoints.load(path)
    assert state == {"step": 7, "config": {"x": [1, 2]}}
    assert all(torch.equal(loaded[k], v) for k, v in tensors.items())
    assert set(without_prefix(loaded, "a.")) == {"b", "c"}


def test_a_failed_write_keeps_the_old_and_leaves_nothing(tmp_path, monkeypatch) -> None:
    path = tmp_path / "last.safetensors"
    checkpoints.save(path, {"a": torch.ones(2)}, {"step": 1})

    def broken(tensors, filename, metadata):
        with open(filename, "wb") as file:  # noqa: PTH123
            file.write(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoints, "save_file", broken)
    with pytest.raises(BadInput, match="no space"):
        checkpoints.save(path, {"a": torch.zeros(2)}, {"step": 2})
    assert checkpoints.load(path)[1]["step"] == 1
    assert [p.name for p in tmp_path.iterdir()] == ["last.safetensors"]


def test_what_is_no_checkpoint_is_refused(tmp_path) -> None:
    path = tmp_path / "x.safetensors"
    with pytest.raises(BadInput, match="no checkpoint"):
        checkpoints.load(path)
    path.write_bytes(b"\x00" * 100)
    with pytest.raises(BadInput, match="damaged"):
        checkpoints.load(path)
    save_file({"a": torch.ones(1)}, str(path))
    with pytest.raises(BadInput, match="not a byov checkpoint"):
        checkpoints.load(path)
    checkpoints.save(path, {"a": torch.ones(100)}, {})
    path.write_bytes(path.read_bytes()[:-50])
    with pytest.raises(BadInput, match="damaged"):
        checkpoints.load(path)


NOT_FINITE = {
    "student.mean.a": [1.0, float("nan")],
    "other.running_var": [float("inf"), 1.0],
    "student.log_variance.a": [1e30, -10.0],  # finite, but its sigma is not
}


@pytest.mark.parametrize("name", NOT_FINITE)
def test_what_is_not_finite_is_neither_saved_nor_loaded(tmp_path, name) -> None:
    path = tmp_path / "last.safetensors"
    checkpoints.save(path, {"student.mean.a": torch.ones(2), "step": torch.ones(2, dtype=torch.int64)}, {"step": 1})
    bad = {"fine": torch.ones(3), name: torch.tensor(NOT_FINITE[name])}
    with pytest.raises(TrainingFailed, match=rf"{name} is not finite.*last good state"):
        checkpoints.save(path, bad, {"step": 2})
    assert checkpoints.load(path)[1]["step"] == 1
    save_file(bad, str(path), metadata={"format": checkpoints.FORMAT, "state": "{}"})
    with pytest.raises(BadInput, match=rf"not finite in {name}"):
        checkpoints.load(path)


def test_a_changed_number_or_a_missing_tensor_is_damage(tmp_path) -> None:
    path = tmp_path / "last.safetensors"
    checkpoints.save(path, {"a": torch.ones(100), "optimizer.0.step": torch.ones(1)}, {"step": 1})
    whole = path.read_bytes()
    path.write_bytes(whole[:-200] + bytes([whole[-200] ^ 1]) + whole[-199:])
    with pytest.raises(BadInput, match="content has changed"):
        checkpoints.load(path)
    path.write_bytes(whole)
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    save_file({"a": torch.ones(100)}, path, metadata=metadata)
    with pytest.raises(BadInput, match="content has changed"):
        checkpoints.load(path)
