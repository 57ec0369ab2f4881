"""Compare arms: every measure of every arm and seed, and its difference to a reference arm.

An arm is one setting of an experiment, trained with every seed. Arms are paired by seed and by image: the same seed
gives the same order of images and views, and the test images are the same. What both share cancels in the difference.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from byov._core.files import write_atomically
from byov.config import Config
from byov.evaluation.measures import class_measures, strict
from byov.evaluation.predictive import probe_predictions
from byov.evaluation.probe import Subject, subject_of
from byov.inference.run import Run
from byov.metrics import spearman
from byov.metrics.resampling import paired_replicates, sampling_floor
from byov.runs.folder import RunFolder, read_log
from byov.studies.framework.claims import Effect, Effects, Rows, differences, rooms, select
from byov.studies.framework.lab import Lab
from byov.studies.framework.replicates import errors_and_replicates

MEASURES = ("top1", "top5", "ece", "brier", "reliability", "resolution", "nll")
MEANS = "means"
PLACES = (MEANS, "draws", "draws_unaligned")  # in the order of rows, which a file does not keep
PRIORS = {  # with their labels in figures
    "standard": r"$N(0, I)$",
    "teacher_mean": r"$N(\mu_T, I)$",
    "teacher_moments": r"$N(\mu_T, \Sigma_T)$",
}
RANKED = 200_000  # weights are enough for a rank correlation: its error is below .003
SPIKE = math.log(2)  # twice as high: visible in a log

Arms = Mapping[str, Callable[[int], Config]]
"""The config of each arm, by seed."""


def configs_of(lab: Lab, arms: Arms) -> list[Config]:
    """List the configs of all arms and seeds."""
    return [make(seed) for seed in range(lab.seeds) for make in arms.values()]


def compare(lab: Lab, arms: Arms, reference: str, columns: Mapping[str, dict[str, Any]] | None = None) -> Rows:
    """Return a row for each seed, arm and place ("at": means, draws, draws_unaligned) with MEASURES.

    `MEASURE.difference` is to the reference arm with the same seed, at its means; `MEASURE.error` is the standard error
    of that over images, and `MEASURE.replicates` holds its resamples. `MEASURE.floor` is what sampling alone gives the
    reference. `columns` are added to the rows of an arm.
    """
    rows = []
    for seed in range(lab.seeds):
        other = predictions(lab, arms[reference](seed))
        floors = {f"{name}.floor": value for name, value in sampling_floor(other.probabilities[MEANS]).items()}
        for arm, make in arms.items():
            config = make(seed)
            sigma = lab.measured("spread", config, weight_spread, {})["median_sigma"]
            own = {"arm": arm, "seed": seed, "median_sigma": sigma, **(columns or {}).get(arm, {})}
            mine = predictions(lab, config)
            rows += [own | {"at": at, **_compared(mine, other, at), **floors} for at in mine.probabilities]
    return rows


def compare_each(
    lab: Lab, arms: Arms, comparisons: Mapping[str, list[str]], columns: Mapping[str, dict[str, Any]]
) -> Rows:
    """Run `compare` for each reference and the arms listed for it; the column `against` names the reference."""
    return [
        row | {"against": reference}
        for reference, others in comparisons.items()
        for row in compare(lab, {arm: arms[arm] for arm in (reference, *others)}, reference, columns)
    ]


def effects(rows: Rows, arm: str, measure: str, at: str = MEANS, sign: int = +1) -> list[Effect]:
    """Return an arm's difference to the reference in percentage points (NLL: hundredths of a nat), one per seed.

    Args:
        sign: -1 where the paper says that the measure falls.
    """
    return differences(rows, measure, sign, arm=arm, at=at)


def room(rows: Rows, arm: str, measure: str, at: str = MEANS, sign: int = +1) -> list[Effect]:
    """Return the largest effects that `effects` could have found."""
    return rooms(rows, measure, sign, arm=arm, at=at)


def against(reference: str, arm: str, measure: str, sign: int, at: str = MEANS) -> Effects:
    """Make the rule for an arm's difference to one of the references of `compare_each`."""
    return lambda rows: effects(select(rows, against=reference), arm, measure, at, sign)


def room_against(reference: str, arm: str, measure: str, sign: int, at: str = MEANS) -> Effects:
    """Make the rule for the largest effect that `against` could find."""
    return lambda rows: room(select(rows, against=reference), arm, measure, at, sign)


# ---------------------------------------------------------------------------------------------- predictions of one run


@dataclass(frozen=True)
class Predictions:
    """Class probabilities of a run for test images."""

    labels: Tensor
    """(images,) int64."""
    probabilities: dict[str, Tensor]
    """(images, classes) float32, at "means"; where weights are random, of "draws" and "draws_unaligned" too."""


