"""Is the self-supervised posterior uncertain about the same images as a supervised one? (the paper's Figure 1b)

Compares the predictive std of each image under BYOV (aligned draws, classified by the probe) with that under supervised
Bayes by Backprop (the whole classifier at its own draws). Two models that are both uncertain about hard images agree
too, so the partial correlation removes the confidence of both. The agreement of two seeds of the supervised model is
the most that can be expected: the ceiling.

    results = align(byov.load("runs/byov"), byov.load("runs/bbb"), byov.load("runs/bbb-seed-1"))
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

import torch
from scipy.stats import gaussian_kde
from torch import Tensor, nn

from byov._core.cache import digest
from byov._core.callbacks import Progress, Say, say_on_stderr
from byov._core.errors import BadInput
from byov._core.files import write_json
from byov.config import absolute_source, same_source
from byov.evaluation.measures import strict
from byov.evaluation.predictive import Advance, Drawn, over_draws, predict_classes
from byov.evaluation.probe import Labelled, fit_probe, load_labelled, of_source
from byov.inference.inputs import at_side, in_channels, spread
from byov.inference.run import ReferenceSet, Run, at_draw, before_draws, features_of, has_trunk
from byov.metrics import (
    Estimate,
    GaussianFit,
    Predictive,
    bootstrap,
    gaussian_fit,
    partial_pearson,
    partial_spearman,
    pearson,
    spearman,
)
from byov.posterior import Posterior
from byov.runs.folder import RunFolder

DRAWS = 50  # the paper took 1,000, and saw the std over draws converge by 50
RESAMPLES = 1000  # of the bootstrap: an end of an interval is then known to 4% of its distance from the value
GRID = 48  # points a side at which the density is evaluated


# ------------------------------------------------------------------------------------------------- two scores of images


class Alignment(NamedTuple):
    """How the predictive std of two models correlates over the same images."""

    pearson: Estimate
    spearman: Estimate
    partial_pearson: Estimate
    """The correlation given the confidence of both."""
    partial_spearman: Estimate
    gaussian: GaussianFit
    """The joint Gaussian, with the effect sizes of its misfit: `ks_distance`, `skewness`."""


class Density(NamedTuple):
    """A kernel density estimate on a grid."""

    x: Tensor
    """(points,)."""
    y: Tensor
    """(points,)."""
    values: Tensor
    """(points, points): at [i, j] the density at (x[j], y[i])."""


def alignment(
    predictive_std_a: Tensor,
    predictive_std_b: Tensor,
    confidence_a: Tensor,
    confidence_b: Tensor,
    *,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> Alignment:
    """Correlate two models' scores (images,), with 95% intervals over images, and fit a joint Gaussian."""
    plain = (predictive_std_a, predictive_std_b)
    estimate = partial(bootstrap, resamples=resamples, seed=seed)
    return Alignment(
        pearson=estimate(pearson, *plain),
        spearman=estimate(spearman, *plain),
        partial_pearson=estimate(partial(given_both, partial_pearson), *plain, confidence_a, confidence_b),
        partial_spearman=estimate(partial(given_both, partial_spearman), *plain, confidence_a, confidence_b),
        gaussian=gaussian_fit(*plain),
    )


def given_both(
    statistic: Any, x: Tensor, y: Tensor, first: Tensor, second: Tensor, weights: Tensor | None = None
) -> Tensor:
    """Compute a partial correlation given two variables, by Yule's recursion from `statistic`, which takes one.

    A second variable that is a function of the first explains nothing more.
    """
    xy, xs, ys = (statistic(a, b, first, weights) for a, b in ((x, y), (x, second), (y, second)))
    xs, ys = xs.nan_to_num(0), ys.nan_to_num(0)
    left: Tensor = (xy - xs * ys) / ((1 - xs.square()) * (1 - ys.square())).sqrt()
    return left.clamp(-1, 1)


def density(x: Tensor, y: Tensor, points: int = GRID) -> Density:
    """Estimate the density of two variables on a grid from least to largest value (Gaussian kernel, Scott's rule)."""
    across, up = (torch.linspace(float(v.min()), float(v.max()), points, dtype=torch.float64) for v in (x, y))
    rows, columns = torch.meshgrid(up, across, indexing="ij")
    found = gaussian_kde(torch.stack([x, y]).double().numpy())(torch.stack([columns.flatten(), rows.flatten()]).numpy())
    return Density(across, up, torch.from_numpy(found).view(points, points))


