"""Alignment with a supervised posterior: against scipy and least squares, known agreement, and whole runs."""

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import multivariate_normal, pearsonr, rankdata, spearmanr
from torch import Tensor

import byov
import handmade
from byov._core.errors import BadInput
from byov.config import Config, Model, Monitor, Optim, Posterior
from byov.data.sources import open_source
from byov.evaluation.agreement import align, alignment, density, given_both, predict_supervised
from byov.evaluation.predictive import Drawn, predict_classes
from byov.evaluation.probe import Probe, fit_probe
from byov.inference.run import ReferenceSet, Run, at_draw
from byov.metrics import Predictive, partial_pearson, partial_spearman, pearson
from byov.runs.split import divide
from byov.training.prepare import prepare

# ------------------------------------------------------------------------------------------------ two scores of images


def scores(seed: int, images: int = 300) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Two scores, and two confidences that share something with both."""
    g = torch.Generator().manual_seed(seed)
    z, u, a, b, c, d = torch.randn(6, images, generator=g, dtype=torch.float64)
    return (z + u + a).exp(), (z - u + b).exp(), z + 0.5 * c, u + 0.5 * d


def by_least_squares(x: Tensor, y: Tensor, *given: Tensor) -> float:
    design = np.stack([np.ones(len(x)), *given], 1)
    left = [v - design @ np.linalg.lstsq(design, v)[0] for v in (x.numpy(), y.numpy())]
    return float(pearsonr(*left).statistic)


def test_given_both_is_least_squares_on_both() -> None:
    variables = scores(0)
    assert float(given_both(partial_pearson, *variables)) == pytest.approx(by_least_squares(*variables), abs=1e-10)
    ranks = [torch.from_numpy(rankdata(v)) for v in variables]
    assert float(given_both(partial_spearman, *variables)) == pytest.approx(by_least_squares(*ranks), abs=1e-10)
    x, y, first, _ = variables
    for nothing_new in (torch.ones_like(x), 3 * first - 1):
        alone = float(partial_pearson(x, y, first))
        assert float(given_both(partial_pearson, x, y, first, nothing_new)) == pytest.approx(alone, abs=1e-9)


def test_an_alignment_equals_scipy_and_its_intervals_hold_it() -> None:
    x, y, first, second = scores(1)
    found = alignment(x, y, first, second, resamples=200)
    assert found.pearson.value == pytest.approx(pearsonr(x, y).statistic, abs=1e-12)
    assert found.spearman.value == pytest.approx(spearmanr(x, y).statistic, abs=1e-12)
    assert found.partial_pearson.value == pytest.approx(by_least_squares(x, y, first, second), abs=1e-10)
    for low, value, high in ((e.low, e.value, e.high) for e in found[:4]):
        assert low < value < high
    assert np.allclose(found.gaussian.covariance, np.cov(x, y, bias=True))


def test_agreement_by_hardness_alone_is_gone_given_confidence() -> None:
    """Each score is the images' hardness and independent noise; each confidence reflects the hardness (one well)."""
    n = 4000
    hard, a, b, c = torch.randn(4, n, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    found = alignment(hard + a, hard + b, -hard + c, -hard, resamples=100)
    assert found.pearson.value == pytest.approx(0.5, abs=4 * 0.75 / math.sqrt(n))
    assert found.partial_pearson.low < 0 < found.partial_pearson.high
    assert abs(found.partial_pearson.value) < 4 / math.sqrt(n)


def test_few_draws_hide_agreement_by_the_known_factor() -> None:
    """Two models with the same true std s, each known to 1 / sqrt(2 (K - 1)) of itself: the correlation is
    var(s) / (var(s) + E[s^2] / (2 (K - 1)))."""
    n, draws = 20_000, 10
    g = torch.Generator().manual_seed(3)
    s = 0.01 + 0.03 * torch.rand(n, generator=g, dtype=torch.float64)
    models = [Predictive(n, 2), Predictive(n, 2)]
    for model in models:
        for _ in range(draws):
            p = 0.7 + s * torch.randn(n, generator=g, dtype=torch.float64)
            model.update(torch.stack([p, 1 - p], 1))
    expected = float(s.var() / (s.var() + s.square().mean() / (2 * (draws - 1))))
    found = float(pearson(*(model.predictive_std for model in models)))
    # the formula is the first term of a series in 1 / K; a correlation has the error (1 - r^2) / sqrt(n)
    assert found == pytest.approx(expected, abs=4 / math.sqrt(n) + 1 / draws**2)


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**31), images=st.integers(6, 40))
def test_order_of_models_and_scale_of_scores_change_nothing(seed: int, images: int) -> None:
    x, y, first, second = scores(seed, images)
    whole = alignment(x, y, first, second, resamples=5)
    turned = alignment(y, x, second, first, resamples=5)
    scaled = alignment(7 * x, 1e-3 * y, 2 * first - 1, second, resamples=5)
    for other in (turned, scaled):
        for a, b in zip(whole[:4], other[:4], strict=True):
            assert -1 <= b.value <= 1 or math.isnan(b.value)
            assert b.value == pytest.approx(a.value, abs=1e-6, nan_ok=True)
    assert scaled.gaussian.ks_distance == pytest.approx(whole.gaussian.ks_distance, abs=1e-6)


