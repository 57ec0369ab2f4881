"""Store chosen parameters of a module in one flat tensor.

`flatten` moves the chosen parameters out of a module and returns them flat, with a table of segments: the slice of each
parameter. The module's attributes become plain tensors, views into the flat one (or into any other flat tensor of that
layout), so the module runs unchanged and all its weights can be exchanged at once.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn

from byov._core.errors import BadInput

Where = str | Callable[[nn.Module, str], bool]

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
LINEAR = (nn.Linear, nn.MultiheadAttention)  # attention stores its input projection as a bare parameter
NORMS = (nn.LayerNorm, nn.GroupNorm, nn.modules.batchnorm._NormBase, nn.RMSNorm, nn.LocalResponseNorm)

# Table 1 of the paper: which part of the network is Bayesian.
NAMED: dict[str, Callable[[nn.Module, str], bool]] = {
    "all": lambda module, name: True,
    "no_conv": lambda module, name: not isinstance(module, CONVOLUTIONS),
    "linear": lambda module, name: isinstance(module, LINEAR),
    "none": lambda module, name: False,
}


class Segment(NamedTuple):
    """One parameter's slice of the flat tensor.

    Example:
        >>> import byov, torch
        >>> [segment.name for segment in byov.Posterior(torch.nn.Linear(4, 2)).segments]
        ['weight', 'bias']
    """

    name: str
    offset: int
    shape: torch.Size
    kind: str
    """weight, bias, norm, embedding or other (positions, class tokens): decides weight decay and LARS."""

    @property
    def stop(self) -> int:
        return self.offset + prod(self.shape)


def predicate(where: Where) -> Callable[[nn.Module, str], bool]:
    """Look up the predicate on (module, parameter name), given itself or by name."""
    if callable(where):
        return where
    if where not in NAMED:
        raise ValueError(f"where={where!r} is unknown; use one of {', '.join(NAMED)} or a function(module, name).")
    return NAMED[where]


def kind_of(module: nn.Module, name: str) -> str:
    """Classify a parameter by the module that owns it and its name there."""
    if isinstance(module, NORMS) or "norm" in type(module).__name__.lower():  # norms of other libraries
        return "norm"
    if name.endswith("bias"):
        return "bias"
    if isinstance(module, nn.Embedding | nn.EmbeddingBag):
        return "embedding"
    if name.endswith("weight"):
        return "weight"
    return "other"


class Segments(Sequence[Segment]):
    """The table of segments, and the module attributes ("slots") that hold them; tied weights share a segment."""

    def __init__(self, table: Sequence[Segment], slots: Sequence[tuple[nn.Module, str, int]]) -> None:
        self.table = tuple(table)
        self.slots = tuple(slots)
        self.sizes = [segment.stop - segment.offset for segment in self.table]
        self.numel = sum(self.sizes)

    def __len__(self) -> int:
        return len(self.table)

    def __getitem__(self, index):  # type: ignore[no-untyped-def]
        return self.table[index]

    def __iter__(self) -> Iterator[Segment]:
        return iter(self.table)

    def views(self, flat: Tensor) -> list[Tensor]:
        """Split a flat tensor into shaped segments; differentiable, as one concatenation for any number of them."""
        if not self.table:
            return []
        parts = torch.split(flat, self.sizes)
        return [part.view(segment.shape) for part, segment in zip(parts, self.table, strict=True)]

    def named(self, flat: Tensor) -> dict[str, Tensor]:
        """Split a flat tensor into shaped segments by name."""
        return dict(zip([segment.name for segment in self.table], self.views(flat), strict=True))

    def gather(self, parts: Sequence[Tensor | None], out: Tensor) -> Tensor:
        """Copy shaped parts (None: zeros) into a flat tensor."""
        for segment, part in zip(self.table, parts, strict=True):
            target = out[segment.offset : segment.stop]
            if part is None:
                target.zero_()
            else:
                target.view(segment.shape).copy_(part)
        return out

    def show(self, tensors: Sequence[Tensor]) -> None:
        """Set the module's attributes to these tensors."""
        for owner, attribute, index in self.slots:
            setattr(owner, attribute, tensors[index])


