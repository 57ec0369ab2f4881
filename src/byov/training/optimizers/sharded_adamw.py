"""AdamW with sharded state: each of n processes stores the moments of one n-th of every parameter, and updates it.

AdamW has two moments per parameter, and a posterior two parameters per weight: for a large model that is most of the
memory of training. Every process has the whole gradient after the all-reduce, so it can update its slice alone; an
all-gather for each parameter then joins the slices. The result equals AdamW, up to rounding. Slices are gathered in
place, and only the main process ever holds the whole state, to save it: copies would use the memory that it saves.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, distributed, nn

from byov.training.distributed.processes import Processes


class ShardedAdamW(torch.optim.AdamW):
    """AdamW over slices of the given parameters; its own parameters are the slices of this process."""

    def __init__(self, groups: Sequence[Mapping[str, Any]], processes: Processes, **settings: Any) -> None:
        self.processes = processes
        self.whole = [p for group in groups for p in group["params"]]
        super().__init__(
            [{**group, "params": [self._shard(p) for p in group["params"]]} for group in groups], **settings
        )
        self.shards = [p for group in self.param_groups for p in group["params"]]

    def _divided(self, tensor: Tensor) -> tuple[Tensor, Tensor]:
        """Split a flat tensor: the remainder that n does not divide, which the main process owns, and the rest."""
        flat = tensor.reshape(-1)
        few = len(flat) % self.processes.world
        return flat[:few], flat[few:]

    def _slice(self, tensor: Tensor) -> Tensor:
        size, few = divmod(tensor.numel(), self.processes.world)
        stop = few + (self.processes.rank + 1) * size
        return tensor.reshape(-1)[0 if self.processes.main else stop - size : stop]

    def _shard(self, parameter: nn.Parameter) -> nn.Parameter:
        return nn.Parameter(self._slice(parameter.detach()))  # a view: stepping it steps the parameter

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for shard, parameter in zip(self.shards, self.whole, strict=True):
            shard.grad = None if parameter.grad is None else self._slice(parameter.grad)
        super().step()
        for shard, parameter in zip(self.shards, self.whole, strict=True):
            shard.grad = None  # it would keep the whole gradient alive during the next step
            if parameter.grad is not None:
                self._gather_in_place(parameter)

    def _gather_in_place(self, parameter: Tensor) -> None:
        """Fetch the slices of the other processes; each has its own in place already."""
        few, others = self._divided(parameter)
        if len(others):
            distributed.all_gather_into_tensor(others, others.chunk(self.processes.world)[self.processes.rank])
        if len(few):
            distributed.broadcast(few, src=0)

    def gathered_state(self) -> dict[int, dict[str, Tensor]]:
        """Gather the state as a plain AdamW over the whole parameters has it, on the CPU of the main process only.

        All processes must call this together.
        """
        state: dict[int, dict[str, Tensor]] = {}
        for i, (shard, parameter) in enumerate(zip(self.shards, self.whole, strict=True)):
            for key, value in self.state.get(shard, {}).items():  # empty if there never was a gradient
                whole = value if key == "step" else self._gathered(value, parameter)
                if self.processes.main:
                    state.setdefault(i, {})[key] = whole.cpu()
        return state

    def _gathered(self, own: Tensor, like: Tensor) -> Tensor:
        """Join a tensor of the state from its slices: whole in the main process, empty in the others."""
        main, world, size = self.processes.main, self.processes.world, like.numel() // self.processes.world
        whole = torch.empty_like(like) if main else like.new_empty(0)
        few, others = self._divided(whole)
        few.copy_(own[: len(few)])
        if size:
            distributed.gather(own[-size:], list(others.chunk(world)) if main else None, dst=0)
        return whole

    def load_whole_state(self, state: Mapping[int, Mapping[str, Tensor]]) -> None:
        """Load this process's slices of the state of a plain AdamW."""
        own = {i: {k: v if k == "step" else self._slice(v).clone() for k, v in s.items()} for i, s in state.items()}
        self.load_state_dict({**self.state_dict(), "state": own})
