"""A set of images in memory: what every source gives and every later stage takes."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

Split = Literal["train", "test"]
SPLITS: tuple[Split, ...] = ("train", "test")


class Outline(NamedTuple):
    """A set of images without its pixels."""

    shape: tuple[int, int, int]
    """Channels, height, width."""
    images: int
    labelled: bool


@dataclass(frozen=True)
class ImageSet:
    """Images, uint8 (N, C, H, W), contiguous; labels, int64 (N,), if any; the names of the classes, if known."""

    images: Tensor
    labels: Tensor | None = None
    classes: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        images, labels = self.images, self.labels
        if images.dtype != torch.uint8 or images.ndim != 4 or not images.is_contiguous():
            raise ValueError(f"images are contiguous uint8 (N, C, H, W), not {images.dtype} {tuple(images.shape)}")
        if labels is not None and (labels.dtype != torch.int64 or labels.shape != images.shape[:1]):
            raise ValueError(f"labels are int64 ({len(images)},), not {labels.dtype} {tuple(labels.shape)}")

    def __len__(self) -> int:
        return len(self.images)

    @property
    def outline(self) -> Outline:
        channels, height, width = self.images.shape[1:]
        return Outline((channels, height, width), len(self), self.labels is not None)

    def fingerprint(self) -> str:
        """Tells whether these are the same images: their number, and the pixels of up to 1,024 of them."""
        some = self.images[:: max(1, len(self) // 1024)]
        return hashlib.sha256(repr(tuple(self.images.shape)).encode() + some.contiguous().numpy().tobytes()).hexdigest()

    def subset(self, indices: Tensor) -> ImageSet:
        """The images at these indices, in this order (a copy)."""
        return ImageSet(self.images[indices], None if self.labels is None else self.labels[indices], self.classes)
