"""A run beside another (`--baseline`): the difference of every number that both have, some paired by image."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor

from byov.evaluation.named_metrics import Measures
from byov.metrics import bootstrap

NOT_COMPARED = ("settings", "untrained.", "pixels.", "baseline.", "probe_")  # what is no measure of the run
PAIRED = ("means.", "draws.")  # before the names of an image's rows; those at the means have no prefix in the results

# In a name, where how many draws there are makes a difference; some label-free scores are made at the means.
DRAWN = re.compile(r"(^|\.)(draws|levels|label_free_(?!knn|kth_cosine|mahalanobis_at_means))")

T = TypeVar("T")


def without_draws(found: Mapping[str, T]) -> dict[str, T]:
    """What does not hang on draws, of results or of rows of images."""
    return {name: value for name, value in found.items() if not DRAWN.search(name)}


def differences(own: Mapping[str, Any], other: Mapping[str, Any], still: bool) -> Measures:
    """`baseline.KEY`: this run's number less the other's, for every number that both have.

    `still`: the other has nothing random, so that every draw of it would be its means, and these stand in for draws.
    """
    other = {_drawn(key): value for key, value in other.items() if still} | dict(other)
    both = [key for key in own if key in other and not key.startswith(NOT_COMPARED)]
    return {f"baseline.{key}": own[key] - other[key] for key in both if _number(own[key]) and _number(other[key])}


def _drawn(key: str) -> str:
    """The key of the draws of which this one has the means."""
    shifted, at_means, measure = key.partition(".at_means.")
    return f"{shifted}.draws.{measure}" if at_means else f"draws.{key}"


def _number(value: Any) -> bool:
    return isinstance(value, float)  # not a count


def intervals(own: Mapping[str, Tensor], other: Mapping[str, Tensor], still: bool) -> Measures:
    """`baseline.KEY_interval`: 95% bootstrap interval of the mean difference over images, of top1, brier and nll."""
    other = {name.replace("means.", "draws.", 1): row for name, row in other.items() if still} | dict(other)
    found: Measures = {}
    for name in own:
        if name.startswith(PAIRED) and name in other and own[name].shape == other[name].shape:
            estimate = bootstrap(_mean, own[name] - other[name])
            found[f"baseline.{name.removeprefix('means.')}_interval"] = [estimate.low, estimate.high]
    return found


def _mean(values: Tensor, weights: Tensor | None = None) -> Tensor:
    weights = torch.ones_like(values) if weights is None else weights
    return (weights @ values) / weights.sum(-1)
