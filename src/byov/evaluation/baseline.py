"""Compare a run with another (`--baseline`): the difference of every number that both have, some paired by image."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor

from byov.evaluation.measures import Measures
from byov.metrics import bootstrap

NOT_COMPARED = ("settings", "untrained.", "pixels.", "baseline.", "probe_")  # not measures of the run
PAIRED = ("means.", "draws.")  # prefixes of rows per image; in the results, those at the means have no prefix

# Names of results that depend on the number of draws; some label-free scores are computed at the means.
DRAWN = re.compile(r"(^|\.)(draws|levels|label_free_(?!knn|kth_cosine|mahalanobis_at_means))")

T = TypeVar("T")


def without_draws(found: Mapping[str, T]) -> dict[str, T]:
    """Select the results, or the rows of images, that do not depend on draws."""
    return {name: value for name, value in found.items() if not DRAWN.search(name)}


def differences(own: Mapping[str, Any], other: Mapping[str, Any], still: bool) -> Measures:
    """Compute `baseline.KEY`: this run's number minus the other's, for every number that both have.

    `still`: the other run is deterministic, so its means stand in for draws.
    """
    other = {_drawn(key): value for key, value in other.items() if still} | dict(other)
    both = [key for key in own if key in other and not key.startswith(NOT_COMPARED)]
    return {f"baseline.{key}": own[key] - other[key] for key in both if _number(own[key]) and _number(other[key])}


def _drawn(key: str) -> str:
    """The key of the draws that the means at this key stand in for."""
    shifted, at_means, measure = key.partition(".at_means.")
    return f"{shifted}.draws.{measure}" if at_means else f"draws.{key}"


def _number(value: Any) -> bool:
    return isinstance(value, float)  # not a count


def intervals(own: Mapping[str, Tensor], other: Mapping[str, Tensor], still: bool) -> Measures:
    """Compute `baseline.KEY_interval`: the 95% bootstrap interval of the mean difference over images."""
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
