"""What decides whether a temperature works: accuracy at the means and of draws, and how far the weights spread."""

from __future__ import annotations

from typing import Any

import torch

from byov.data.sources import open_source
from byov.errors import BadInput
from byov.evaluation.features import features_of
from byov.evaluation.predictive import predict_classes
from byov.evaluation.probe import fit_probe
from byov.evaluation.reference import Bank
from byov.evaluation.run import Run
from byov.evaluation.score import is_deterministic
from byov.metrics import brier, ece, nll, spearman, top_k_accuracy
from byov.training.loop import subset

RANKED = 200_000  # weights that are enough for a rank correlation: its error is below .003


def working_measures(run: Run, draws: int) -> dict[str, Any]:
    """A probe at the means, the same probe over aligned and unaligned draws, and the spread of the weights."""
    source, side = open_source(run.config.data, run.config.image_size), run.image_shape[-1]
    train, test = source.load("train"), source.load("test")
    train = subset(train, run.config.images or len(train))
    if train.labels is None or test.labels is None:
        raise BadInput(f"{run.config.data} has no labels to probe with: give a source that has.")
    probe = fit_probe(features_of(run.encoder, train.images, size=side), train.labels)
    probabilities = {"": probe.probabilities(features_of(run.encoder, test.images, size=side))}
    found: dict[str, Any] = dict(weight_spread(run))
    if not is_deterministic(run):
        aligned, unaligned = predict_classes(Bank(run), probe, test.images, draws)
        probabilities |= {"draws.": aligned.mean.float(), "draws_unaligned.": unaligned.mean.float()}
        found["draws.mutual_information"] = float(aligned.mutual_information.mean())
    for prefix, p in probabilities.items():
        found[f"{prefix}top1"] = top_k_accuracy(p, test.labels, 1)
        found |= {f"{prefix}{m.__name__}": m(p, test.labels) for m in (ece, brier, nll)}
    return found


def weight_spread(run: Run) -> dict[str, float | None]:
    """Median sigma and SNR of the random weights, and whether sigma ranks them as their magnitude does (Spearman)."""
    posterior = run.learner.posterior
    if not posterior.means.numel():
        return {"median_sigma": None, "median_snr": None, "sigma_magnitude_spearman": None}
    some = slice(None, None, max(1, posterior.means.numel() // RANKED))
    sigma, magnitude = posterior.sigma[some].cpu(), posterior.means.detach()[some].abs().cpu()
    return {
        "median_sigma": float(posterior.sigma.median()),
        "median_snr": float((magnitude / sigma.clamp(min=torch.finfo(sigma.dtype).tiny)).median()),
        "sigma_magnitude_spearman": float(spearman(sigma, magnitude)),
    }
