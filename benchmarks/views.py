"""Two views of each image by BYOL's recipe, in images per second (both views of an image count as one image).

byov and kornia work on batches of tensors, on all cores. torchvision and lightly give an image its own random
parameters only if they see it alone, so they get a DataLoader, at the best number of workers. The peers resize
bilinearly, as they do by default (lightly knows nothing else); byov does it bicubically, as BYOL did: more work.
kornia draws the order of the colour jitter once a batch, byov once an image.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Sampler

from byov.backbones._torchvision import import_torchvision
from byov.config import View, Views
from conductor import Turn, Variant, fastest, interleave, ratios, steps_of, summary
from models import BATCH, byol_views, images

SIDES = (32, 224)
BLUR_KERNEL = 23  # BYOL's at 224 px: a tenth of the side, made odd
STORED = {32: 4 * BATCH, 224: BATCH}


def measure(quick: bool) -> dict[str, Any]:
    return {str(side): _measure(side, quick) for side in (SIDES[:1] if quick else SIDES)}


def _measure(side: int, quick: bool) -> dict[str, Any]:
    steps = (4 if quick else 8) if side == 32 else (1 if quick else 2)
    rounds = (4 if quick else 16) if side == 32 else (2 if quick else 5)

    def variant(factory: str, name: str, **arguments: object) -> Variant:
        return Variant(name, "views", factory, {"side": side, **arguments})

    workers = (0, 1, 2)
    kinds = ("PIL", "tensor")
    candidates = [
        [variant("byov", "byov")],
        [variant("kornia", f"kornia, {mode}", mode=mode) for mode in ("slice", "resample")],
        [
            variant("torchvision", f"torchvision v2, {k}, {w} workers", kind=k, workers=w)
            for k in kinds
            for w in workers
        ],
        [variant("lightly", f"lightly, {w} workers", workers=w) for w in workers],
    ]
    variants = [fastest(some, rounds=1 if quick else 2, steps=steps) for some in candidates]
    times = interleave(variants, rounds, steps)
    return {
        "batch": BATCH,
        "rounds": rounds,
        "steps_a_turn": steps,
        "images_per_second": {name: BATCH / summary(t).median for name, t in times.items()},
        "speedup": {name: ratios(times, name, "byov") for name in times if name != "byov"},
    }


# ------------------------------------------------------------------------------------------------------------ variants


def byov(side: int) -> Turn:
    from byov.data.views import two_views

    pixels, settings = images(STORED[side], side), byol_views(side)

    def step(k: int) -> None:
        ids = _ids(k, len(pixels))
        two_views(pixels[ids], ids, settings, side, 0, k)

    return steps_of(step)


def kornia(side: int, mode: str) -> Turn:
    """`mode`: how it crops, slice or resample."""
    import_torchvision()
    import kornia.augmentation as K

    def view(v: View) -> nn.Sequential:
        blur = [K.RandomGaussianBlur((BLUR_KERNEL, BLUR_KERNEL), v.blur_sigma, p=v.blur)] if v.blur else []
        solarise = [K.RandomSolarize((0.5, 0.5), (0.0, 0.0), p=v.solarise)] if v.solarise else []
        return nn.Sequential(
            K.RandomResizedCrop((side, side), v.crop_area, v.crop_ratio, cropping_mode=mode),
            K.RandomHorizontalFlip(p=v.flip),
            K.ColorJitter(v.brightness, v.contrast, v.saturation, v.hue, p=v.jitter),
            K.RandomGrayscale(p=v.grey),
            *blur,
            *solarise,
        )

    pixels, settings = images(STORED[side], side), byol_views(side)
    first, second = view(settings.first), view(settings.second)

    @torch.no_grad()
    def step(k: int) -> None:
        batch = pixels[_ids(k, len(pixels))].float() / 255
        first(batch), second(batch)

    return steps_of(step)


def torchvision(side: int, kind: str, workers: int) -> Turn:
    """`kind`: whether its transforms see a PIL image or a uint8 tensor."""
    import_torchvision()
    from torchvision.transforms import v2

    def view(v: View) -> v2.Compose:
        jitter = v2.ColorJitter(v.brightness, v.contrast, v.saturation, v.hue)
        return v2.Compose(
            [
                v2.RandomResizedCrop(side, v.crop_area, v.crop_ratio),
                v2.RandomHorizontalFlip(v.flip),
                v2.RandomApply([jitter], v.jitter),
                v2.RandomGrayscale(v.grey),
                *([v2.RandomApply([v2.GaussianBlur(BLUR_KERNEL, v.blur_sigma)], v.blur)] if v.blur else []),
                *([v2.RandomSolarize(128, v.solarise)] if v.solarise else []),
                v2.ToImage(),
                v2.ToDtype(torch.float32, scale=True),
            ]
        )

    settings = byol_views(side)
    first, second = view(settings.first), view(settings.second)
    pixels = images(STORED[side], side)
    loader = Loader(as_pil(pixels) if kind == "PIL" else pixels, lambda image: (first(image), second(image)), workers)
    return loader.turn(lambda views: None)


def lightly(side: int, workers: int) -> Turn:
    return Loader(as_pil(images(STORED[side], side)), lightly_transform(byol_views(side), side), workers).turn(
        lambda views: None
    )


def lightly_transform(settings: Views, side: int) -> Callable[[Image.Image], list[Tensor]]:
    """lightly's own BYOL transform; the encoder normalises pixels, a batch at a time."""
    import_torchvision()
    from lightly.transforms.byol_transform import BYOLTransform, BYOLView1Transform, BYOLView2Transform

    def arguments(v: View) -> dict[str, Any]:
        jitter = {"cj_prob": v.jitter, "cj_bright": v.brightness, "cj_contrast": v.contrast, "cj_sat": v.saturation}
        return jitter | {
            "cj_hue": v.hue,
            "input_size": side,
            "min_scale": v.crop_area[0],
            "hf_prob": v.flip,
            "random_gray_scale": v.grey,
            "gaussian_blur": v.blur,
            "sigmas": v.blur_sigma,
            "solarization_prob": v.solarise,
            "normalize": None,
        }

    return BYOLTransform(
        BYOLView1Transform(**arguments(settings.first)), BYOLView2Transform(**arguments(settings.second))
    )


