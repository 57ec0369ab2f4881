"""The bootstrap over images: counts, standard errors, paired comparisons."""

from __future__ import annotations

import math

import pytest
import torch
from scipy.stats import ttest_rel
from torch import Tensor

from byov.evaluation.measures import class_measures
from byov.metrics.resampling import (
    WeightedMeasures,
    paired_replicates,
    paired_top1,
    replicates,
    resampled_counts,
    sampling_floor,
    standard_errors,
)


def test_counts_are_of_as_many_images() -> None:
    counts = torch.cat(list(resampled_counts(7, 50)))
    assert counts.shape == (50, 7) and bool((counts.sum(1) == 7).all()) and float(counts.std()) > 0.5


def test_the_error_of_a_mean_is_the_std_over_the_root_of_the_images() -> None:
    x = torch.randn(200, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    sums = replicates(lambda c: {"mean": c @ x / c.sum(1), "twice": 2 * c @ x / c.sum(1)}, 200, resamples=4000)
    found = standard_errors(sums)
    assert found["mean"] == pytest.approx(float(x.std(correction=0)) / math.sqrt(200), rel=0.06)
    assert found["twice"] == pytest.approx(2 * found["mean"])


def test_one_resample_has_no_error() -> None:
    with pytest.raises(ValueError, match="at least two"):
        replicates(lambda counts: {"total": counts.sum(1)}, 5, resamples=1)


def paired_errors(p: Tensor, q: Tensor, labels: Tensor, resamples: int = 500, seed: int = 0) -> dict[str, float]:
    return standard_errors(paired_replicates(p, q, labels, resamples, seed))


NAMES = {"top1", "top5", "ece", "brier", "reliability", "resolution", "nll"}


def guesses(images: int, classes: int = 7, seed: int = 0) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    labels = torch.randint(classes, (images,), generator=g)
    logits = torch.randn(images, classes, generator=g) + 2 * torch.eye(classes)[labels]
    return logits.softmax(1), labels


def test_counted_images_are_as_good_as_repeated_ones() -> None:
    p, labels = guesses(200)
    counts = next(resampled_counts(200, 5, seed=3))
    counts[0] = 1  # every image once
    counts[1, p.argmax(1) == 2] = 0  # nothing of a class is predicted
    found = WeightedMeasures(p, labels)(counts)
    assert set(found) == NAMES
    for row, often in enumerate(counts.long()):
        again = class_measures(p.repeat_interleave(often, 0), labels.repeat_interleave(often))
        for name in NAMES:
            assert float(found[name][row]) == pytest.approx(again[name], abs=1e-12), name


def test_every_resample_has_as_many_images_and_the_seed_says_which() -> None:
    blocks = list(resampled_counts(300_000, 5, seed=1))  # more than a block of memory holds
    assert [len(block) for block in blocks] == [3, 2]
    assert all(bool((block.sum(1) == 300_000).all()) for block in blocks)
    one, same, other = (next(resampled_counts(50, 4, seed=seed)) for seed in (1, 1, 2))
    assert torch.equal(one, same) and not torch.equal(one, other)


def test_the_error_of_a_mean_difference_is_its_spread_over_the_root_of_the_images() -> None:
    (p, labels), (q, _) = guesses(1000), guesses(1000, seed=1)
    difference = (p.argmax(1) == labels).double() - (q.argmax(1) == labels).double()
    found = paired_errors(p, q, labels, resamples=2000)
    assert found["top1"] == pytest.approx(float(difference.std()) / math.sqrt(1000), rel=0.06)


def test_the_difference_of_accuracies_and_its_error_are_those_of_a_paired_t_test() -> None:
    (p, labels), (q, _) = guesses(300), guesses(300, seed=1)
    found = paired_top1(p, q, labels)
    right = [(x.argmax(1) == labels).double().numpy() for x in (p, q)]
    assert found.value == pytest.approx(right[0].mean() - right[1].mean())
    assert found.value / found.error == pytest.approx(ttest_rel(*right).statistic)
    assert found.error == pytest.approx(paired_errors(p, q, labels, resamples=2000)["top1"], rel=0.06)
    assert torch.allclose(found.replicates, paired_replicates(p, q, labels)["top1"])


def test_copies_of_an_image_are_no_images_of_their_own() -> None:
    (p, labels), (q, _) = guesses(300), guesses(300, seed=1)
    once, copied = paired_top1(p, q, labels), paired_top1(p.expand(9, -1, -1), q.expand(9, -1, -1), labels)
    assert copied[:2] == pytest.approx(once[:2]) and torch.allclose(copied.replicates, once.replicates)
    with pytest.raises(ValueError, match="not of the same images"):
        paired_top1(p.expand(9, -1, -1), q, labels)


def test_what_both_share_falls_out() -> None:
    """Images are hard or easy for both: apart, the error would be far larger."""
    p, labels = guesses(500)
    near = 0.99 * p + 0.01 / p.shape[1]
    assert all(error == 0 for error in paired_errors(p, p, labels, resamples=20).values())
    far = guesses(500, seed=5)[0]
    close, apart = paired_errors(p, near, labels, 100), paired_errors(p, far, labels, 100)
    assert all(close[name] < 0.2 * apart[name] for name in ("brier", "nll", "reliability"))


def test_ece_error_is_that_of_resampling_by_hand() -> None:
    (p, labels), (q, _) = guesses(120), guesses(120, seed=1)
    found = paired_errors(p, q, labels, resamples=40, seed=7)
    differences = []
    for often in torch.cat(list(resampled_counts(120, 40, seed=7))).long():
        one, other = (class_measures(x.repeat_interleave(often, 0), labels.repeat_interleave(often)) for x in (p, q))
        differences.append(one["ece"] - other["ece"])
    assert found["ece"] == pytest.approx(float(torch.tensor(differences, dtype=torch.float64).std()), rel=1e-9)


def test_other_images_and_too_few_resamples_are_refused() -> None:
    p, labels = guesses(20)
    with pytest.raises(ValueError, match="not of the same images"):
        paired_errors(p, p[:10], labels)
    with pytest.raises(ValueError, match="at least two"):
        paired_errors(p, p, labels, resamples=1)


def test_a_calibrated_model_has_a_calibration_error_that_falls_with_the_images() -> None:
    """Where labels are drawn from the probabilities, what is measured is the floor."""
    few, many = guesses(300)[0], guesses(4800, seed=1)[0]
    assert sampling_floor(many)["ece"] == pytest.approx(sampling_floor(few)["ece"] / 4, rel=0.3)
    drawn = torch.multinomial(few.double(), 1, generator=torch.Generator().manual_seed(5))[:, 0]
    floor, measured = sampling_floor(few, draws=200), class_measures(few, drawn)
    for name in ("ece", "reliability"):
        assert measured[name] == pytest.approx(floor[name], rel=0.4)
    certain = torch.eye(7)[torch.arange(50) % 7]
    assert sampling_floor(certain) == {"ece": 0.0, "reliability": 0.0}
