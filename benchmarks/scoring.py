"""A folder of JPEGs to a table of scores, compared with the loop one would write: PIL, DataLoader, draws per batch.

Both give each image the same score from the same draws and write it to a table. The loop gets the reference features
made before. Its workers decode whole JPEGs and resize, and it repeats its draws for every batch, since it cannot hold
all images. byov decodes at a smaller scale, in threads, and makes a draw once for many images. With small images and
many draws, both spend most of the time in the same forward passes.
"""

from __future__ import annotations

import csv
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from conductor import Turn, Variant, fastest, interleave, ratios, steps_of, summary

SIDE = 64  # pixels of the network, which is that of the recipe folder-64
WORKERS = 2


class Case(NamedTuple):
    """Images of one kind for a run of one kind."""

    method: str
    draws: int
    size: tuple[int, int]
    """Of a JPEG."""
    images: int


CASES = {
    "photographs of 12 megapixels, 20 draws": Case("byov", 20, (4000, 3000), 128),
    "500 x 375 pixels (ImageNet's), 20 draws": Case("byov", 20, (500, 375), 1024),
    "500 x 375 pixels, no draws": Case("byol", 0, (500, 375), 4096),
}


def measure(quick: bool) -> dict[str, Any]:
    return {name: _measure(case, quick) for name, case in CASES.items()}


def _measure(case: Case, quick: bool) -> dict[str, Any]:
    count, rounds = (case.images // 2, 2) if quick else (case.images, 3)
    with _prepared(case, count) as (run, photos):
        where = {"run": str(run), "photos": str(photos), "draws": case.draws}
        batches = (32, 128)
        loops = [Variant(f"batch {size}", "scoring", "loop", where | {"batch": size}) for size in batches]
        peer = fastest(loops, rounds=1)
        times = interleave([Variant("byov", "scoring", "ours", where), peer], rounds)
    return {
        "images": count,
        "rounds": rounds,
        "loop": f"{WORKERS} workers, {peer.name}",
        "images_per_second": {name: count / summary(t).median for name, t in times.items()},
        "speedup": ratios(times, peer.name, "byov"),
    }


@contextmanager
def _prepared(case: Case, count: int) -> Iterator[tuple[Path, Path]]:
    """A run with its bank, and a folder of JPEGs."""
    import byov
    from byov.config import Monitor, Optim, read_recipe
    from byov.scoring.scores import Scorer
    from byov.training.prepare import prepare

    with tempfile.TemporaryDirectory() as folder:
        photos, known, run = (Path(folder) / name for name in ("photos", "known.npz", "run"))
        photos.mkdir()
        noise = np.random.default_rng(0)
        for i in range(16):
            coarse = Image.fromarray(noise.integers(0, 256, (15, 20, 3), dtype=np.uint8))
            coarse.resize(case.size, Image.Resampling.BICUBIC).save(photos / f"{i:05d}.jpg", quality=90)
        for i in range(16, count):
            shutil.copy(photos / f"{i % 16:05d}.jpg", photos / f"{i:05d}.jpg")
        np.savez(known, images=noise.integers(0, 256, (1200, SIDE, SIDE, 3), dtype=np.uint8))
        optim, monitor = Optim(epochs=1, batch_size=400), Monitor(tensorboard=False)
        recipe = read_recipe("folder-64", case.method)
        config = replace(recipe, data=f"npz:{known}", optim=optim, monitor=monitor, device="cpu")
        prepare(config, run, say=lambda text: None).run()
        nothing = torch.zeros((1, 3, SIDE, SIDE), dtype=torch.uint8)
        Scorer(byov.load(run), draws=max(1, case.draws)).scores(nothing)  # caches the reference features
        yield run, photos


def ours(run: str, photos: str, draws: int) -> Turn:
    import byov
    from byov.data.sources import open_stream
    from byov.scoring.scores import Scorer
    from byov.scoring.table import score_images

    scorer = Scorer(byov.load(run), draws=max(1, draws))

    def step(k: int) -> None:
        out = Path(run) / f"ours-{k}.csv"
        score_images(scorer, open_stream(photos, SIDE), out, {"k": k}, say=lambda text: None)

    return steps_of(step)


def loop(run: str, photos: str, draws: int, batch: int) -> Turn:
    import byov
    from byov.inference.run import ReferenceSet, at_draw

    opened = byov.load(run)
    encoder, seed, bank = opened.encoder.eval(), opened.config.seed, ReferenceSet(opened)
    ks = list(range(draws)) or [None]
    known = {k: bank.aligned(bank.at(k).features, k) for k in ks}
    moments = {k: bank.at(k).moments for k in ks}, bank.means.moments
    data = Photos(sorted(Path(photos).iterdir()))
    loader = DataLoader(data, batch, num_workers=WORKERS, persistent_workers=True, multiprocessing_context="fork")

    def distance(images: Tensor, k: int | None) -> Tensor:
        with at_draw(encoder, seed, k):
            features = encoder(images)
        of, to = moments[0][k], moments[1]
        moved = features if k is None else ((features - of.mean) / of.std * to.std + to.mean).float()
        return torch.cdist(moved, known[k]).topk(10, largest=False).values.mean(1)

    @torch.no_grad()
    def step(k: int) -> None:
        with (Path(run) / f"loop-{batch}-{k}.csv").open("w", newline="") as file:
            table = csv.writer(file)
            for images, names in loader:
                scores = torch.stack([distance(images, k) for k in ks]).mean(0)
                table.writerows(zip(names, scores.tolist(), strict=True))

    return steps_of(step)


class Photos(Dataset[tuple[Tensor, str]]):
    """Decoded and resized as one does."""

    def __init__(self, paths: list[Path], side: int = SIDE) -> None:
        self.paths, self.side = paths, side

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[Tensor, str]:
        path = self.paths[index]
        image = ImageOps.fit(Image.open(path).convert("RGB"), (self.side, self.side), Image.Resampling.BICUBIC)
        return torch.from_numpy(np.array(image)).permute(2, 0, 1), path.name