# --------------------------------------------------------------------------------------------------------- DataLoaders


class Loader:
    """A DataLoader that works only while its variant has a turn.

    A worker prefetches: left to itself it would make batches for free while others are timed, and take CPU from them.
    So a turn is an epoch of exactly its n batches: it starts with empty queues and ends with empty queues, and what is
    timed is n batches, made and used. (With workers the first batch is waited for: less than half a batch in n is lost
    to that, since meanwhile the other worker makes the second one.)
    """

    def __init__(self, images: Any, transform: Callable[[Any], Any], workers: int, size: int = BATCH) -> None:
        self.batches = _Batches(len(images), size)
        data = Transformed(images, transform)
        several = {"persistent_workers": True, "multiprocessing_context": "fork"} if workers else {}
        self.loader = DataLoader(data, batch_sampler=self.batches, num_workers=workers, **several)

    def turn(self, use: Callable[[Any], None]) -> Turn:
        """A turn that gives each of its batches to `use`."""

        def turn(count: int) -> None:
            self.batches.count = count
            for batch in self.loader:
                use(batch)

        return turn


class _Batches(Sampler[list[int]]):
    """`count` batches of images chosen at random."""

    def __init__(self, images: int, size: int) -> None:
        self.images, self.size, self.count = images, size, 0

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[list[int]]:
        for _ in range(self.count):
            yield torch.randperm(self.images)[: self.size].tolist()


class Transformed(Dataset[Any]):
    def __init__(self, images: Any, transform: Callable[[Any], Any]) -> None:
        self.images, self.transform = images, transform

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> Any:
        return self.transform(self.images[index])


def as_pil(pixels: Tensor) -> list[Image.Image]:
    return [Image.fromarray(image.permute(1, 2, 0).numpy()) for image in pixels]


def _ids(k: int, count: int) -> Tensor:
    """The images of batch k."""
    return (torch.arange(BATCH) + BATCH * k) % count
