"""An optimizer's state as tensors, for a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from byov.training.optimizers.sharded_adamw import ShardedAdamW


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The optimizer's state, by the place of the parameter in its groups. A sharded one's: in the first process."""
    sharded = isinstance(optimizer, ShardedAdamW)  # then all processes must ask together
    state = optimizer.gathered_state() if sharded else optimizer.state_dict()["state"]  # type: ignore[attr-defined]
    return {f"{index}.{key}": value for index, entry in state.items() for key, value in entry.items()}


def load_optimizer_tensors(optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor]) -> None:
    entries: dict[int, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        index, key = name.split(".", 1)
        entries.setdefault(int(index), {})[key] = tensor
    if isinstance(optimizer, ShardedAdamW):
        optimizer.load_whole_state(entries)
    else:
        optimizer.load_state_dict({**optimizer.state_dict(), "state": entries})
