"""Whole units: hidden neurons and attention heads of our ViT, hidden channels of a ResNet's blocks.

A unit is one index along one dimension of several tensors: hidden neuron 7 is a row of the first Linear, an entry of
its bias and a column of the second. Where all of it is 0, so is what it passes on (GELU and ReLU keep 0), and a network
without it computes the same: `compact` builds that smaller network.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from byov._core.errors import BadInput
from byov.backbones import resnet, vit


class Member(NamedTuple):
    """A tensor that the units of a layer share: in this shape, `dim` counts the units."""

    name: str
    shape: tuple[int, ...]
    dim: int
    axis: int
    """The tensor's own dimension that gets shorter with fewer units."""

    def by_unit(self, tensor: Tensor) -> Tensor:
        """(units, numbers of a unit)."""
        return tensor.reshape(self.shape).movedim(self.dim, 0).reshape(self.units, -1)

    @property
    def units(self) -> int:
        return self.shape[self.dim]

    def spread(self, kept: Tensor, like: Tensor) -> Tensor:
        """A mask of units as a mask of the tensor's entries."""
        seen = like.reshape(self.shape)
        return kept.view([-1 if d == self.dim else 1 for d in range(seen.dim())]).expand(seen.shape).reshape(like.shape)

    def take(self, tensor: Tensor, units: Tensor) -> Tensor:
        """The tensor with these units alone."""
        taken = tensor.reshape(self.shape).index_select(self.dim, units)
        return taken.reshape(*tensor.shape[: self.axis], -1, *tensor.shape[self.axis + 1 :])


class Layer(NamedTuple):
    """Parallel units."""

    name: str
    kind: Literal["neurons", "heads", "channels"]
    units: int
    members: tuple[Member, ...]
    """Parameters."""
    statistics: tuple[Member, ...] = ()
    """Buffers: BatchNorm's running mean and variance."""


# -------------------------------------------------------------------------------------------------- where the units are


def layers_of(module: nn.Module) -> list[Layer]:
    """Return all layers of units in a module, by its own names."""
    return [layer for path, part in module.named_modules() for layer in _layers(f"{path}.", part)]


def _layers(path: str, part: nn.Module) -> Iterator[Layer]:
    if isinstance(part, vit.Block):
        yield _heads(f"{path}attention.", part.attention)
        yield _between(path, part, "mlp.0", None, "mlp.2", "neurons")
    # Weight standardisation takes its mean over all inputs, so a filter without some of them is another filter.
    if isinstance(part, resnet.Block) and not isinstance(part.conv1, resnet.StandardisedConv2d):
        yield _between(path, part, "conv1", "bn1", "conv2", "channels")
        if isinstance(part, resnet.Bottleneck):
            yield _between(path, part, "conv2", "bn2", "conv3", "channels")


def _heads(path: str, attention: vit.Attention) -> Layer:
    heads = attention.heads
    inputs = [Member(f"{path}qkv.{name}", (3, heads, -1), 1, 0) for name in ("weight", "bias")]
    output = Member(f"{path}output.weight", (attention.output.out_features, heads, -1), 1, 1)
    return Layer(path.rstrip("."), "heads", heads, (*inputs, output))


def _between(
    path: str, part: nn.Module, first: str, norm: str | None, second: str, kind: Literal["neurons", "channels"]
) -> Layer:
    """The units between one Linear or convolution (and its norm) and the next."""
    before, after = _tensor(part, f"{first}.weight"), _tensor(part, f"{second}.weight")
    units, area = len(before), after[0, 0].numel()  # area: 1 of a Linear
    vectors = [f"{norm}.weight", f"{norm}.bias"] if norm else [f"{first}.bias"]
    batch = norm is not None and isinstance(part.get_submodule(norm), nn.BatchNorm2d)
    statistics = [f"{norm}.running_mean", f"{norm}.running_var"] if batch else []
    members = (
        Member(f"{path}{first}.weight", (units, -1), 0, 0),
        *(Member(path + name, (units,), 0, 0) for name in vectors),
        Member(f"{path}{second}.weight", (-1, units, area), 1, 1),
    )
    running = tuple(Member(path + name, (units,), 0, 0) for name in statistics)
    return Layer(path + first, kind, units, members, running)


def _tensor(module: nn.Module, name: str) -> Tensor:
    path, _, attribute = name.rpartition(".")
    tensor: Tensor = getattr(module.get_submodule(path), attribute)
    return tensor


