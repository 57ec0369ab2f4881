"""Measure label-free scores where labels are known: misclassifications of a linear probe, other sources, growing noise.

    python benchmarks/scores.py pets --data DATA --out FOLDER       # Oxford Pets in class folders, train and test
    python benchmarks/scores.py measure --run RUN [--data SOURCE] [--ood SOURCE ...] [--ensemble RUN ...] --out F.json
    python benchmarks/scores.py compare F.json OTHER.json           # two runs on the same test images, paired

Labels are used for the probe and for judging alone. Next to the scores stand the baselines: cosine kNN distance at the
means for several k, the disagreement of an ensemble of encoders, and the probe's own confidence, which needs labels.
Intervals are 95%, from a bootstrap over test images that is paired where two scores are compared.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import cosine_similarity, normalize

from byov._core.errors import BadInput
from byov._core.files import write_json
from byov._core.randomness import RandomStream
from byov.data.shifts import shifted
from byov.data.sources import open_source
from byov.data.views import two_views
from byov.evaluation.probe import fit_probe, load_labelled
from byov.inference.inputs import at_side, in_channels, spread
from byov.inference.run import ReferenceSet, Run, at_draw, features_of, load
from byov.metrics.ranking import auroc, midranks
from byov.metrics.resampling import resampled_counts
from byov.scoring.ensemble import EnsembleScorer
from byov.scoring.posthoc import IMAGES, Neighbourhoods
from byov.scoring.scores import CANDIDATES, CONSISTENT_SHARE, ODDNESS, Scorer, neighbour_count
from byov.studies.beyond.score import candidate_scores
from byov.training.learners import SelfSupervised

KS = (10, 25, 50, 100, 250)
NOISE, SEVERITIES, NOISY = "gaussian_noise", (1, 3, 5), 1000
RESAMPLES = 300
ERRORS = "errors"


# ------------------------------------------------------------------------------------------------------------- measures


def evaluate_scores(
    run: Run,
    data: str,
    ood: Sequence[str],
    ensemble: Sequence[Run],
    images: int,
    draws: int,
    only: Sequence[str] | None = None,
    loss: bool = False,
    severities: Sequence[int] = SEVERITIES,
) -> dict[str, object]:
    """All scores of a run on a labelled source: probe, AUROCs with intervals, and the per-image scores."""
    labelled = load_labelled(run, data, lambda what, done, total: None)
    some = spread(len(labelled.test), images)
    test, labels = labelled.test.images[some], labelled.test_labels[some]
    side = run.image_shape[-1]
    known = features_of(run.encoder, labelled.train.images, size=side)
    features = features_of(run.encoder, test, size=side)
    probabilities = fit_probe(known, labelled.train_labels, classes=labelled.classes).probabilities(features)
    wrong = probabilities.argmax(1) != labels
    names = [n for n in only or CANDIDATES if not CANDIDATES[n].least_draws or not run.deterministic]
    names = list(dict.fromkeys([*names, ODDNESS, Scorer(run, draws=draws).uncertainty]))
    scores = all_scores(run, test, draws, names)
    scores |= knn_scores(ReferenceSet(run), features) | {"confidence (labels)": 1 - probabilities.max(1).values}
    if loss and isinstance(run.learner, SelfSupervised):
        scores |= loss_scores(run, run.learner, at_side(test, side), max(draws, 1))
    if ensemble:
        scores |= ensemble_scores([run, *ensemble], test, draws)
    found: dict[str, object] = {
        "run": str(run.folder),
        "data": data,
        "images": len(test),
        "labels": len(known),
        "draws": draws,
        "overlap": None if run.deterministic else overlap_of_draws(run),
        "top1": float((~wrong).double().mean()),
        ERRORS: {name: interval(value, wrong) for name, value in scores.items()},
    }
    for spec in ood:
        other = all_scores(run, ood_images(run, spec), draws, names)
        found[f"ood.{spec}"] = {name: apart(scores[name], other[name]) for name in other}
    clean = at_side(test[:NOISY], side)
    for severity in severities:
        noisy = all_scores(run, shifted(clean, torch.arange(len(clean)), NOISE, severity, seed=0), draws, names)
        found[f"noise.{severity}"] = {name: apart(scores[name][: len(clean)], noisy[name]) for name in noisy}
    return found | {"per_image": {**scores, "wrong": wrong.double()}}


def all_scores(run: Run, images: Tensor, draws: int, names: Sequence[str]) -> dict[str, Tensor]:
    """The candidates, and what `byov score` makes of two of them: its columns `oddness` and `uncertainty`."""
    found = candidate_scores(run, images, draws, names)
    return found | {"uncertainty": found[Scorer(run, draws=draws).uncertainty], "oddness": found[ODDNESS]}


def ood_images(run: Run, spec: str, most: int = 1000) -> Tensor:
    source = open_source(spec, run.image_shape[-1])
    images = source.load(source.default).images
    return in_channels(run, images[spread(len(images), most)])[0]


def knn_scores(bank: ReferenceSet, features: Tensor) -> dict[str, Tensor]:
    """Mean cosine distance to the k nearest reference images at the means, with and without centring."""
    reference = bank.means.features
    found = {}
    for kind, centre in (("", torch.zeros_like(reference[0])), ("centred ", reference.mean(0))):
        cosines = normalize(features - centre, dim=1) @ normalize(reference - centre, dim=1).T
        nearest = cosines.topk(min(KS[-1], len(reference)), dim=1).values
        found |= {f"{kind}kNN {k}": 1 - nearest[:, :k].mean(1) for k in KS}
    return found


@torch.no_grad()
def loss_scores(run: Run, learner: SelfSupervised, images: Tensor, draws: int) -> dict[str, Tensor]:
    """Scores from the image's own BYOL loss at each draw: the generalised predictive density, and the loss's variance.

    The density is -log of the mean over draws of exp(-loss / temperature), which is what the generalised posterior
    implies. The two views of an image are the same at every draw.
    """
    losses = []
    for part in torch.split(torch.arange(len(images)), 256):
        pair = two_views(images[part], part, run.config.views, run.image_shape[-1], RandomStream.LOSS_SCORE, 0)
        targets = [learner.teacher.eval()(view) for view in pair]
        rows = []
        for k in range(draws):
            with at_draw(learner.posterior.eval(), run.config.seed, k):
                predictions = [learner.posterior(view).prediction for view in pair]
            cosines = [cosine_similarity(p, z) for p, z in zip(predictions, reversed(targets), strict=True)]
            rows.append(4 - 2 * sum(cosines))
        losses.append(torch.stack(rows))
    loss = torch.cat(losses, dim=1).double()
    temperature = run.config.posterior.temperature
    density = -torch.logsumexp(-loss / temperature, dim=0) * temperature
    return {"BYOL loss": loss.mean(0), "predictive density": density, "variance of the loss": loss.var(0)}


def ensemble_scores(runs: Sequence[Run], images: Tensor, draws: int) -> dict[str, Tensor]:
    """The uncertainty of `byov score --ensemble`, and the disagreement of the runs' nearest images without draws."""
    votes = 0.0
    for run in runs:
        bank, features = ReferenceSet(run), features_of(run.encoder, images, size=run.image_shape[-1])
        cosines = normalize(features, dim=1) @ normalize(bank.means.features, dim=1).T
        near = cosines.topk(count := neighbour_count(cosines.shape[1], CONSISTENT_SHARE), dim=1).indices
        votes = votes + torch.zeros_like(cosines).scatter_(1, near, 1.0)
    apart = 1 - (votes * (votes - 1)).sum(1).double() / (count * len(runs) * (len(runs) - 1))
    scorer = EnsembleScorer(runs[0], runs[1:], draws)
    return {"ensemble": scorer.scores(images).uncertainty, "ensemble at the means": apart}