# ---------------------------------------------------------------------------------------------------- two or three runs


def align(
    run: Run,
    supervised: Run,
    ceiling: Run | None = None,
    data: str | None = None,
    draws: int = DRAWS,
    *,
    most: int | None = None,
    predictions: Drawn | None = None,
    resamples: int = RESAMPLES,
    progress: Progress = lambda what, done, total: None,
    say: Say = say_on_stderr,
) -> dict[str, Any]:
    """Compare a run's uncertainty with that of a supervised-bbb run on test images; write `results/alignment.json`.

    For another source than the run's own, the file is `alignment-SOURCE.json`.

    Args:
        run: Its posterior is measured with a probe on the training images of `data`.
        supervised: A supervised-bbb run that was trained on `data`.
        ceiling: A second one with another seed: `ceiling.*` is the agreement of the two, `second.*` the run's with it.
        data: A source with labels; None: the run's own.
        draws: Per run. The std of K draws has a relative error of 1 / sqrt(2 (K - 1)): too few hide agreement.
        most: Test images at most, spread evenly over all; None: all of them.
        predictions: What `predict_classes` gave for the run and these test images, if known already.
        resamples: Of the bootstrap.
        progress: Called with the step and its progress.
        say: Called with a sentence for the user.
    """
    data = absolute_source(data or run.config.data)
    check(run, supervised, ceiling, data, draws)
    labelled = load_labelled(run, data, progress, say)
    if most is not None:
        labelled = replace(labelled, test=labelled.test.subset(spread(len(labelled.test), most)))
    predictions = predictions or _predictions(run, labelled, draws, progress)
    images = labelled.test.images
    if len(predictions.aligned.mean) != len(images):
        raise ValueError(f"the predictions are of {len(predictions.aligned.mean)} images, {data} has {len(images)}.")
    models = {"run": predictions.aligned, "supervised": predict_supervised(supervised, images, draws, progress)}
    if ceiling is not None:
        models["second"] = predict_supervised(ceiling, images, draws, progress)
    results = _compare_all(predictions, models, resamples)
    for name, model in models.items():
        results[f"{name}.top1"] = float((model.mean.argmax(1) == labelled.test_labels).double().mean())
        results[f"{name}.mean_predictive_std"] = float(model.predictive_std.mean())
    runs = {"run": run, "supervised": supervised, "second": ceiling}
    results["settings"] = {
        "runs": {
            name: {"folder": str(one.folder), "seed": one.config.seed, "step": one.step}
            for name, one in runs.items()
            if one is not None
        },
        "data": data,
        "images": len(images),
        "draws": {name: model.draws for name, model in models.items()},
        "predictive_std": "over draws, of the probability of the class that the mean over draws predicts",
        "partial": "given the confidence of both models, the highest mean probability over draws",
        "intervals": f"95%, percentile bootstrap over images, {resamples} resamples",
    }
    results = dict(strict(results))
    if run.processes.main:
        write_json(alignment_path(run, data), results)
    return results


def alignment_path(run: Run, data: str) -> Path:
    return RunFolder(run.folder).results / f"alignment{of_source(run, data)}.json"


def predict_supervised(
    run: Run, images: Tensor, draws: int, progress: Progress = lambda what, done, total: None
) -> Predictive:
    """Predict classes by the whole classifier of a supervised-bbb run over its draws, in memory flat in the draws.

    Stopped work resumes in the next call with the same run and images.
    """
    images, _ = in_channels(run, images)
    run.check(images)
    images = at_side(images, run.image_shape[-1])
    reference, network = ReferenceSet(run), run.learner.posterior
    images, after_trunk = before_draws(run.encoder, images, run.image_shape[-1]), has_trunk(run.encoder)
    what = f"passing {len(images):,} images through {draws} draws of {run.folder}"

    def take(found: dict[str, Predictive], k: int, advance: Advance) -> None:
        with at_draw(network, run.config.seed, k):
            logits = features_of(_Logits(network, after_trunk), images, advance=advance)
        found["all"].update(logits.double().softmax(1))

    def report(_: str, done: int, total: int) -> None:
        progress(what, done, total)

    start = {"all": Predictive(len(images), run.classes or 0)}
    return over_draws(reference, draws, start, take, len(images), f"supervised-{digest(images)}", report)["all"]


