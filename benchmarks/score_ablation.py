"""Ablate the uncertainty of `byov score`: fence, neighbourhood sizes, distance and noise, on the data it is chosen on.

    python benchmarks/score_ablation.py --labelled runs/cifar runs/fashion --planted runs/church=planted/church ...

Runs come from `--method posthoc`. On labelled data, the number is the AUROC for the misclassifications of a linear
probe; on planted folders (benchmarks/planted.py), the AUROC for the planted images. One row per setting:

- fence: reference images whose oddness is this many interquartile ranges above the upper quartile are left out.
- sizes: shares of the usual reference images that count as neighbours; the disagreement is averaged over them.
- distance: whether the disagreement is multiplied by the mean cosine distance to the 10 nearest.
- overlap: the mean Jaccard overlap of neighbourhoods between two draws, which sets the noise.
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import normalize

from byov._core.errors import BadInput
from byov._core.files import write_json
from byov.data.sources import open_source, open_stream
from byov.evaluation.probe import fit_probe, load_labelled
from byov.inference.inputs import at_side, spread
from byov.inference.run import (
    ReferenceSet,
    Run,
    aligned,
    at_draw,
    at_this_draw,
    before_draws,
    features_of,
    load,
    moments_of,
)
from byov.metrics import auroc
from byov.scoring import posthoc
from byov.scoring.scores import NEIGHBOURS, ODD_SHARE, neighbour_count

FENCES = (torch.inf, 1.0, 0.75, 0.5, 0.25)
SIZES = ((0.02,), (0.005, 0.01, 0.02, 0.04))
OVERLAPS = (0.3, 0.45, 0.6, 0.75)
DRAWS = 8


class Task(NamedTuple):
    """Images to score, and which of them a good score ranks first."""

    images: Tensor
    positive: Tensor


class Draw(NamedTuple):
    """Cosines with the reference images at one draw, of an image with itself -inf: (images, reference) each."""

    plain: Tensor
    centred: Tensor


def misclassified(run: Run, most: int) -> Task:
    """Return test images and the mistakes of a linear probe on them."""
    data = load_labelled(run, run.config.data, lambda what, done, total: None)
    side, some = run.image_shape[-1], spread(len(data.test), most)
    test = at_side(data.test.images[some], side)
    probe = fit_probe(features_of(run.encoder, data.train.images, size=side), data.train_labels, classes=data.classes)
    predicted = probe.probabilities(features_of(run.encoder, test)).argmax(1)
    return Task(test, predicted != data.test_labels[some])


def planted(run: Run, folder: Path) -> Task:
    """Return all images of a planted folder, and which of them were planted."""
    with (folder / "truth.csv").open(encoding="utf-8", newline="") as file:
        kinds = {row["path"]: row["kind"] for row in csv.DictReader(file)}
    names = open_stream(str(folder / "images"), run.image_shape[-1]).names
    images = open_source(f"folder:{folder / 'images'}", run.config.image_size).load("train").images
    return Task(at_side(images, run.image_shape[-1]), torch.tensor([kinds[name] != "normal" for name in names]))


def set_noise(run: Run, reference: ReferenceSet, overlap: float) -> None:
    """Widen the run's posterior until neighbourhoods overlap this much between draws."""
    images = reference.images[spread(len(reference.images), posthoc.IMAGES)]
    scales = posthoc._scales(run.encoder, images, "std", overlap, run.config.seed, lambda *_: None)
    where = posthoc.Neighbourhoods(run.encoder, images, run.config.seed)

    def reached(c: float) -> float:
        posthoc._spread(run.encoder, scales, c)
        return where.overlap()

    posthoc._spread(run.encoder, scales, posthoc.bisect(reached, overlap, posthoc.STEPS, lambda done: None).c)


def draws_of(run: Run, reference: ReferenceSet, images: Tensor, before: Sequence[Tensor]) -> list[Draw]:
    """Return the cosines at each draw; features are aligned on the reference images.

    `before`: what does not depend on the draw (`before_draws`), of the images and of the reference images.
    """
    own = reference.own(images)
    rows = (own >= 0).nonzero()[:, 0]
    means = reference.means
    found = []
    for k in range(DRAWS):
        with at_draw(run.encoder, run.config.seed, k):
            ours, theirs = (at_this_draw(run.encoder, some) for some in before)
        moments = moments_of(theirs)
        ours, theirs = (aligned(features, moments, means.moments) for features in (ours, theirs))
        centre = means.moments.mean.float()
        pairs = ((ours, theirs), (ours - centre, theirs - centre))
        cosines = [normalize(a, dim=1) @ normalize(b, dim=1).T for a, b in pairs]
        for each in cosines:
            each[rows, own[rows]] = -torch.inf
        found.append(Draw(*cosines))
    return found