def overlap_of_draws(run: Run) -> float:
    """Mean Jaccard overlap of the nearest reference images between two draws, as `--method posthoc` sets it."""
    images = ReferenceSet(run).images
    return Neighbourhoods(run.encoder, images[spread(len(images), IMAGES)], run.config.seed).overlap()


# ------------------------------------------------------------------------------------------------------------ intervals


def resampled_aurocs(score: Tensor, positive: Tensor) -> Tensor:
    """(resamples,): the AUROC of each resample of the images, the same resamples for every score."""
    found = []
    for counts in resampled_counts(len(score), RESAMPLES):
        ranks = midranks(score, counts)
        ups = (counts * positive).sum(1)
        downs = counts.sum(1) - ups
        above = (ranks * counts * positive).sum(1) - ups * (ups + 1) / 2
        found.append(above / (ups * downs))
    return torch.cat(found)


def interval(score: Tensor, positive: Tensor) -> dict[str, float]:
    around = resampled_aurocs(score, positive)
    return {"auroc": auroc(score, positive), **_bounds(around)}


def difference(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor]) -> dict[str, float]:
    """AUROC of one score less that of another, each with its own positives, on the same images."""
    around = resampled_aurocs(*a) - resampled_aurocs(*b)
    return {"difference": auroc(*a) - auroc(*b), **_bounds(around)}


def _bounds(values: Tensor) -> dict[str, float]:
    low, high = values.quantile(torch.tensor([0.025, 0.975], dtype=values.dtype)).tolist()
    return {"low": low, "high": high}


def apart(inside: Tensor, outside: Tensor) -> float:
    return auroc(torch.cat([inside, outside]), torch.arange(len(inside) + len(outside)) >= len(inside))


