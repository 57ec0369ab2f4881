"""How many draws the posterior predictive needs, on clean and on shifted test images (the paper's Figure 5)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from byov._core.callbacks import Progress
from byov.data.shifts import shifted
from byov.evaluation.labelled import subject_of
from byov.evaluation.named_metrics import Measures
from byov.evaluation.probe import Probe
from byov.inference.features import features_of
from byov.inference.inputs import spread
from byov.inference.load import Run
from byov.inference.reference import ReferenceSet, at_draw
from byov.metrics.over_draws import predictive_over_draws

CLEAN = "clean"
SEED = 0  # of the shifts


def convergence(
    run: Run,
    shifts: Sequence[str],
    severity: int,
    draws: int,
    images: int,
    bootstraps: int = 50,
    progress: Progress = lambda what, done, total: None,
) -> list[Measures]:
    """A row for each shift (clean images first) and each number of draws from 1 on; draws are aligned."""
    subject = subject_of(run, progress)
    chosen = spread(len(subject.data.test), images)
    clean = subject.test_images[chosen]
    seen = [clean, *(shifted(clean, chosen, name, severity, SEED) for name in shifts)]
    probabilities = probabilities_of_draws(ReferenceSet(run), subject.probe, torch.cat(seen), draws)
    parts = torch.split(probabilities, len(chosen), dim=1)
    return [
        {"shift": name, **row._asdict()}
        for name, part in zip((CLEAN, *shifts), parts, strict=True)
        for row in predictive_over_draws(part, range(1, draws + 1), bootstraps, run.config.seed)
    ]


def probabilities_of_draws(bank: ReferenceSet, probe: Probe, images: Tensor, draws: int) -> Tensor:
    """What the probe makes of each aligned draw, (draws, images, classes): all of it in memory, so for few images."""
    run, found = bank.run, []
    for k in range(draws):
        with at_draw(run.encoder, run.config.seed, k):
            features = features_of(run.encoder, images)
        found.append(probe.probabilities(bank.aligned(features, k)))
    return torch.stack(found)
