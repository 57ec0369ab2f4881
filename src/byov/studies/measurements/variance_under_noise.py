"""Variance over draws after encoder, projector and predictor under growing Gaussian noise (the paper's Figure 7)."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from itertools import combinations

import torch
from torch import Tensor

from byov._core.randomness import uniforms
from byov.data.shifts import gaussian_noise
from byov.data.sources import open_source
from byov.evaluation.predictive import Level, predict_levels
from byov.inference.inputs import at_side, spread
from byov.inference.load import Run
from byov.inference.reference import ReferenceSet
from byov.metrics import pearson, spearman
from byov.metrics.resampling import standard_errors

# Standard deviations, black to white being 1. The shifts' own end at .1 for small images; here the noise goes on until
# nothing of the image is left, as the paper's does.
STRENGTHS = (0.0, 0.05, 0.1, 0.2, 0.4, 0.8)

Variances = Mapping[str, Tensor]
"""By level: the variance over draws of each noisy image, averaged over outputs, (strengths, images)."""


def noisy_variances(run: Run, draws: int, images: int) -> dict[str, dict[str, Tensor]]:
    """`Variances` of some test images, "raw" and "aligned". An image has the same noise at all strengths, only more."""
    source = open_source(run.config.data, run.config.image_size)
    pixels = source.load(source.default).images
    ids = spread(len(pixels), images)
    clean = at_side(pixels[ids], run.image_shape[-1])
    noise = partial(uniforms, ids)
    seen = [gaussian_noise(clean, strength, noise) for strength in STRENGTHS]
    levels = predict_levels(ReferenceSet(run), torch.cat(seen), draws)
    return {
        kind: {name: getattr(level, kind).variance.mean(1).view(len(seen), -1) for name, level in levels.items()}
        for kind in Level._fields
    }


def noise_statistics(variances: Variances, resamples: int = 500) -> dict[str, float]:
    """How the levels go together and what noise does to them; `NAME.error` are standard errors over images.

    - `pearson`, `spearman`: over all points, the least of the pairs of levels; `A_B.` is a pair's own.
    - `clean_spearman`: the least among the images without noise, which alone could make all levels rise together.
    - `growth`: of the variance's mean over images from no noise to the strongest, as a part; the least of the levels.
    - `shrinkage`: of its standard deviation over images, the same.
    """
    images = next(iter(variances.values())).shape[1]
    values = _statistics(variances, torch.ones(1, images, dtype=torch.float64))
    errors = standard_errors(partial(_statistics, variances), images, resamples)
    found = {name: float(value) for name, value in values.items()}
    return found | {f"{name}.error": error for name, error in errors.items()}


def _statistics(variances: Variances, counts: Tensor) -> dict[str, Tensor]:
    """All of them for counts (resamples, images): an image is taken with all its noise."""
    found: dict[str, Tensor] = {}
    everywhere = counts.repeat(1, len(STRENGTHS))
    pairs = {f"{a}_{b}": (variances[a], variances[b]) for a, b in combinations(variances, 2)}
    for name, (a, b) in pairs.items():
        found[f"{name}.pearson"] = pearson(a.flatten(), b.flatten(), everywhere)
        found[f"{name}.spearman"] = spearman(a.flatten(), b.flatten(), everywhere)
        found[f"{name}.clean_spearman"] = spearman(a[0], b[0], counts)
    for name, level in variances.items():
        (first, first_std), (last, last_std) = (_moments(level[i], counts) for i in (0, -1))
        found |= {f"{name}.growth": last / first - 1, f"{name}.shrinkage": 1 - last_std / first_std}
    for name in ("pearson", "spearman", "clean_spearman", "growth", "shrinkage"):
        found[name] = torch.stack([v for key, v in found.items() if key.endswith(f".{name}")]).amin(0)
    return found


def _moments(values: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation over images."""
    total = counts.sum(1)
    mean = counts @ values / total
    return mean, ((counts * (values - mean[:, None]).square()).sum(1) / total).sqrt()
