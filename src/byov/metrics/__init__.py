"""Pure functions of probabilities, features, scores and labels, independent of runs and networks.

Scores of images are uncertainties: higher means less certain. A measure of two kinds of images, such as errors and
correct predictions, is NaN if there is only one kind.
"""

from byov.metrics.classification import (
    Bin,
    BrierDecomposition,
    adaptive_ece,
    brier,
    brier_decomposition,
    classwise_ece,
    ece,
    fit_temperature,
    nll,
    reliability_bins,
    top_k_accuracy,
)
from byov.metrics.correlation import (
    GaussianFit,
    gaussian_fit,
    partial_pearson,
    partial_spearman,
    pearson,
    spearman,
)
from byov.metrics.over_draws import Predictive
from byov.metrics.ranking import (
    Ood,
    RiskCoverage,
    Selective,
    accuracy_at_coverage,
    aurc,
    auroc,
    average_precision,
    excess_aurc,
    fpr_at_tpr,
    ood_detection,
    risk_coverage,
    selective_prediction,
)
from byov.metrics.representation import knn_accuracy, r_auroc, recall_at_1, retrieval_hits
from byov.metrics.resampling import Estimate, bootstrap
from byov.metrics.uncertainty import energy, entropy, knn_distance, mahalanobis, max_softmax

__all__ = [
    "Bin",
    "BrierDecomposition",
    "Estimate",
    "GaussianFit",
    "Ood",
    "Predictive",
    "RiskCoverage",
    "Selective",
    "accuracy_at_coverage",
    "adaptive_ece",
    "aurc",
    "auroc",
    "average_precision",
    "bootstrap",
    "brier",
    "brier_decomposition",
    "classwise_ece",
    "ece",
    "energy",
    "entropy",
    "excess_aurc",
    "fit_temperature",
    "fpr_at_tpr",
    "gaussian_fit",
    "knn_accuracy",
    "knn_distance",
    "mahalanobis",
    "max_softmax",
    "nll",
    "ood_detection",
    "partial_pearson",
    "partial_spearman",
    "pearson",
    "r_auroc",
    "recall_at_1",
    "reliability_bins",
    "retrieval_hits",
    "risk_coverage",
    "selective_prediction",
    "spearman",
    "top_k_accuracy",
]
