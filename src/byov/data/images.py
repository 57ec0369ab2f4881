"""`ImageSet`, the images that a source returns: what training, evaluation and scoring work on."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

Split = Literal["train", "test"]
SPLITS: tuple[Split, ...] = ("train", "test")


class Outline(NamedTuple):
    """The shape, number and labelling of images, without their pixels."""

    shape: tuple[int, int, int]
    """Channels, height, width."""
    images: int
    labelled: bool


@dataclass(frozen=True)
class ImageSet:
    """Images in memory, with labels and class names if they have some.

    Attributes:
        images: Contiguous uint8 tensor ``(N, C, H, W)``.
        labels: int64 tensor ``(N,)``, or None.
        classes: The names of the classes, or None.

    Raises:
        ValueError: If a dtype or a shape is wrong.

    Example:
        >>> images = torch.zeros(10, 3, 32, 32, dtype=torch.uint8)
        >>> len(byov.ImageSet(images, labels=torch.arange(10)))
        10
    """

    images: Tensor
    labels: Tensor | None = None
    classes: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        images, labels = self.images, self.labels
        if images.dtype != torch.uint8 or images.ndim != 4 or not images.is_contiguous():
            raise ValueError(f"images must be contiguous uint8 (N, C, H, W), not {images.dtype} {tuple(images.shape)}")
        if labels is not None and (labels.dtype != torch.int64 or labels.shape != images.shape[:1]):
            raise ValueError(f"labels must be int64 ({len(images)},), not {labels.dtype} {tuple(labels.shape)}")

    def __len__(self) -> int:
        return len(self.images)

    @property
    def outline(self) -> Outline:
        """The shape, number and labelling of the images."""
        channels, height, width = self.images.shape[1:]
        return Outline((channels, height, width), len(self), self.labels is not None)

    def fingerprint(self) -> str:
        """Return a digest of the number of images and the pixels of about 1,024 of them."""
        some = self.images[:: max(1, len(self) // 1024)]
        return hashlib.sha256(repr(tuple(self.images.shape)).encode() + some.contiguous().numpy().tobytes()).hexdigest()

    def subset(self, indices: Tensor) -> ImageSet:
        """Copy the images at these indices, in this order.

        Args:
            indices: int64 tensor of indices.

        Returns:
            A new set with the same classes.

        Example:
            >>> images = byov.ImageSet(torch.zeros(10, 3, 32, 32, dtype=torch.uint8))
            >>> len(images.subset(torch.tensor([3, 1])))
            2
        """
        return ImageSet(self.images[indices], None if self.labels is None else self.labels[indices], self.classes)
