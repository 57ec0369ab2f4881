"""A vision transformer: patches to tokens, pre-norm blocks, one feature vector per image."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from byov._core.errors import BadInput
from byov.backbones.family import Stage, Staged, Uses, only, stem_of
from byov.config import Model, WeightInit


class Size(NamedTuple):
    width: int
    depth: int
    heads: int


# tiny, small and base are DeiT's; micro is a size that two CPU cores can train, mini lies between.
SIZES = {
    "micro": Size(128, 4, 4),
    "mini": Size(192, 6, 3),
    "tiny": Size(192, 12, 3),
    "small": Size(384, 12, 6),
    "base": Size(768, 12, 12),
}
USES: Uses = {
    "width": (),
    "depth": (),
    "heads": (),
    "patch": (),
    "stem": ("patch", "conv"),
    "positions": (),
    "pool": (),
}


def sincos_positions(rows: int, columns: int, width: int) -> Tensor:
    """Compute MoCo v3's fixed two-dimensional sine-cosine positions, (rows * columns, width)."""
    if width % 4:
        raise BadInput(f"sine-cosine positions need a width divisible by 4, not {width}: change model.width.")
    frequencies = 1.0 / 10000 ** (torch.arange(width // 4, dtype=torch.float64) / (width // 4))
    y, x = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
    angles = [axis.reshape(-1, 1).double() * frequencies for axis in (x, y)]
    return torch.cat([f(a) for a in angles for f in (torch.sin, torch.cos)], dim=1).float()


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.output = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        # Chunks, not one permuted tensor indexed three times: its gradient would be three full tensors, mostly zeros,
        # which takes a fifth of the attention's time at 16 tokens.
        q, k, v = (part.view(batch, tokens, self.heads, -1).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
        mixed = F.scaled_dot_product_attention(q, k, v)
        return self.output(mixed.transpose(1, 2).reshape(batch, tokens, width))  # type: ignore[no-any-return]


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))  # type: ignore[no-any-return]


class ConvStem(nn.Sequential):
    """Halve the image until one token per patch is left (Xiao et al., 2021: "Early convolutions").

    The last layer has the odd factor of the patch as its stride. There is one convolution per level: a second would
    double the stem's cost, from a third to two thirds of the four blocks of vit-micro on a CPU. An odd patch, with
    nothing to halve, has one at full size.
    """

    def __init__(self, channels: int, width: int, patch: int) -> None:
        halvings = (patch & -patch).bit_length() - 1  # how often 2 divides the patch
        rest = patch >> halvings
        layers: list[nn.Module] = []
        levels = [(max(width >> (halvings - 1 - i), 16), 2) for i in range(halvings)]
        for out, stride in levels or [(16, 1)]:
            layers += [nn.Conv2d(channels, out, 3, stride, padding=1), nn.GroupNorm(1, out), nn.ReLU(inplace=True)]
            channels = out
        super().__init__(*layers, nn.Conv2d(channels, width, rest, stride=rest))


class ViT(Staged):
    """Map images (B, C, H, W) to features (B, F); F, `features`, is the width, with `flatten` times the tokens."""

    def __init__(
        self,
        image_size: tuple[int, int],
        patch: int,
        channels: int = 3,
        size: Size = SIZES["micro"],
        stem: Literal["patch", "conv"] = "patch",
        positions: Literal["sincos", "learned"] = "sincos",
        pool: Literal["mean", "cls", "flatten"] = "mean",
        weights: WeightInit = "trunc_normal",
    ) -> None:
        super().__init__()
        width, depth, heads = size
        height_, width_ = image_size
        if patch < 1 or height_ % patch or width_ % patch:
            raise BadInput(f"patches of {patch} do not divide an image of {height_} x {width_}: change model.patch.")
        if heads < 1 or width % heads:
            raise BadInput(f"{heads} heads do not divide a width of {width}: change model.heads or model.width.")
        rows, columns = height_ // patch, width_ // patch
        self.features = width * rows * columns if pool == "flatten" else width
        self.pool = pool
        if stem == "conv":
            self.stem: nn.Module = ConvStem(channels, width, patch)
        else:
            self.stem = nn.Conv2d(channels, width, patch, stride=patch)
        if positions == "learned":
            self.positions = nn.Parameter(torch.empty(rows * columns, width))
        else:
            self.register_buffer("positions", sincos_positions(rows, columns, width), persistent=False)
        self.class_token = nn.Parameter(torch.zeros(width)) if pool == "cls" else None
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.apply(partial(initialise, weights=weights))
        _initialise_tokens(self.stem[-1] if isinstance(self.stem, ConvStem) else self.stem, weights)
        for bare in (self.positions, self.class_token):
            if isinstance(bare, nn.Parameter):
                nn.init.trunc_normal_(bare, std=0.02)

    def stages(self) -> Sequence[Stage]:
        def tokens(images: Tensor) -> Tensor:
            x: Tensor = self.stem(images).flatten(2).transpose(1, 2) + self.positions
            if self.class_token is not None:
                x = torch.cat([self.class_token.expand(len(x), 1, -1), x], dim=1)
            return x

        def pooled(x: Tensor) -> Tensor:
            x = self.norm(x)
            if self.pool == "flatten":
                return x.flatten(1)
            return x[:, 0] if self.pool == "cls" else x.mean(dim=1)

        blocks = [Stage(f"blocks.{i}", f"blocks.{i}", block) for i, block in enumerate(self.blocks)]
        return [Stage("stem", "stem", tokens), *blocks, Stage("norm", "norm", pooled)]


def _initialise_tokens(layer: nn.Module, weights: WeightInit) -> None:
    """Give tokens of any patch the scale that std=0.02 gives the paper's patches of 16 x 16 x 3 pixels.

    Otherwise the positions dominate the tokens of a small patch: on digits (2 x 2 pixels), tokens would be 14 times
    smaller.
    """
    assert isinstance(layer, nn.Conv2d)
    if weights == "trunc_normal":
        nn.init.trunc_normal_(layer.weight, std=0.02 * math.sqrt(16 * 16 * 3 / layer.weight[0].numel()))


def initialise(module: nn.Module, weights: WeightInit = "trunc_normal") -> None:
    """Set the initial means: biases 0, weights with the paper's std of 0.02 (appendix C), or 1 / sqrt(fan-in).

    1 / sqrt(fan-in) keeps the scale of activations whatever the width; 0.02 is that of a width of 2,500.
    """
    if isinstance(module, nn.Linear | nn.Conv2d):
        std = 0.02 if weights == "trunc_normal" else module.weight[0].numel() ** -0.5
        nn.init.trunc_normal_(module.weight, std=std)
        if module.bias is not None:
            nn.init.zeros_(module.bias)


# ----------------------------------------------------------------------------------------------- the family interface


def names() -> list[str]:
    return [f"vit-{name}" for name in SIZES]


def knows(backbone: str) -> bool:
    return backbone in names()


def default_patch(side: int) -> int:
    """Choose the divisor of the side nearest to a quarter of it (16 tokens) up to 64 pixels, to 16 pixels above."""
    wanted = side / 4 if side <= 64 else 16
    divisors = [d for d in range(2, side // 2 + 1) if side % d == 0]
    if not divisors:
        raise BadInput(
            f"no patch divides images of {side} x {side}: resize them, for example to a side divisible by 8."
        )
    return min(divisors, key=lambda d: abs(math.log(d / wanted)))


def complete(config: Model, side: int) -> Model:
    """Fill in the settings; width, depth and heads are those of the named size unless given."""
    only(config, USES)
    given = (config.width, config.depth, config.heads)
    named = SIZES[config.backbone.removeprefix("vit-")]
    size = Size(*(own if value is None else value for value, own in zip(given, named, strict=True)))
    if min(size) < 1:
        raise BadInput(f"model.width, model.depth and model.heads must be at least 1, not {tuple(size)}.")
    patch = default_patch(side) if config.patch is None else config.patch
    if patch < 1 or side % patch:
        raise BadInput(f"patches of {patch} do not divide images of {side} x {side}: set model.patch to a divisor.")
    return replace(
        config,
        **size._asdict(),
        patch=patch,
        stem=stem_of(config, USES, "patch"),
        positions=config.positions or "sincos",
        pool=config.pool or "mean",
    )


def build(config: Model, image_shape: tuple[int, int, int]) -> tuple[nn.Module, int]:
    channels, height, width = image_shape
    assert config.width and config.depth and config.heads and config.patch and config.positions and config.pool
    assert config.stem in ("patch", "conv"), "complete the config first"
    size = Size(config.width, config.depth, config.heads)
    shape = height, width
    vit = ViT(shape, config.patch, channels, size, config.stem, config.positions, config.pool, config.weight_init)
    return vit, vit.features
