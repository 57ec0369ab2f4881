"""`byov score` on a folder of photographs, compared with the loop one would write around timm's network.

    python benchmarks/photos.py --photos FOLDER_OF_JPEGS --images 10000 [--draws 8] [--rounds 3] [--out FILE] [--busy]

The photographs are re-encoded to JPEGs of 500 x 375 pixels in a temporary folder. A posthoc run from EfficientNet-Lite0
at 128 pixels is made from up to 2,000 of them. Then four ways to a CSV of scores are timed, each in its own process:

- byov, no draws: decoding, features and cosine kNN distance at the means;
- byov, draws: the same, and the uncertainty from weight draws;
- loop, no draws: PIL in a DataLoader with 2 workers, timm's network on batches of 64, cosine kNN distance;
- loop, draws: the same, with all draws made again for each batch and a full forward pass for each of them.

The images are divided into as many parts as there are rounds, so that each way scores each image once; in a round all
ways score the same part. All start with compiled loops, features of the reference images, and a few images scored.
Not included: starting Python, the encoder check and the page of `byov score`. The loop with draws computes less than
byov does: the mean distance over draws, but neither their disagreement nor the features at the means.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn.functional import normalize
from torch.utils.data import DataLoader

from conductor import THREADS, Turn, Variant, interleave, ratios, steps_of, summary
from inference import normalised, timm_lite0
from run import BUSY, machine
from scoring import WORKERS, Photos

SIZE, SIDE = (500, 375), 128  # of a JPEG, and of what the network sees
KNOWN = 2000  # photographs that the run is made from, at most
LEAST_PART = 300  # images of a round, where the user does not say how many rounds
BATCH = 64  # of the loop
WARM = 64  # images scored before the clock starts
NEIGHBOURS = 10
STILL, DRAWN = "byov, no draws", "byov, draws"
LOOP, LOOP_DRAWN = "loop, no draws", "loop, draws"


# ---------------------------------------------------------------------------------------------------------- photographs


def reencode(photos: Path, out: Path, count: int, seed: int = 0) -> list[Path]:
    """Write `count` JPEGs of 500 x 375 pixels from the images below a folder.

    The order is random. An image that is repeated is cropped, at a random place each time, so that files differ. The
    same seed gives the same files, as long as numpy and Pillow stay the same.
    """
    from byov._core.errors import BadInput
    from byov._core.threads import for_each
    from byov.data.image_files import list_images

    found = [photos / file.path for file in list_images(photos).files]
    if not found:
        raise BadInput(f"there are no images in {photos}: give a folder of photographs.")
    order = np.random.default_rng(seed).permutation(len(found))
    out.mkdir(parents=True)
    paths = [out / f"{i:06d}.jpg" for i in range(count)]

    def write(i: int) -> None:
        with Image.open(found[order[i % len(order)]]) as image:
            # Decided by (seed, i) alone: threads finish in any order.
            box = _box(image.size, np.random.default_rng([seed, i]) if i >= len(order) else None)
            image.convert("RGB").resize(SIZE, Image.Resampling.BICUBIC, box).save(paths[i], quality=90)

    for_each(write, range(count))
    return paths


def _box(size: tuple[int, int], crop: np.random.Generator | None) -> tuple[float, float, float, float]:
    """The largest box with the sides' ratio, in the centre; with a generator, a smaller one at a random place."""
    width, height = size
    scale = min(width / SIZE[0], height / SIZE[1]) * (1.0 if crop is None else crop.uniform(0.7, 0.95))
    wide, high = SIZE[0] * scale, SIZE[1] * scale
    x, y = (0.5, 0.5) if crop is None else crop.random(2)
    left, top = x * (width - wide), y * (height - high)
    return left, top, min(left + wide, width), min(top + high, height)


