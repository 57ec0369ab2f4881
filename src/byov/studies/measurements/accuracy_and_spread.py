"""What decides whether a temperature works: accuracy at the means and of draws, and how far the weights spread."""

from __future__ import annotations

from typing import Any

from byov.data.images import ImageSet
from byov.evaluation.feature_quality import held_out
from byov.evaluation.labelled import load_labelled
from byov.evaluation.named_metrics import below
from byov.evaluation.predictive import predict_classes
from byov.evaluation.probe import fit_probe
from byov.inference.features import features_of
from byov.inference.load import Run
from byov.inference.reference import ReferenceSet
from byov.metrics import brier, ece, nll, spearman, top_k_accuracy
from byov.scoring.scorer import is_deterministic

RANKED = 200_000  # weights that are enough for a rank correlation: its error is below .003


def working_measures(run: Run, draws: int) -> dict[str, Any]:
    """A probe at the means, the same probe over aligned and unaligned draws, and the spread of the weights.

    Under `validation.` the probe knows four fifths of the training labels and is asked for the rest: to choose by. The
    other keys are of the test images: to report.
    """
    data = load_labelled(run, run.config.data, lambda what, done, total: None)
    held = held_out(data.train_labels)
    kept, asked = data.train.subset((~held).nonzero()[:, 0]), data.train.subset(held.nonzero()[:, 0])
    validation = _asked(run, kept, asked, draws)
    return weight_spread(run) | below("validation.", validation) | _asked(run, data.train, data.test, draws)


def _asked(run: Run, known: ImageSet, asked: ImageSet, draws: int) -> dict[str, Any]:
    """What a probe fitted on some images says of others."""
    assert known.labels is not None and asked.labels is not None
    side, found = run.image_shape[-1], {}
    probe = fit_probe(features_of(run.encoder, known.images, size=side), known.labels)
    probabilities = {"": probe.probabilities(features_of(run.encoder, asked.images, size=side))}
    if not is_deterministic(run):
        aligned, unaligned = predict_classes(ReferenceSet(run), probe, asked.images, draws)
        probabilities |= {"draws.": aligned.mean.float(), "draws_unaligned.": unaligned.mean.float()}
        found["draws.mutual_information"] = float(aligned.mutual_information.mean())
    for prefix, p in probabilities.items():
        found[f"{prefix}top1"] = top_k_accuracy(p, asked.labels, 1)
        found |= {f"{prefix}{m.__name__}": m(p, asked.labels) for m in (ece, brier, nll)}
    return found


def weight_spread(run: Run) -> dict[str, float | None]:
    """Median sigma and SNR of the random weights, and whether sigma ranks them as their magnitude does (Spearman).

    Pruned weights, which have neither, are left out.
    """
    posterior = run.learner.posterior
    sigmas, magnitudes = posterior.sigma.cpu(), posterior.means.detach().abs().cpu()
    sigmas, magnitudes = sigmas[sigmas > 0], magnitudes[sigmas > 0]
    if not len(sigmas):
        return {"median_sigma": None, "median_snr": None, "sigma_magnitude_spearman": None}
    some = slice(None, None, max(1, len(sigmas) // RANKED))
    sigma, magnitude = sigmas[some], magnitudes[some]
    return {
        "median_sigma": float(sigmas.median()),
        "median_snr": float((magnitude / sigma).median()),
        "sigma_magnitude_spearman": float(spearman(sigma, magnitude)),
    }