# -------------------------------------------------------------------------------------------------------- which to drop


class _Scored(NamedTuple):
    layer: Layer
    scores: Tensor
    """Of each unit: the mean over its weights."""
    size: int
    """Weights of a unit."""


def drop_units(
    module: nn.Module, scores: Mapping[str, Tensor], sparsity: float, scope: Literal["layer", "global"] = "layer"
) -> dict[str, Tensor]:
    """Return masks by parameter name that drop the lowest units, with about this share of the scored weights.

    Each layer keeps at least one unit.
    """
    scored = []
    for layer in layers_of(module):
        tables = [member.by_unit(scores[member.name]) for member in layer.members if member.name in scores]
        if tables:
            table = torch.cat(tables, dim=1)
            scored.append(_Scored(layer, table.mean(dim=1), table.shape[1]))
    if not scored:
        raise BadInput(
            "this encoder has no units to remove (our ViTs have, and our ResNets with model.norm batch or none): "
            "leave out --structured."
        )
    masks: dict[str, Tensor] = {}
    for group in [scored] if scope == "global" else [[one] for one in scored]:
        for one, kept in zip(group, _highest(group, sparsity), strict=True):
            for member in one.layer.members:
                mask = member.spread(kept, _tensor(module, member.name))
                masks[member.name] = masks[member.name] & mask if member.name in masks else mask
    return masks


def _highest(group: Sequence[_Scored], sparsity: float) -> list[Tensor]:
    """Which units of these layers remain: the lowest scores are dropped until the share is nearest."""
    kept = [torch.ones(one.layer.units, dtype=torch.bool, device=one.scores.device) for one in group]
    left = [one.layer.units for one in group]
    rows = [(score, i, unit) for i, one in enumerate(group) for unit, score in enumerate(one.scores.tolist())]
    goal = sparsity * sum(one.layer.units * one.size for one in group)
    for _, i, unit in sorted(rows):
        if goal < group[i].size / 2:
            break
        if left[i] > 1:
            kept[i][unit] = False
            left[i] -= 1
            goal -= group[i].size
    return kept


# ---------------------------------------------------------------------------------------------------- a smaller network


class FewerHeads(nn.Module):
    """Attention whose heads together are narrower than its tokens."""

    def __init__(self, attention: vit.Attention, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.output = attention.qkv, attention.output

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, _ = x.shape
        q, k, v = (part.view(batch, tokens, self.heads, -1).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
        mixed = F.scaled_dot_product_attention(q, k, v)
        return self.output(mixed.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


def compact(module: nn.Module, masks: Mapping[str, Tensor]) -> nn.Module:
    """Return a copy of a pruned module without its empty units: the same function, fewer numbers."""
    twin = copy.deepcopy(module)
    for layer in layers_of(twin):
        units = _left(layer, masks)
        if len(units) == layer.units:
            continue
        for member in (*layer.members, *layer.statistics):
            _replace(twin, member, units)
        if layer.kind == "heads":
            attention = twin.get_submodule(layer.name)
            assert isinstance(attention, vit.Attention)
            parent, _, name = layer.name.rpartition(".")
            setattr(twin.get_submodule(parent), name, FewerHeads(attention, len(units)))
    for part in twin.modules():  # a layer's own record of its sizes
        if isinstance(part, nn.Linear):
            part.out_features, part.in_features = part.weight.shape
        elif isinstance(part, nn.Conv2d):
            part.out_channels, part.in_channels = part.weight.shape[:2]
        elif isinstance(part, nn.BatchNorm2d):
            part.num_features = len(part.weight)
    return twin


def _left(layer: Layer, masks: Mapping[str, Tensor]) -> Tensor:
    """The units of which any weight remains."""
    kept = torch.zeros(layer.units, dtype=torch.bool)
    for member in layer.members:
        kept |= member.by_unit(masks[member.name].cpu()).any(dim=1) if member.name in masks else True
    return kept.nonzero()[:, 0]


def _replace(module: nn.Module, member: Member, units: Tensor) -> None:
    path, _, attribute = member.name.rpartition(".")
    owner = module.get_submodule(path)
    old: Tensor = getattr(owner, attribute)
    new = member.take(old.detach(), units.to(old.device))
    setattr(owner, attribute, nn.Parameter(new, old.requires_grad) if isinstance(old, nn.Parameter) else new)