def predictions(lab: Lab, config: Config) -> Predictions:
    """Predict the test images of a run's own source over the scale's draws, cached in the run's folder."""
    draws = lab.scale.draws
    return cached_predictions(lab, "outcomes", config, lambda run: predict(subject_of(run), draws), {"draws": draws})


def cached_predictions(
    lab: Lab, what: str, config: Config, make: Callable[[Run], Predictions], settings: dict[str, Any]
) -> Predictions:
    """Do for predictions what `Lab.measured` does for numbers."""
    path = RunFolder(lab.path(config)).results / f"{what}.safetensors"
    found = read_predictions(path, settings)
    if found is None:
        found = make(lab.run(config))
        write_predictions(path, found, settings)
    return found


def predict(subject: Subject, draws: int) -> Predictions:
    """Predict with a probe fitted at the means, as `byov evaluate` does: at the means and over draws."""
    means, over = probe_predictions(subject, draws)
    found = {MEANS: means}
    if over is not None:
        found |= {"draws": over.aligned.mean.float(), "draws_unaligned": over.unaligned.mean.float()}
    return Predictions(subject.data.test_labels, found)


def write_predictions(path: Path, found: Predictions, settings: Mapping[str, Any]) -> None:
    """Write a safetensors file, with the settings that the numbers depend on in its header."""
    tensors = {"labels": found.labels, **found.probabilities}
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    write_atomically(path, lambda temporary: save_file(tensors, temporary, metadata=_header(settings)))


def read_predictions(path: Path, settings: Mapping[str, Any]) -> Predictions | None:
    """Read what `write_predictions` wrote with the same settings; None if the file is missing, broken or different."""
    try:
        with safe_open(path, framework="pt") as file:
            if file.metadata() != _header(settings):
                return None
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError):
        return None
    return Predictions(tensors["labels"], {at: tensors[at] for at in PLACES if at in tensors})


def _header(settings: Mapping[str, Any]) -> dict[str, str]:
    return {"settings": json.dumps(settings, sort_keys=True)}


def check_same_images(one: Predictions, other: Predictions) -> None:
    """Refuse to compare runs whose test images differ."""
    if not torch.equal(one.labels, other.labels):
        raise ValueError("the runs differ in their test images: compare runs of one source, measured again.")


def measures_of(probabilities: Tensor, labels: Tensor) -> dict[str, float]:
    """Compute MEASURES, by the names and definitions of `byov evaluate`."""
    found = class_measures(probabilities, labels)
    return {name: found[name] for name in MEASURES}


def _compared(mine: Predictions, other: Predictions, at: str) -> dict[str, Any]:
    """Measures at one place, their differences to another run at its means, with errors and replicates over images."""
    check_same_images(mine, other)
    p, q = mine.probabilities[at], other.probabilities[MEANS]
    own, reference = measures_of(p, mine.labels), measures_of(q, other.labels)
    found: dict[str, Any] = dict(own) | {f"{name}.difference": own[name] - reference[name] for name in MEASURES}
    return strict(found | errors_and_replicates(paired_replicates(p, q, mine.labels)))


# --------------------------------------------------------------------------------- the posterior's spread, and training


def weight_spread(run: Run) -> dict[str, float | None]:
    """Compute the median sigma and SNR of the random weights, and the rank correlation of sigma and magnitude.

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


def gradient_spike(folder: Path) -> float | None:
    """Return the largest rise of the gradient's norm over its recent level during training, as a logarithm."""
    return largest_rise([row["grad_norm"] for row in read_log(RunFolder(folder).metrics).rows if "grad_norm" in row])


def largest_rise(values: Sequence[float], before: int = 10) -> float | None:
    """Return the largest ln(value / median of the `before` values before it): a spike at any scale and slow trend.

    None where the trace is too short, or not positive.
    """
    if len(values) <= before or min(values) <= 0:
        return None
    return max(math.log(values[i] / median(values[i - before : i])) for i in range(before, len(values)))


def with_spikes(lab: Lab, arms: Arms, rows: Rows) -> Rows:
    """Add the column `gradient_spike` to the rows of trained arms."""
    pairs = {(row["arm"], row["seed"]) for row in rows}
    spikes = {(arm, seed): gradient_spike(lab.path(arms[arm](seed))) for arm, seed in pairs}
    return [row | {"gradient_spike": spikes[row["arm"], row["seed"]]} for row in rows]


def spike_ratios(rows: Rows, arm: str, reference: str) -> list[Effect]:
    """Compare the largest gradient spikes of two arms: ln of their ratio, one effect per seed."""
    spike = {(row["arm"], row["seed"]): row["gradient_spike"] for row in rows if row["gradient_spike"] is not None}
    seeds = sorted(seed for name, seed in spike if name == arm and (reference, seed) in spike)
    return [Effect(seed, spike[arm, seed] - spike[reference, seed]) for seed in seeds]
