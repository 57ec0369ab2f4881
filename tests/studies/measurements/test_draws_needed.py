"""Each draw's own predictions are those that the streaming predictive averages."""

from pathlib import Path

import torch

import handmade
from byov.evaluation.predictive import predict_classes
from byov.evaluation.probe import fit_probe
from byov.inference.reference import ReferenceSet
from byov.studies.measurements.draws_needed import probabilities_of_draws


def test_the_mean_over_draws_is_the_streaming_mean(tmp_path: Path) -> None:
    run = handmade.run(tmp_path, handmade.Affine(4), sigma=0.2)
    images = handmade.images(40, seed=3)
    probe = fit_probe(run.features(images), torch.arange(40) % 3)
    found = probabilities_of_draws(ReferenceSet(run), probe, images, draws=5)
    assert found.shape == (5, 40, 3) and float(found.std(dim=0).mean()) > 0
    expected = predict_classes(ReferenceSet(run), probe, images, draws=5).aligned
    assert torch.allclose(found.double().mean(0), expected.mean, atol=1e-6)