def test_density_is_the_mean_of_its_kernels() -> None:
    """Scott: each image is a Gaussian with the sample's covariance times n^(-1/3)."""
    x, y, *_ = scores(4, 25)
    found = density(x, 3 * y, points=7)
    points = np.stack([x, 3 * y], 1)
    kernel = np.cov(points.T) * 25 ** (-1 / 3)
    for i, j in ((0, 0), (2, 5), (6, 1)):
        at = [float(found.x[j]), float(found.y[i])]
        expected = np.mean([multivariate_normal(point, kernel).pdf(at) for point in points])
        assert float(found.values[i, j]) == pytest.approx(expected, rel=1e-9)
    assert float(found.x[-1]) == float(x.max()) and float(found.y[0]) == float(3 * y.min())


# ---------------------------------------------------------------------------------------------------------------- runs

SMALL = Config(
    images=200,
    threads=1,
    device="cpu",
    model=Model(width=16, depth=1, heads=2, head_hidden=16, head_output=8),
    optim=Optim(epochs=2, batch_size=20),
    posterior=Posterior(init_log_variance=-6.0),
    monitor=Monitor(tensorboard=False),
)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    folder = tmp_path_factory.mktemp("runs")
    kinds = {
        "byov": {"method": "byov"},
        "byol": {"method": "byol"},
        "bbb": {"method": "supervised-bbb"},
        "bbb-1": {"method": "supervised-bbb", "seed": 1},
    }
    for name, settings_ in kinds.items():
        prepare(replace(SMALL, **settings_), folder / name, say=lambda text: None).run()
    return {name: byov.load(folder / name) for name in kinds}


def test_supervised_predictions_equal_a_plain_loop(runs: dict[str, Run]) -> None:
    run, images = runs["bbb"], open_source("digits").load("test").images[:150]
    told: list[tuple[int, int]] = []
    found = predict_supervised(run, images, 3, lambda what, done, total: told.append((done, total)))
    network, plain = run.learner.posterior, []
    assert not network.training  # as it was
    for k in range(3):
        with at_draw(network, run.config.seed, k):
            plain.append(network(images)[1].double().softmax(1))
    together = torch.stack(plain)
    assert found.draws == 3 and told[-1] == (450, 450)
    torch.testing.assert_close(found.mean, together.mean(0), rtol=0, atol=1e-6)
    torch.testing.assert_close(found.std, together.std(0), rtol=0, atol=1e-6)
    with pytest.raises(BadInput, match="shape"):
        predict_supervised(run, handmade.images(2)[:, :, :3], 2)


