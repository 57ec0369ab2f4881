"""Checkpoints: one safetensors file with the state as JSON in its header, written atomically, never pickle."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from byov._core.errors import BadInput
from byov._core.files import write_atomically
from byov.posterior.segments import untied

FORMAT = "byov-checkpoint-1"


def save(path: Path, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
    """Write a checkpoint, atomically."""
    cpu = untied({name: tensor.detach().cpu() for name, tensor in tensors.items()})
    metadata = {"format": FORMAT, "state": json.dumps(dict(state))}
    write_atomically(path, lambda temporary: save_file(cpu, str(temporary), metadata=metadata))


def load(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read a checkpoint's tensors and state; any other file is a BadInput."""
    with _opened(path) as (file, state):
        return {name: file.get_tensor(name) for name in file.keys()}, state  # noqa: SIM118


def state(path: Path) -> dict[str, Any]:
    """Read only a checkpoint's state."""
    with _opened(path) as (_, found):
        return found


@contextmanager
def _opened(path: Path) -> Iterator[tuple[Any, dict[str, Any]]]:
    if not path.is_file():
        raise BadInput(f"there is no checkpoint {path}: train first, or check the path.")
    try:
        with safe_open(str(path), framework="pt") as file:
            metadata = file.metadata() or {}
            if metadata.get("format") != FORMAT:
                raise BadInput(f"{path} is not a byov checkpoint: give a run that `byov train` wrote.")
            yield file, json.loads(metadata["state"])
    except (SafetensorError, OSError, KeyError, json.JSONDecodeError) as error:
        raise BadInput(f"the checkpoint {path} is damaged ({error}): restore a copy, or train again.") from error
