"""Growing noise: whether the label-free scores rise with the noise in the images, as they should."""

from __future__ import annotations

import torch

from byov._core.callbacks import Progress
from byov.data.shifts import SEVERITIES, shifted
from byov.data.sources import open_source
from byov.inference.inputs import at_side, spread
from byov.inference.load import Run
from byov.metrics import auroc
from byov.scoring.scorer import candidate_scores

NOISE = "gaussian_noise"
IMAGES = 1000  # of the test images: an AUROC of .8 is then known to .01


def noise_measures(
    run: Run, draws: int, progress: Progress = lambda what, done, total: None
) -> dict[str, dict[str, float]]:
    """For each score and severity, the AUROC of noisy against clean images, and the mean score over the clean mean.

    Images are those of the test split of the run's own source; the noise is the same for every run.
    """
    source = open_source(run.config.data, run.config.image_size)
    images = source.load(source.default).images
    ids = spread(len(images), IMAGES)
    clean = at_side(images[ids], run.image_shape[-1])
    before = candidate_scores(run, clean, draws, progress=progress)
    found: dict[str, dict[str, float]] = {name: {} for name in before}
    for severity in SEVERITIES:
        after = candidate_scores(run, shifted(clean, ids, NOISE, severity, seed=0), draws, progress=progress)
        for name, scores in after.items():
            both, noisy = torch.cat([before[name], scores]), torch.arange(2 * len(ids)) >= len(ids)
            found[name][f"auroc.{severity}"] = float(auroc(both, noisy))
            found[name][f"mean.{severity}"] = float(scores.mean() / before[name].mean())
    return found
