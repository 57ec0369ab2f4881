"""AdamW with its state sharded: of n processes, each keeps and updates one n-th of every parameter.

AdamW's two moments are twice the size of what they belong to, and a posterior has two numbers a weight: for a large
model that is most of the memory of training. Every process has the whole gradient after the all-reduce, so it can
update its slice alone; one all-gather then puts the slices together. The result is AdamW's, up to rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, distributed, nn

from byov.training.processes import Processes


class ShardedAdamW(torch.optim.AdamW):
    """AdamW over slices of the given parameters; its own parameters are the slices of this process."""

    def __init__(self, groups: Sequence[Mapping[str, Any]], processes: Processes, **settings: Any) -> None:
        self.processes = processes
        self.whole = [p for group in groups for p in group["params"]]
        super().__init__(
            [{**group, "params": [self._shard(p) for p in group["params"]]} for group in groups], **settings
        )
        self.shards = [p for group in self.param_groups for p in group["params"]]

    def _slice(self, flat: Tensor) -> Tensor:
        size = -(-flat.numel() // self.processes.world)
        return flat.reshape(-1)[self.processes.rank * size : (self.processes.rank + 1) * size]

    def _shard(self, parameter: nn.Parameter) -> nn.Parameter:
        return nn.Parameter(self._slice(parameter.detach()))  # a view: stepping it steps the parameter

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for shard, parameter in zip(self.shards, self.whole, strict=True):
            shard.grad = None if parameter.grad is None else self._slice(parameter.grad)
        super().step()
        for parameter, value in zip(self.whole, self._gathered(self.shards, self.whole), strict=True):
            parameter.copy_(value)

    def _gathered(self, shards: Sequence[Tensor], like: Sequence[Tensor]) -> list[Tensor]:
        """Whole tensors, from every process's slices: one all-gather."""
        sizes = [-(-t.numel() // self.processes.world) for t in like]
        own = like[0].new_zeros(sum(sizes))
        for place, shard in zip(torch.split(own, sizes), shards, strict=True):
            place[: shard.numel()] = shard.detach()
        parts = [torch.empty_like(own) for _ in range(self.processes.world)]
        distributed.all_gather(parts, own)
        columns = zip(*(torch.split(part, sizes) for part in parts), strict=True)
        return [torch.cat(column)[: t.numel()].view_as(t) for column, t in zip(columns, like, strict=True)]

    def gathered_state(self) -> dict[int, dict[str, Tensor]]:
        """The state as a plain AdamW over the whole parameters would have it. All processes must ask together."""
        owned = [i for i, shard in enumerate(self.shards) if self.state.get(shard)]  # the others never had a gradient
        states = [self.state[self.shards[i]] for i in owned]
        whole: dict[int, dict[str, Tensor]] = {i: {} for i in owned}
        for key in states[0] if states else ():
            values = [state[key] for state in states]
            if key != "step":
                values = self._gathered(values, [self.whole[i] for i in owned])
            for i, value in zip(owned, values, strict=True):
                whole[i][key] = value
        return whole

    def load_whole_state(self, state: Mapping[int, Mapping[str, Tensor]]) -> None:
        """Takes this process's slices out of the state of a plain AdamW."""
        own = {i: {k: v if k == "step" else self._slice(v).clone() for k, v in s.items()} for i, s in state.items()}
        self.load_state_dict({**self.state_dict(), "state": own})
