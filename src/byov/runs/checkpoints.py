"""Checkpoints: one safetensors file with the state as JSON in its header, written atomically, never pickle.

The header carries a digest of state and tensors. A file that does not match it is refused, and so are values that are
not finite: neither becomes the state that a run continues from.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from byov._core.cache import digest_of
from byov._core.errors import BadInput, TrainingFailed
from byov._core.files import write_atomically
from byov.config import LARGEST
from byov.data.formats import MOST_CLASSES
from byov.posterior.segments import untied

FORMAT = "byov-checkpoint-1"


def save(path: Path, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
    """Write a checkpoint, atomically; with a value that is not finite, the one before stays."""
    cpu = untied({name: tensor.detach().cpu() for name, tensor in tensors.items()})
    if (bad := first_not_finite(cpu)) is not None:
        raise TrainingFailed(f"{bad} is not finite, so it is not saved; {kept(path)}.")
    text = json.dumps(dict(state))
    metadata = {"format": FORMAT, "state": text, "digest": digest_of(cpu, text)}
    write_atomically(path, lambda temporary: save_file(cpu, str(temporary), metadata=metadata))


def load(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read a checkpoint's tensors and state; any other file is a BadInput."""
    with _opened(path) as (file, metadata):
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    if metadata.get("digest", "") not in ("", digest_of(tensors, metadata["state"])):  # older runs have none
        raise BadInput(f"the checkpoint {path} is damaged (its content has changed): restore a copy, or train again.")
    if (bad := first_not_finite(tensors)) is not None:
        raise BadInput(f"the checkpoint {path} is not finite in {bad}: its training diverged; use another run.")
    return tensors, json.loads(metadata["state"])


def state(path: Path) -> dict[str, Any]:
    """Read only a checkpoint's state."""
    with _opened(path) as (_, metadata):
        return dict(json.loads(metadata["state"]))


def run_state(state: Mapping[str, Any], path: Path) -> Mapping[str, Any]:
    """Return the state of a run if all of it is there, with sizes that a run can have; anything else is a BadInput."""
    number, shape = (int, float), state.get("image_shape")
    whole = {
        "step": _is_count(state.get("step")) and _is_count(state.get("total")),
        "seconds": isinstance(state.get("seconds", 0.0), number),
        "image_shape": isinstance(shape, list)
        and len(shape) == 3
        and all(_is_count(side) and 1 <= side <= LARGEST["image_size"] for side in shape),
        "classes": "classes" in state and (state["classes"] is None or _is_count(state["classes"], MOST_CLASSES)),
        "fingerprint": isinstance(state.get("fingerprint", 0), (str, type(None))),
        "config": isinstance(state.get("config"), dict),
    }
    if wrong := [key for key, good in whole.items() if not good]:
        raise BadInput(f"the checkpoint {path} is damaged (in {', '.join(wrong)}): restore a copy, or train again.")
    return state


def _is_count(value: Any, most: int = 1 << 53) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= most


def kept(path: Path) -> str:
    """Say which good state there is after a failure."""
    return f"the last good state is saved in {path}" if path.exists() else "no checkpoint had been written yet"


def first_not_finite(tensors: Mapping[str, Tensor]) -> str | None:
    """Return the name of the first tensor with a NaN or infinity, or with a variance of infinity; None if all are good.

    All tensors together are one synchronisation with their device.
    """
    named = {name: tensor for name, tensor in tensors.items() if tensor.is_floating_point() and tensor.numel()}
    if not named:
        return None
    values = (tensor.exp() if ".log_variance." in name else tensor for name, tensor in named.items())
    good = torch.stack([value.isfinite().all() for value in values])
    return next((name for name, fine in zip(named, good.tolist(), strict=True) if not fine), None)


@contextmanager
def _opened(path: Path) -> Iterator[tuple[Any, dict[str, str]]]:
    if not path.is_file():
        raise BadInput(f"there is no checkpoint {path}: train first, or check the path.")
    try:
        with safe_open(str(path), framework="pt") as file:
            metadata = file.metadata() or {}
            if metadata.get("format") != FORMAT:
                raise BadInput(f"{path} is not a byov checkpoint: give a run that `byov train` wrote.")
            if not isinstance(json.loads(metadata["state"]), dict):
                raise ValueError("its state is not an object")
            yield file, metadata
    except (SafetensorError, OSError, KeyError, ValueError, RecursionError) as error:
        raise BadInput(f"the checkpoint {path} is damaged ({error}): restore a copy, or train again.") from error