class _Logits(nn.Module):
    """Returns only a classifier's second output, of images or of what frozen stages made of them."""

    def __init__(self, network: Posterior, after_trunk: bool) -> None:
        super().__init__()
        self.network, self.after_trunk = network, after_trunk
        self.training = network.training  # `features_of` restores it

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = (self.network(images, True) if self.after_trunk else self.network(images))[1]
        return logits


def _predictions(run: Run, data: Labelled, draws: int, progress: Progress) -> Drawn:
    probe = fit_probe(run.features(data.train.images), data.train_labels, classes=data.classes)
    return predict_classes(ReferenceSet(run), probe, data.test.images, draws, resumable=True, progress=progress)


def check(run: Run, supervised: Run, ceiling: Run | None, data: str, draws: int) -> None:
    """Raise BadInput if these runs cannot be compared, before anything is computed."""
    if draws < 2:
        raise BadInput(f"a standard deviation over draws needs at least 2 of them, not {draws}: give more --draws.")
    others = [supervised] if ceiling is None else [supervised, ceiling]
    for other in others:
        if other.config.method != "supervised-bbb":
            raise BadInput(
                f"{other.folder} is a {other.config.method} run: align with one that was trained with --method "
                "supervised-bbb."
            )
        if not same_source(other.config.data, data):
            raise BadInput(
                f"{other.folder} was trained on {other.config.data}, not on {data}: align with a run that was, or give "
                f"--data {other.config.data}."
            )
    for one in (run, *others):
        if one.learner.posterior.means.numel() == 0 or one.encoder.means.numel() == 0:
            raise BadInput(f"{one.folder} has nothing random in its encoder, so no draws: align a run that has.")
    if ceiling is not None and ceiling.config.seed == supervised.config.seed:
        raise BadInput(
            f"{supervised.folder} and {ceiling.folder} have the same seed, {ceiling.config.seed}: the ceiling is how "
            "far two seeds agree, so train one of them again with another --seed."
        )


# ----------------------------------------------------------------------------------------------------------- the record


def _compare_all(predictions: Drawn, models: dict[str, Predictive], resamples: int) -> dict[str, Any]:
    """Compare all pairs of models, as flat keys, and add the points of a scatter plot."""
    prefixes = {("run", "supervised"): "", ("run", "second"): "second.", ("supervised", "second"): "ceiling."}
    results: dict[str, Any] = {}
    for a, b in combinations(models, 2):
        results |= _compared(prefixes[a, b], models[a], models[b], resamples, picture=True)
    results |= _compared("unaligned.", predictions.unaligned, models["supervised"], resamples)
    results["scatter"] = {
        name: {"predictive_std": _short(model.predictive_std), "confidence": _short(model.mean.amax(1))}
        for name, model in models.items()
    }
    return results


def _compared(prefix: str, a: Predictive, b: Predictive, resamples: int, picture: bool = False) -> dict[str, Any]:
    """One pair's measures under a prefix; with `picture`, also what a figure needs in addition to the points."""
    x, y = a.predictive_std, b.predictive_std
    try:
        found = alignment(x, y, a.mean.amax(1), b.mean.amax(1), resamples=resamples)
    except ValueError as error:  # of the Gaussian fit: one of the two does not vary
        raise BadInput(f"the predictive std cannot be aligned: {error} Train with a larger sigma.") from error
    results: dict[str, Any] = {}
    for name, estimate in found._asdict().items():
        if isinstance(estimate, Estimate):
            results |= {f"{prefix}{name}": estimate.value, f"{prefix}{name}_interval": [estimate.low, estimate.high]}
    fit = found.gaussian
    results |= {f"{prefix}ks_distance": fit.ks_distance, f"{prefix}skewness": fit.skewness}
    if picture:
        results[f"{prefix}gaussian"] = {"mean": fit.mean.tolist(), "covariance": fit.covariance.tolist()}
        of = density(x, y)
        results[f"{prefix}density"] = {"x": _short(of.x), "y": _short(of.y), "values": [_short(r) for r in of.values]}
    return results


def _short(values: Tensor) -> list[float]:
    """Round to six digits, enough for a figure."""
    return [float(f"{value:.6g}") for value in values.tolist()]