def flatten(module: nn.Module, where: Where) -> tuple[Segments, Tensor]:
    """Move the trainable parameters that `where` chooses out of the module; return their table and flat values.

    Frozen parameters (requires_grad False) and parameters that `where` does not choose stay in the module.
    """
    chosen = predicate(where)
    owners: dict[nn.Parameter, list[tuple[str, nn.Module, str]]] = {}
    for path, owner in module.named_modules():
        for attribute, parameter in owner._parameters.items():
            if parameter is not None and parameter.requires_grad and parameter.is_floating_point():
                owners.setdefault(parameter, []).append((f"{path}.{attribute}".lstrip("."), owner, attribute))

    taken = {p: places for p, places in owners.items() if any(chosen(owner, name) for _, owner, name in places)}
    if not taken and where != "none":
        raise ValueError(
            "no trainable parameter was chosen: check `where`, requires_grad, and whether it is wrapped already."
        )
    if len({(parameter.dtype, parameter.device) for parameter in taken}) > 1:
        raise ValueError("the chosen parameters differ in dtype or device: convert the module first, with .to(...).")

    table: list[Segment] = []
    slots: list[tuple[nn.Module, str, int]] = []
    values: list[Tensor] = []
    offset = 0
    for parameter, places in taken.items():
        name, first, attribute = places[0]
        table.append(Segment(name, offset, parameter.shape, kind_of(first, attribute)))
        offset += parameter.numel()
        values.append(parameter.detach().reshape(-1))
        for _, owner, attribute in places:
            slots.append((owner, attribute, len(table) - 1))
            del owner._parameters[attribute]
    like = next((t for t in (*module.parameters(), *module.buffers()) if t.is_floating_point()), torch.empty(0))
    flat = torch.cat(values) if values else like.new_empty(0)
    segments = Segments(table, slots)
    segments.show(segments.views(flat))
    return segments, flat


def untied(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copy tensors that share memory (tied weights that are not random), as safetensors requires."""
    seen: set[int] = set()
    apart: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        shared = tensor.data_ptr() in seen and tensor.numel() > 0
        apart[name] = tensor.clone() if shared else tensor.contiguous()
        seen.add(tensor.data_ptr())
    return apart


class Flattened(nn.Module):
    """A module with the chosen parameters in one flat parameter, `means`; outside draws it uses views of it."""

    means: nn.Parameter

    def __init__(self, module: nn.Module, where: Where) -> None:
        super().__init__()
        self.segments, flat = flatten(module, where)
        self.module = module
        self.means = nn.Parameter(flat)
        self.rest()

    def rest(self) -> None:
        """Set the module's weights to the means, without a gradient."""
        self.segments.show(self.segments.views(self.means.detach()))

    def flats(self) -> dict[str, Tensor]:
        """Return the flat tensors of this layout, by what they hold for a parameter."""
        return {"mean": self.means.detach()}

    def tensors(self) -> dict[str, Tensor]:
        """Return the whole state by name: `mean.*` and other flat tensors, and `other.*` (not random; buffers)."""
        state = {f"{what}.{k}": v for what, flat in self.flats().items() for k, v in self.segments.named(flat).items()}
        return state | {f"other.{k}": v for k, v in self.module.state_dict().items()}

    @torch.no_grad()
    def load_tensors(self, state: Mapping[str, Tensor], where: str = "the saved state") -> None:
        """Load saved tensors; names, shapes and types are checked first, so nothing is half-loaded."""
        own = self.tensors()
        for name in [*own, *state]:
            if name not in state or name not in own:
                verb = "lacks" if name in own else "has an unknown"
                raise BadInput(
                    f"{where} {verb} tensor {name!r}: it belongs to another model or choice of random weights."
                )
            if own[name].shape != state[name].shape:
                raise BadInput(
                    f"{where} has shape {tuple(state[name].shape)} for {name!r}, but this model has "
                    f"{tuple(own[name].shape)}: it belongs to another model."
                )
            if own[name].dtype != state[name].dtype:
                raise BadInput(
                    f"{where} has {state[name].dtype} for {name!r}, but this model has {own[name].dtype}: it belongs "
                    "to another model, or was converted."
                )
        for name, value in own.items():  # views into the flat tensors, and the module's tensors: filled in place
            value.copy_(state[name])

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]  # .to(), .double(), .cuda(): the flat tensor moves, the views must follow
        self.rest()
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        twin = self.__class__.__new__(self.__class__)
        memo[id(self)] = twin
        twin.__dict__ = copy.deepcopy(self.__dict__, memo)
        twin.rest()
        return twin
