"""Pure functions of probabilities, features and labels. Nothing here knows what a run or a network is."""

from byov.metrics.accuracy import top_k_accuracy
from byov.metrics.calibration import (
    Bin,
    BrierDecomposition,
    brier,
    brier_decomposition,
    ece,
    nll,
    reliability_bins,
)
from byov.metrics.knn import knn_accuracy

__all__ = [
    "Bin",
    "BrierDecomposition",
    "brier",
    "brier_decomposition",
    "ece",
    "knn_accuracy",
    "nll",
    "reliability_bins",
    "top_k_accuracy",
]
