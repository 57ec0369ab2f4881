"""The names of evaluation.json against independent implementations and cases by hand."""

import json
import math

import pytest
import torch
from sklearn.metrics import average_precision_score, brier_score_loss, log_loss, roc_auc_score, top_k_accuracy_score

from byov.evaluation.measures import (
    bins_of,
    class_measures,
    errors_of,
    ood_measures,
    predictive_measures,
    selective_measures,
    strict,
)
from byov.evaluation.predictive import predictive_scores
from byov.metrics import Predictive
from byov.metrics.resampling import image_rows


@pytest.fixture
def guesses() -> tuple[torch.Tensor, torch.Tensor]:
    """Probabilities of 7 classes for 300 images that know something, and the labels."""
    g = torch.Generator().manual_seed(0)
    labels = torch.randint(7, (300,), generator=g)
    logits = torch.randn(300, 7, generator=g)
    logits[torch.arange(300), labels] += 1.5
    return logits.softmax(1), labels


def test_class_measures_agree_with_other_libraries(guesses) -> None:
    p, labels = guesses
    found = class_measures(p, labels)
    assert found["top1"] == pytest.approx(top_k_accuracy_score(labels, p, k=1))
    assert found["top5"] == pytest.approx(top_k_accuracy_score(labels, p, k=5))
    bins = bins_of(p, labels)
    assert found["ece"] == pytest.approx(sum(n * abs(conf - acc) for n, conf, acc in bins) / 300)
    exact = p.double() / p.double().sum(1, keepdim=True)
    assert found["nll"] == pytest.approx(log_loss(labels, exact, labels=range(7)), rel=1e-5)
    by_class = [brier_score_loss(labels == c, p[:, c].double()) for c in range(7)]
    assert found["brier"] == pytest.approx(sum(by_class), rel=1e-5)
    wrong = p.argmax(1) != labels
    assert found["error_auroc"] == pytest.approx(roc_auc_score(wrong, 1 - p.amax(1).double()))
    parts = found["uncertainty"] - found["resolution"] + found["reliability"] - found["within_group"]
    assert found["brier"] == pytest.approx(parts)
    assert sum(row[0] for row in bins) == 300
    assert sum(n * acc for n, _, acc in bins) == pytest.approx(300 * found["top1"])


def test_the_rows_of_images_average_to_the_measures(guesses) -> None:
    found, rows = class_measures(*guesses), image_rows(*guesses)
    for name, row in rows.items():
        assert row.shape == (300,) and float(row.mean()) == pytest.approx(found[name])


def test_selective_measures_of_each_score(guesses) -> None:
    p, labels = guesses
    errors = errors_of(p, labels)
    g = torch.Generator().manual_seed(1)
    hits = torch.rand(300, generator=g) < 0.6
    scores = {"oracle": errors.double(), "noise": torch.rand(300, generator=g)}
    found = selective_measures(scores, errors, hits)
    assert found["selective.oracle.error_auroc"] == 1 and found["selective.oracle.excess_aurc"] == pytest.approx(0)
    assert found["selective.noise.r_auroc"] == pytest.approx(roc_auc_score(~hits, scores["noise"]))
    assert not any(name.endswith(".r_auroc") for name in selective_measures(scores, errors))


def test_draws_that_disagree_by_hand() -> None:
    """Two draws, each sure of another class: all uncertainty is what they disagree about."""
    predictive = Predictive(1, 2).update(torch.tensor([[1.0, 0.0]])).update(torch.tensor([[0.0, 1.0]]))
    found = predictive_measures(predictive, torch.tensor([0]))
    assert found["entropy"] == pytest.approx(math.log(2)) and found["expected_entropy"] == 0
    assert found["mutual_information"] == pytest.approx(math.log(2))
    assert found["predictive_std"] == found["predictive_std_classes"] == pytest.approx(math.sqrt(1 / 2))
    assert found["brier"] == pytest.approx(1 / 2) and found["nll"] == pytest.approx(math.log(2))
    assert float(predictive_scores(predictive)["max_softmax"]) == pytest.approx(1 / 2)


def test_images_of_another_kind() -> None:
    g = torch.Generator().manual_seed(0)
    inside = {"apart": torch.zeros(50) - 1, "mixed": torch.randn(50, generator=g), "only inside": torch.zeros(50)}
    outside = {"apart": torch.ones(20), "mixed": torch.randn(20, generator=g) + 0.5}
    found = ood_measures(inside, outside)
    assert (found["apart.auroc"], found["apart.aupr_out"], found["apart.fpr95"]) == (1, 1, 0)
    scores, out = torch.cat([inside["mixed"], outside["mixed"]]), torch.arange(70) >= 50
    assert found["mixed.auroc"] == pytest.approx(roc_auc_score(out, scores))
    assert found["mixed.aupr_out"] == pytest.approx(average_precision_score(out, scores))
    assert not any(name.startswith("only inside") for name in found)


def test_strict_json_has_no_nan() -> None:
    found = strict({"a": math.nan, "b": [1, math.inf, [0.5]], "settings": {"c": -math.inf, "d": "text"}, "e": True})
    assert found == {"a": None, "b": [1, None, [0.5]], "settings": {"c": None, "d": "text"}, "e": True}
    json.dumps(found, allow_nan=False)
