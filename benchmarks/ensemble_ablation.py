"""Ablate the scores of several runs together (`byov score --ensemble`), on the data that they are chosen on.

    python benchmarks/ensemble_ablation.py --labelled runs/cifar+runs/cifar-lite1 \\
        --planted runs/church+runs/church-lite1=planted/church ...

Each pair of runs has the same reference images. On labelled data, the number is the AUROC for the misclassifications of
a linear probe on the first run; on planted folders (benchmarks/planted.py), the AUROC for the planted images.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from byov._core.errors import BadInput
from byov._core.files import write_json
from byov.inference.run import ReferenceSet, Run, at_draw, at_this_draw, before_draws, load
from byov.metrics import auroc
from byov.scoring.scores import NEAR_SHARES, ODD_SHARE, OneDraw, neighbour_count, usual_images
from score_ablation import DRAWS, Draw, Task, disagreement, distance, misclassified, planted, votes_of

SHIPPED = "8 draws of each, all pairs"


def draws_of(reference: ReferenceSet, images: Tensor, ks: Sequence[int | None]) -> list[Draw]:
    """Return the cosines with the reference images at each of the run's draws, None for its means."""
    run, own = reference.run, reference.own(images)
    before, found = before_draws(run.encoder, images, run.image_shape[-1]), []
    for k in ks:
        with at_draw(run.encoder, run.config.seed, k):
            features = at_this_draw(run.encoder, before)
        one = OneDraw(reference, features, k, own)
        found.append(Draw(one.likeness, one.cosines))
    return found


def disagreement_across(first: Sequence[Draw], second: Sequence[Draw], among: Tensor) -> Tensor:
    """Return the share of neighbours on which a draw of one run and a draw of the other disagree."""
    pairs = zip(votes_of(first, among, NEAR_SHARES), votes_of(second, among, NEAR_SHARES), strict=True)
    apart = [1 - (ours * theirs).sum(1) / (count * len(first) * len(second)) for (count, ours), (_, theirs) in pairs]
    return torch.stack(apart).mean(0)


def oddness(draw: Draw) -> Tensor:
    return 1 - draw.plain.topk(neighbour_count(draw.plain.shape[1], ODD_SHARE), dim=1).values[:, -1]


def scores_of(runs: Sequence[Run], images: Tensor) -> Mapping[str, Tensor]:
    """Score the images with each way to combine two runs."""
    references = [ReferenceSet(run) for run in runs]
    a, b = (draws_of(reference, images, range(DRAWS)) for reference in references)
    at_means = [draws_of(reference, images, [None]) for reference in references]
    both, half, means = [*a, *b], [*a[: DRAWS // 2], *b[: DRAWS // 2]], [*at_means[0], *at_means[1]]
    among = usual_images(references[0])
    one, two, far = (disagreement(draws, among, NEAR_SHARES) for draws in (a, b, both))
    near, other, mean = (distance(draws, among) for draws in (a, b, both))
    first, second = (oddness(draws[0]) for draws in at_means)
    return {
        "first run": one * near,
        "second run": two * other,
        "product of both runs' scores": one * near * two * other,
        "means of both": disagreement(means, among, NEAR_SHARES) * distance(means, among),
        "4 draws of each, all pairs": disagreement(half, among, NEAR_SHARES) * distance(half, among),
        SHIPPED: far * mean,
        "8 draws of each, all pairs, distance of the first": far * near,
        "8 draws of each, all pairs, no distance": far,
        "8 draws of each, pairs of different runs": disagreement_across(a, b, among) * mean,
        "oddness of the first": first,
        "oddness of the second": second,
        "oddness, mean of both": first / first.median() + second / second.median(),
    }


def runs_of(text: str) -> list[Run]:
    return [load(Path(path)) for path in text.split("+")]


def aurocs(runs: Sequence[Run], task: Task) -> dict[str, float]:
    return {name: auroc(score, task.positive) for name, score in scores_of(runs, task.images).items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--labelled", nargs="*", default=[], metavar="RUN+RUN")
    parser.add_argument("--planted", nargs="*", default=[], metavar="RUN+RUN=FOLDER")
    parser.add_argument("--images", type=int, default=4000, help="test images of each labelled pair")
    parser.add_argument("--out", type=Path, help="also write the numbers to this JSON file")
    options = parser.parse_args()
    columns: dict[str, dict[str, float]] = {}
    try:
        for pair in options.labelled:
            runs = runs_of(pair)
            columns[runs[0].folder.name] = aurocs(runs, misclassified(runs[0], options.images))
        for text in options.planted:
            pair, _, folder = text.partition("=")
            runs = runs_of(pair)
            columns[runs[0].folder.name] = aurocs(runs, planted(runs[0], Path(folder)))
    except BadInput as error:
        sys.exit(f"ensemble_ablation.py: {error}")
    print(f"| score | {' | '.join(columns)} |")
    print("|---" * (1 + len(columns)) + "|")
    for name in next(iter(columns.values())):
        print(f"| {name} | {' | '.join(f'{found[name]:.3f}' for found in columns.values())} |")
    if options.out:
        write_json(options.out, columns)


if __name__ == "__main__":
    main()
