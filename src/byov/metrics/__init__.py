"""Pure functions of probabilities, features, scores and labels. Nothing here knows what a run or a network is.

A score of images is an uncertainty: higher means less certain. A measure that two kinds of images define (hits and
errors, say) is NaN where there is only one.
"""

from byov.metrics.accuracy import top_k_accuracy
from byov.metrics.calibration import (
    Bin,
    BrierDecomposition,
    adaptive_ece,
    brier,
    brier_decomposition,
    classwise_ece,
    ece,
    nll,
    reliability_bins,
)
from byov.metrics.correlation import Estimate, bootstrap, partial_pearson, partial_spearman, pearson, spearman
from byov.metrics.deterministic_uncertainty import energy, entropy, knn_distance, mahalanobis, max_softmax
from byov.metrics.gaussian import GaussianFit, gaussian_fit
from byov.metrics.knn import knn_accuracy
from byov.metrics.ood_detection import Ood, ood_detection
from byov.metrics.predictive_uncertainty import Predictive
from byov.metrics.ranking import auroc, average_precision, fpr_at_tpr
from byov.metrics.retrieval import r_auroc, recall_at_1, retrieval_hits
from byov.metrics.selective import (
    RiskCoverage,
    Selective,
    accuracy_at_coverage,
    aurc,
    excess_aurc,
    risk_coverage,
    selective_prediction,
)
from byov.metrics.temperature_scaling import fit_temperature

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