def usual(reference: ReferenceSet, fence: float) -> Tensor:
    """Return which reference images are within the fence."""
    unit = normalize(reference.means.features, dim=1)
    cosines = (unit @ unit.T).fill_diagonal_(-torch.inf)
    oddness = 1 - cosines.topk(neighbour_count(len(unit), ODD_SHARE), dim=1).values[:, -1]
    lower, upper = oddness.quantile(torch.tensor([0.25, 0.75]))
    beyond = upper + fence * (upper - lower) if fence < torch.inf else torch.inf
    return (oddness <= beyond).nonzero()[:, 0]


def disagreement(draws: Sequence[Draw], among: Tensor, sizes: Sequence[float]) -> Tensor:
    """Return the share of neighbours on which two draws disagree, averaged over pairs of draws and sizes."""
    pairs = len(draws) * (len(draws) - 1)
    apart = [1 - (votes * (votes - 1)).sum(1) / (count * pairs) for count, votes in votes_of(draws, among, sizes)]
    return torch.stack(apart).mean(0)


def votes_of(draws: Sequence[Draw], among: Tensor, sizes: Sequence[float]) -> Iterator[tuple[int, Tensor]]:
    """Yield for each size the number of neighbours, and (images, among): at how many draws each is one of them."""
    counts = [neighbour_count(len(among), size) for size in sizes]
    near = [draw.plain[:, among].topk(max(counts), dim=1).indices for draw in draws]
    for count in counts:
        votes = torch.zeros(len(near[0]), len(among))
        for which in near:
            votes.scatter_add_(1, which[:, :count], torch.ones(len(votes), count))
        yield count, votes


def distance(draws: Sequence[Draw], among: Tensor) -> Tensor:
    """Return the mean cosine distance to the nearest, centred, averaged over draws."""
    nearest = [draw.centred[:, among].topk(min(NEIGHBOURS, len(among) - 1), dim=1).values.mean(1) for draw in draws]
    return 1 - torch.stack(nearest).mean(0)


def ablate(
    run: Run, task: Task, overlaps: Sequence[float]
) -> dict[tuple[float, float, tuple[float, ...], bool], float]:
    """Return the AUROC of each setting: (overlap, fence, sizes, with distance)."""
    reference, found = ReferenceSet(run), {}
    before = [before_draws(run.encoder, some, run.image_shape[-1]) for some in (task.images, reference.images)]
    for overlap in overlaps:
        set_noise(run, reference, overlap)
        draws = draws_of(run, reference, task.images, before)
        for fence in FENCES:
            among = usual(reference, fence)
            apart, far = {sizes: disagreement(draws, among, sizes) for sizes in SIZES}, distance(draws, among)
            for sizes, with_distance in product(SIZES, (False, True)):
                score = apart[sizes] * (far if with_distance else 1)
                found[overlap, fence, sizes, with_distance] = auroc(score, task.positive)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--labelled", nargs="*", type=Path, default=[], metavar="RUN")
    parser.add_argument("--planted", nargs="*", default=[], metavar="RUN=FOLDER")
    parser.add_argument("--images", type=int, default=4000, help="test images of each labelled run")
    parser.add_argument("--overlaps", nargs="+", type=float, default=OVERLAPS)
    parser.add_argument("--out", type=Path, help="also write the numbers to this JSON file")
    options = parser.parse_args()
    columns = {}
    try:
        for path in options.labelled:
            run = load(path)
            columns[path.name] = ablate(run, misclassified(run, options.images), options.overlaps)
        for pair in options.planted:
            path, _, folder = pair.partition("=")
            run = load(Path(path))
            columns[Path(path).name] = ablate(run, planted(run, Path(folder)), options.overlaps)
    except BadInput as error:
        sys.exit(f"score_ablation.py: {error}")
    print(f"| overlap | fence | sizes | distance | {' | '.join(columns)} |")
    print("|---" * (4 + len(columns)) + "|")
    rows = []
    for key in next(iter(columns.values())):
        overlap, fence, sizes, with_distance = key
        shown = (overlap, "none" if fence == torch.inf else fence, "several" if len(sizes) > 1 else "2%")
        cells = [f"{found[key]:.3f}" for found in columns.values()]
        print(f"| {' | '.join(map(str, shown))} | {'yes' if with_distance else 'no'} | {' | '.join(cells)} |")
        rows.append([*shown, with_distance, {name: found[key] for name, found in columns.items()}])
    if options.out:
        write_json(options.out, {"columns": ["overlap", "fence", "sizes", "distance", "auroc"], "rows": rows})


if __name__ == "__main__":
    main()