@contextmanager
def prepared(photos: Path, count: int, rounds: int, draws: int) -> Iterator[tuple[Path, Path]]:
    """A run with the features of its reference images, and the folder with a part of the photographs per round."""
    import byov
    from byov.scoring.scores import Scorer

    with tempfile.TemporaryDirectory() as folder:
        whole, known, parts, run = (Path(folder) / name for name in ("whole", "known", "parts", "run"))
        paths = reencode(photos, whole, count)
        known.mkdir()
        for path in paths[:KNOWN]:
            (known / path.name).hardlink_to(path)
        for i, path in enumerate(paths):
            part = parts / str(i * rounds // count)
            part.mkdir(parents=True, exist_ok=True)
            path.rename(part / path.name)
        command = [sys.executable, "-m", "byov", "train", "--data", f"folder:{known}", "--image-size", str(SIDE)]
        command += ["--method", "auto", "--init", "lite0", "--out", str(run)]
        subprocess.run(command, check=True, stdout=sys.stderr, env=os.environ | {"BYOV_DATA": f"{folder}/cache"})
        nothing = torch.zeros((1, 3, SIDE, SIDE), dtype=torch.uint8)
        for scorer in (Scorer(byov.load(run), "knn_cosine"), Scorer(byov.load(run), draws=draws)):
            scorer.scores(nothing)  # the features of reference and calibration images are cached from now on
        yield run, parts


# ------------------------------------------------------------------------------------------------------------- variants


def ours(run: str, parts: str, draws: int) -> Turn:
    """`byov score` without its page; draws 0: at the means."""
    import byov
    from byov.data.sources import open_stream
    from byov.scoring.scores import Scorer
    from byov.scoring.table import score_images

    opened = byov.load(run)
    scorer = Scorer(opened, draws=draws) if draws else Scorer(opened, "knn_cosine")
    scorer.scores(open_stream(f"{parts}/0", SIDE).chunk(0, WARM).images)

    def step(k: int) -> None:
        out = Path(run) / f"ours-{draws}-{k}.csv"
        score_images(scorer, open_stream(f"{parts}/{k}", SIDE), out, {"k": k}, say=lambda text: None)

    return steps_of(step)


def loop(run: str, parts: str, draws: int) -> Turn:
    """timm's network with the run's weights; draws 0: at the means."""
    distance = knn_distance(run, draws)

    def score(paths: Sequence[Path], out: Path) -> None:
        loader = DataLoader(Photos(list(paths), SIDE), BATCH, num_workers=WORKERS, multiprocessing_context="fork")
        with out.open("w", newline="") as file:
            table = csv.writer(file)
            for images, names in loader:
                table.writerows(zip(names, distance(images).tolist(), strict=True))

    score(sorted(Path(f"{parts}/0").iterdir())[:WARM], Path(run) / f"loop-{draws}-warm.csv")
    return steps_of(lambda k: score(sorted(Path(f"{parts}/{k}").iterdir()), Path(run) / f"loop-{draws}-{k}.csv"))


def knn_distance(run: str, draws: int) -> Callable[[Tensor], Tensor]:
    """Mean cosine distance of images to their nearest reference images, averaged over draws; draws 0: at the means."""
    import byov
    from byov.inference.run import ReferenceSet

    opened = byov.load(run)
    bank = ReferenceSet(opened).images
    state = opened.encoder.unwrapped().state_dict()
    prefix = "backbone."
    network = timm_lite0({name.removeprefix(prefix): t for name, t in state.items() if name.startswith(prefix)})
    sigma = opened.encoder.segments.named(opened.encoder.sigma)
    weights = dict(network.named_parameters())
    random = [(weights[n.removeprefix(prefix)], weights[n.removeprefix(prefix)].clone(), s) for n, s in sigma.items()]

    def draw(k: int) -> None:
        """The same weights for the same k: those that the reference features were made with."""
        generator = torch.Generator().manual_seed(k)
        for weight, mean, deviation in random:
            weight.copy_(mean + deviation * torch.randn(mean.shape, generator=generator))

    def features(images: Tensor) -> Tensor:
        return normalize(network(normalised(images)), dim=1)

    @torch.no_grad()
    def known(k: int) -> Tensor:
        if draws:
            draw(k)
        return torch.cat([features(part) for part in torch.split(bank, BATCH)])

    reference = [known(k) for k in range(max(1, draws))]

    @torch.no_grad()
    def distance(images: Tensor) -> Tensor:
        total = torch.zeros(len(images))
        for k, there in enumerate(reference):
            if draws:
                draw(k)
            total += 1 - (features(images) @ there.T).topk(min(NEIGHBOURS, len(there)), dim=1).values.mean(1)
        return total / len(reference)

    return distance


# -------------------------------------------------------------------------------------------------------------- results


def compare(times: dict[str, list[float]], images: float) -> dict[str, Any]:
    """Images per second of each way, from seconds per part of `images`; ratios within a round."""
    speedup = {"no draws": ratios(times, LOOP, STILL)}
    if LOOP_DRAWN in times:
        speedup["draws"] = ratios(times, LOOP_DRAWN, DRAWN)
    return {
        "images_per_second": {name: images / summary(t).median for name, t in times.items()},
        "speedup": speedup,
        "cost_of_draws": ratios(times, DRAWN, STILL),
    }


def lines(result: dict[str, Any]) -> list[str]:
    """The result as markdown."""
    rates, draws = result["images_per_second"], result["draws"]
    names = {
        STILL: "`byov score`, no draws",
        DRAWN: f"`byov score`, {draws} draws",
        LOOP: "PIL + DataLoader + timm, no draws",
        LOOP_DRAWN: f"PIL + DataLoader + timm, {draws} draws",
    }
    ratios_of = {
        f"{(str(draws) + ' ') * (which == 'draws')}{which}: `byov score` / loop, times faster": ratio
        for which, ratio in result["speedup"].items()
    } | {
        f"`byov score`: time with {draws} draws / without": result["cost_of_draws"],
    }
    return [
        f"{result['images']:,} JPEGs of {SIZE[0]} x {SIZE[1]} pixels in {result['rounds']} rounds; "
        f"{result['reference']:,} reference images; {result['threads']} threads"
        + ("; a busy machine (waiting threads sleep)." if result["busy"] else "."),
        "",
        "| way | images/s |",
        "|---|---|",
        *(f"| {names[name]} | {rate:,.1f} |" for name, rate in rates.items()),
        "",
        "| ratio | median | quartiles |",
        "|---|---|---|",
        *(f"| {what} | {median:.2f} | {low:.2f} - {high:.2f} |" for what, (median, low, high) in ratios_of.items()),
    ]


def time_all(photos: Path, images: int, draws: int, rounds: int, busy: bool, drawn_loop: bool = True) -> dict[str, Any]:
    from byov.runs.folder import RunFolder

    with prepared(photos, images, rounds, draws) as (run, parts):
        where = {"run": str(run), "parts": str(parts)}
        ways = ((STILL, "ours", 0), (DRAWN, "ours", draws), (LOOP, "loop", 0), (LOOP_DRAWN, "loop", draws))
        ways = ways if drawn_loop else ways[:-1]
        variants = [Variant(name, "photos", factory, where | {"draws": own}) for name, factory, own in ways]
        times = interleave(variants, rounds, warmup=0)
        reference = len(json.loads(RunFolder(run).reference_images.read_text())["bank"])
    how = {"images": images, "rounds": rounds, "draws": draws, "reference": reference, "threads": THREADS}
    return how | {"busy": busy, "machine": machine(), **compare(times, images / rounds)}


def options_of(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--photos", type=Path, required=True, help="folder of images; repeated if there are too few")
    parser.add_argument("--images", type=int, default=10_000)
    parser.add_argument("--draws", type=int, default=8)
    parser.add_argument("--rounds", type=int, help=f"default: up to 3, of at least {LEAST_PART} images each")
    parser.add_argument("--out", type=Path, help="a JSON file for the numbers")
    parser.add_argument("--no-drawn-loop", action="store_true", help="leave out the slowest way, the loop with draws")
    parser.add_argument("--busy", action="store_true", help="others use the machine too: waiting threads sleep")
    options = parser.parse_args(arguments)
    options.rounds = options.rounds or max(1, min(3, options.images // LEAST_PART))
    return options


def main() -> None:
    from byov._core.errors import BadInput

    options = options_of()
    if options.busy and not BUSY.items() <= os.environ.items():
        os.environ |= BUSY
        os.execv(sys.executable, sys.orig_argv)  # from the start: OpenMP reads it when torch is imported
    try:
        result = time_all(
            options.photos, options.images, options.draws, options.rounds, options.busy, not options.no_drawn_loop
        )
    except (BadInput, OSError) as error:
        print(error, file=sys.stderr)
        sys.exit(2)
    print("\n".join(lines(result)))
    if options.out:
        options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
