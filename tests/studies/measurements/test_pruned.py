"""How near weights are to their start, and the room of pruning."""

from __future__ import annotations

import pytest
import torch

from byov.pruning.criteria import prunable_weights
from byov.studies.framework.lab import Lab
from byov.studies.measurements.pruned import correlation_by_layer, room_above, start_caveats, start_of
from byov.training.learners import build_learner


def test_the_correlation_is_within_layers() -> None:
    """Layers of very different scales would correlate by that alone."""
    g = torch.Generator().manual_seed(0)
    small, large = torch.randn(2, 40, 25, generator=g)
    before = {"a": small, "b": 100 * large}
    assert correlation_by_layer(before, before) == pytest.approx(1)
    after = {"a": torch.randn(40, 25, generator=g), "b": 100 * torch.randn(40, 25, generator=g)}
    assert abs(correlation_by_layer(after, before)) < 0.1
    assert correlation_by_layer({"a": small, "b": after["b"]}, before) == pytest.approx(0.5, abs=0.05)


def test_an_untrained_network_is_at_its_start(lab: Lab) -> None:
    run = lab.run(lab.config("byov"))
    found = start_of(run)
    assert 0.5 < found["start_correlation"] < 1 and found["random_start"]
    fresh = prunable_weights(build_learner(run.config, run.image_shape, run.classes).posterior)
    assert correlation_by_layer(fresh, fresh) == pytest.approx(1)


def test_a_reader_is_told_when_the_ranking_is_still_that_of_the_start() -> None:
    rows = [{"start_correlation": r, "random_start": True} for r in (0.9, 0.96)]
    assert start_caveats(rows) == ["the weights' correlation with their random start is 0.93: they have hardly left it"]
    assert start_caveats([r | {"random_start": False} for r in rows])[0].endswith("pretrained start is 0.93")
    assert start_caveats([r | {"start_correlation": 0.2} for r in rows])[0].endswith("is 0.20")
    assert "not measured" in start_caveats([{"seed": 0}])[0] and start_caveats([]) == []


def test_the_room_is_up_to_the_unpruned_encoder() -> None:
    pruned = [{"seed": 0, "top1": 0.6}, {"seed": 0, "top1": 0.5}, {"seed": 1, "top1": 0.8}]
    found = room_above(pruned, [{"seed": 0, "top1": 0.9}, {"seed": 1, "top1": 0.9}])
    assert {effect.seed: effect.value for effect in found} == pytest.approx({0: 40, 1: 10})