# ------------------------------------------------------------------------------------------------------------- commands


def best_knn(rows: Mapping[str, Mapping[str, float]]) -> str:
    return max((name for name in rows if "kNN" in name), key=lambda name: rows[name]["auroc"])


def print_measures(found: Mapping[str, object], per_image: Mapping[str, Tensor]) -> None:
    rows: Mapping[str, Mapping[str, float]] = found[ERRORS]  # type: ignore[assignment]
    wrong = per_image["wrong"].bool()
    overlap = "" if found["overlap"] is None else f", overlap of draws {found['overlap']:.2f}"
    print(f"{found['run']} on {found['data']}: {found['images']} test images, probe {100 * found['top1']:.1f}{overlap}")  # type: ignore[operator]
    others = [key for key in found if key.startswith(("ood.", "noise."))]
    best = best_knn(rows)
    print(f"| score | misclassification AUROC | less {best} | {' | '.join(others)} |")
    print("|---" * (3 + len(others)) + "|")
    for name in sorted(rows, key=lambda name: -rows[name]["auroc"]):
        d = difference((per_image[name], wrong), (per_image[best], wrong))
        cells = [f"{found[key][name]:.2f}" if name in found[key] else "" for key in others]  # type: ignore[index, operator]
        row = rows[name]
        print(
            f"| {name} | {row['auroc']:.3f} [{row['low']:.3f}, {row['high']:.3f}] | "
            f"{d['difference']:+.3f} [{d['low']:+.3f}, {d['high']:+.3f}] | {' | '.join(cells)} |"
        )


def compare(first: Path, second: Path, names: Sequence[str]) -> None:
    a, b = (load_file(path.with_suffix(".safetensors")) for path in (first, second))
    tops = [json.loads(path.read_text())["top1"] for path in (first, second)]
    apart_ = a["wrong"] - b["wrong"]
    error = float(apart_.std()) / len(apart_) ** 0.5
    points = -100 * float(apart_.mean())
    print(f"top-1 {100 * tops[0]:.1f} less {100 * tops[1]:.1f}: {points:+.2f} +- {196 * error:.2f} points")
    for name in names:
        d = difference((a[name], a["wrong"].bool()), (b[name], b["wrong"].bool()))
        print(f"AUROC of {name}: {d['difference']:+.3f} [{d['low']:+.3f}, {d['high']:+.3f}]")


def pets(data: Path, out: Path) -> None:
    """Oxford-IIIT Pet's official split as class folders of links."""
    if out.exists():
        raise BadInput(f"{out} exists already: choose another --out.")
    root = data / "oxford-iiit-pet-128"
    for split, listing in (("train", "trainval"), ("test", "test")):
        for line in (root / "annotations" / f"{listing}.txt").read_text().splitlines():
            name = line.split()[0]
            link = out / split / name.rpartition("_")[0] / f"{name}.jpg"
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to((root / "images" / f"{name}.jpg").resolve())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    made = commands.add_parser("pets")
    made.add_argument("--data", type=Path, required=True)
    made.add_argument("--out", type=Path, required=True)
    measured = commands.add_parser("measure")
    measured.add_argument("--run", type=Path, required=True)
    measured.add_argument("--data")
    measured.add_argument("--ood", nargs="*", default=[])
    measured.add_argument("--ensemble", nargs="*", type=Path, default=[])
    measured.add_argument("--images", type=int, default=5000)
    measured.add_argument("--draws", type=int, default=8)
    measured.add_argument("--only", nargs="*", choices=list(CANDIDATES), help="candidates; unset: all of them")
    measured.add_argument("--loss", action="store_true", help="also scores from the image's own BYOL loss (slow)")
    measured.add_argument("--severities", nargs="*", type=int, default=SEVERITIES, help="of Gaussian noise")
    measured.add_argument("--out", type=Path, required=True)
    compared = commands.add_parser("compare")
    compared.add_argument("files", nargs=2, type=Path)
    compared.add_argument("--scores", nargs="*", default=["uncertainty", "consistency"])
    options = parser.parse_args()
    try:
        if options.command == "pets":
            pets(options.data, options.out)
        elif options.command == "compare":
            compare(*options.files, options.scores)
        else:
            run = load(options.run)
            found = evaluate_scores(
                run,
                options.data or run.config.data,
                options.ood,
                [load(path) for path in options.ensemble],
                options.images,
                options.draws,
                options.only,
                options.loss,
                options.severities,
            )
            per_image: dict[str, Tensor] = found.pop("per_image")  # type: ignore[assignment]
            write_json(options.out, found)
            save_file({k: v.clone() for k, v in per_image.items()}, options.out.with_suffix(".safetensors"))
            print_measures(found, per_image)
    except BadInput as error:
        sys.exit(f"scores.py: {error}")


if __name__ == "__main__":
    main()