def test_three_runs_to_one_record(runs: dict[str, Run]) -> None:
    run, draws = runs["byov"], 4
    found = align(run, runs["bbb"], runs["bbb-1"], draws=draws, resamples=50)
    assert json.loads((run.folder / "results" / "alignment.json").read_text()) == found
    test, train = (open_source("digits").load(split) for split in ("test", "train"))
    for name, other in (("supervised", runs["bbb"]), ("second", runs["bbb-1"])):
        expected = predict_supervised(other, test.images, draws)
        assert found["scatter"][name]["predictive_std"] == pytest.approx(expected.predictive_std.tolist(), rel=1e-5)
        hits = (expected.mean.argmax(1) == test.labels).double().mean()
        assert found[f"{name}.top1"] == pytest.approx(float(hits))
    std = {name: each["predictive_std"] for name, each in found["scatter"].items()}
    confidence = {name: torch.tensor(each["confidence"]).double() for name, each in found["scatter"].items()}
    for prefix, a, b in (
        ("", "run", "supervised"),
        ("second.", "run", "second"),
        ("ceiling.", "supervised", "second"),
    ):
        assert found[f"{prefix}pearson"] == pytest.approx(pearsonr(std[a], std[b]).statistic, abs=1e-4)
        assert found[f"{prefix}spearman"] == pytest.approx(spearmanr(std[a], std[b]).statistic, abs=1e-4)
        pair = (torch.tensor(std[name]).double() for name in (a, b))
        expected_partial = by_least_squares(*pair, confidence[a], confidence[b])
        assert found[f"{prefix}partial_pearson"] == pytest.approx(expected_partial, abs=1e-4)
        low, high = found[f"{prefix}pearson_interval"]
        assert low < found[f"{prefix}pearson"] < high
        assert found[f"{prefix}gaussian"]["mean"] == pytest.approx([np.mean(std[a]), np.mean(std[b])], rel=1e-4)
        assert len(found[f"{prefix}density"]["values"]) == 48
    assert found["settings"]["draws"] == {"run": 4, "supervised": 4, "second": 4}

    # the run is seen through a probe on the images it was trained on, its draws aligned
    some = train.subset(torch.tensor(sorted(trained_on(run))))
    probe = fit_probe(run.features(some.images), some.labels, classes=10)
    predictions = predict_classes(ReferenceSet(run), probe, test.images, draws)
    assert std["run"] == pytest.approx(predictions.aligned.predictive_std.tolist(), rel=1e-4)
    given_them = align(run, runs["bbb"], draws=draws, resamples=50, predictions=predictions)
    assert given_them["unaligned.spearman"] == pytest.approx(found["unaligned.spearman"], abs=1e-6)
    assert given_them["pearson"] == pytest.approx(found["pearson"], abs=1e-6)
    assert not any(key.startswith(("ceiling.", "second.")) for key in given_them)


def trained_on(run: Run) -> list[int]:
    return divide(len(open_source("digits").load("train")), run.config.images or 0, 0).trained.tolist()


@pytest.mark.parametrize(
    ("names", "changes", "words"),
    [
        (("byov", "bbb"), {"draws": 1}, "at least 2"),
        (("byov", "byov"), {}, "is a byov run: align with one that"),
        (("byov", "bbb"), {"data": "mnist"}, "trained on digits, not on mnist"),
        (("byol", "bbb"), {}, "nothing random"),
        (("byov", "bbb", "bbb"), {}, "same seed, 0"),
    ],
)
def test_bad_input_is_one_sentence(
    names: tuple[str, ...], changes: dict[str, object], words: str, runs: dict[str, Run]
) -> None:
    with pytest.raises(BadInput, match=words):
        align(*(runs[name] for name in names), **changes)  # type: ignore[arg-type]


def test_a_source_without_labels_is_refused(runs: dict[str, Run], tmp_path: Path) -> None:
    pixels = handmade.images(20)[:, 0].numpy()
    np.savez(tmp_path / "bare.npz", x_train=pixels, x_test=pixels)
    data = f"npz:{tmp_path / 'bare.npz'}"
    bbb = runs["bbb"]
    with pytest.raises(BadInput, match="no labels"):
        align(runs["byov"], replace(bbb, config=replace(bbb.config, data=data)), data=data)


def test_scores_that_do_not_vary_are_refused(runs: dict[str, Run]) -> None:
    test = open_source("digits").load("test")
    same = Predictive(len(test), 10)
    for shift in (0.0, 0.1):
        same.update(torch.tensor([[0.5 + shift, 0.5 - shift, *[0.0] * 8]]).expand(len(test), -1))
    predictions = predict_classes(ReferenceSet(runs["byov"]), _any_probe(runs["byov"]), test.images, 2)
    with pytest.raises(BadInput, match="cannot be aligned"):
        align(
            runs["byov"],
            runs["bbb"],
            draws=2,
            predictions=Drawn(same, predictions.unaligned, predictions.sums),
            resamples=5,
        )
    with pytest.raises(ValueError, match="are of 3 images"):
        few = Drawn(Predictive(3, 10), predictions.unaligned, predictions.sums)
        align(runs["byov"], runs["bbb"], draws=2, predictions=few)


def _any_probe(run: Run) -> Probe:
    some = open_source("digits").load("train").subset(torch.arange(100))
    return fit_probe(run.features(some.images), some.labels, classes=10)
