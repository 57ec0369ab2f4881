"""The linear probe: equal to scikit-learn's optimum, converged, and sane on degenerate features."""

from __future__ import annotations

import pytest
import torch
from sklearn.linear_model import LogisticRegression
from torch import Tensor

from byov._core.errors import BadInput
from byov.evaluation import probe
from byov.evaluation.probe import fit_probe


def features_of(seed: int, images: int = 400, width: int = 24, classes: int = 5) -> tuple[Tensor, Tensor]:
    """Overlapping classes in correlated features of very different scales, as an encoder's are."""
    g = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, classes, (images,), generator=g)
    centres = torch.randn(classes, width, generator=torch.Generator().manual_seed(99))
    mixing = torch.randn(width, width, generator=torch.Generator().manual_seed(98))
    x = (torch.randn(images, width, generator=g) + 0.5 * centres[labels]) * torch.logspace(0, -2, width)
    return x @ mixing * torch.logspace(-2, 2, width) + 3, labels


def sklearn_fit(x: Tensor, y: Tensor, l2: float) -> LogisticRegression:
    z = (x.double() - x.double().mean(0)) / x.double().std(0, correction=0)
    return LogisticRegression(C=1 / (l2 * len(x)), tol=1e-9, max_iter=20000).fit(z.numpy(), y.numpy())


def test_equals_sklearn_at_the_same_l2() -> None:
    x, y = features_of(0)
    ours = fit_probe(x, y)
    theirs = sklearn_fit(x, y, ours.l2)
    torch.testing.assert_close(ours.weights, torch.from_numpy(theirs.coef_), atol=1e-3, rtol=1e-3)
    z = (x.double() - ours.mean) / ours.std
    expected = torch.from_numpy(theirs.predict_proba(z.numpy())).float()
    torch.testing.assert_close(ours.probabilities(x), expected, atol=1e-4, rtol=1e-3)


def test_converged() -> None:
    x, y = features_of(1)
    fitted = fit_probe(x, y)
    # the gradient by autograd, of the objective as the module's head states it
    weights, bias = fitted.weights.clone().requires_grad_(), fitted.bias.clone().requires_grad_()
    z = (x.double() - fitted.mean) / fitted.std
    objective = torch.nn.functional.cross_entropy(z @ weights.T + bias, y) + fitted.l2 / 2 * weights.square().sum()
    gradients = torch.autograd.grad(objective, [weights, bias])
    assert max(float(g.abs().max()) for g in gradients) == pytest.approx(fitted.gradient_norm, rel=1e-3, abs=1e-12)
    assert fitted.converged and fitted.gradient_norm <= probe.TOLERANCE


def test_a_fit_that_is_stopped_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "ITERATIONS", 1)
    assert not fit_probe(*features_of(1)).converged


def test_l2_is_the_grid_s_best_on_the_held_out_fifth() -> None:
    x, y = features_of(2, images=300)
    kept, held = probe._split(y, seed=0)
    assert sorted([*kept.tolist(), *held.tolist()]) == list(range(300))
    assert len(held) == pytest.approx(60, abs=3)
    nlls = {}
    for l2 in probe.GRID:
        model = sklearn_fit(x[kept], y[kept], l2)
        z = (x[held].double() - x[kept].double().mean(0)) / x[kept].double().std(0, correction=0)
        log_p = torch.from_numpy(model.predict_log_proba(z.numpy()))
        nlls[l2] = -float(log_p[torch.arange(len(held)), y[held]].mean())
    assert nlls[fit_probe(x, y).l2] == pytest.approx(min(nlls.values()), abs=1e-3)


def test_invariances() -> None:
    x, y = features_of(3)
    test_x, _ = features_of(4)
    expected = fit_probe(x, y).probabilities(test_x)
    scale, shift = torch.logspace(-1, 1, 24), torch.linspace(-5, 5, 24)
    moved = fit_probe(x * scale + shift, y).probabilities(test_x * scale + shift)
    torch.testing.assert_close(moved, expected, atol=1e-3, rtol=1e-3)
    columns = torch.randperm(24, generator=torch.Generator().manual_seed(0))
    turned = fit_probe(x[:, columns], y).probabilities(test_x[:, columns])
    torch.testing.assert_close(turned, expected, atol=1e-3, rtol=1e-3)
    assert torch.equal(fit_probe(x, y).probabilities(test_x), expected)


def test_float32_fit_and_partial_whitening_reach_the_same_optimum(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = features_of(5)
    expected = fit_probe(x, y)
    monkeypatch.setattr(probe, "DOUBLE", 0)
    monkeypatch.setattr(probe, "ROTATED", 16)
    monkeypatch.setattr(probe, "BLOCK", 1000)
    other = fit_probe(x, y)
    assert other.l2 == expected.l2 and other.converged
    torch.testing.assert_close(other.probabilities(x), expected.probabilities(x), atol=0.01, rtol=0.05)


def test_constant_features_count_for_nothing() -> None:
    x, y = features_of(6)
    with_constant = torch.cat([x, torch.full((400, 2), 0.1), torch.zeros(400, 1)], 1)
    fitted = fit_probe(with_constant, y)
    torch.testing.assert_close(
        fitted.probabilities(with_constant), fit_probe(x, y).probabilities(x), atol=1e-4, rtol=1e-3
    )
    assert float(fitted.std[-1]) == 1


def test_collapsed_features_give_the_class_frequencies() -> None:
    y = torch.tensor([0] * 30 + [1] * 10)
    fitted = fit_probe(torch.full((40, 3), 0.7), y)
    torch.testing.assert_close(
        fitted.probabilities(torch.full((1, 3), 0.7)), torch.tensor([[0.75, 0.25]]), atol=1e-4, rtol=0
    )


def test_a_class_with_one_image_and_a_class_with_none() -> None:
    x, y = features_of(7, classes=3)
    y[y == 2] = 1
    y[0] = 4  # one image of class 4, none of 2 and 3
    fitted = fit_probe(x, y, classes=6)
    p = fitted.probabilities(x)
    assert p.shape == (400, 6) and fitted.converged
    assert p[:, [2, 3, 5]].max() == 0 and p[0, 4] > 0
    torch.testing.assert_close(p.sum(1), torch.ones(400))


@pytest.mark.parametrize("images", [4, 30])
def test_more_features_than_images(images: int) -> None:
    x, y = features_of(8, images=images, width=100, classes=2)
    y[:2] = torch.tensor([0, 1])
    fitted = fit_probe(x, y)
    assert fitted.converged
    assert float((fitted.probabilities(x).argmax(1) == y).float().mean()) == 1


def test_two_images() -> None:
    fitted = fit_probe(torch.tensor([[0.0], [1.0]]), torch.tensor([0, 1]))
    assert fitted.l2 == probe.FALLBACK_L2 and fitted.probabilities(torch.tensor([[1.0]]))[0, 1] > 0.5


def test_bad_inputs_get_a_sentence() -> None:
    x, y = features_of(9)
    for features, labels, says in (
        (x, y * 0, "at least two classes"),
        (x[:0], y[:0], "at least two classes"),
        (x, y[:-1], "one label per image"),
        (x[0], y, "one label per image"),
        (x, y.float(), "int64"),
        (x / 0, y, "diverged"),
    ):
        with pytest.raises(BadInput, match=says):
            fit_probe(features, labels)
    with pytest.raises(BadInput, match="classes=2"):
        fit_probe(x, y, classes=2)
    with pytest.raises(ValueError, match="fitted on 24 features"):
        fit_probe(x, y).probabilities(x[:, :3])


def test_rounding_does_not_choose_the_l2() -> None:
    """Where the held-out NLL is flat, features that differ by rounding must get the same, strong L2."""
    g = torch.Generator().manual_seed(3)
    labels = torch.arange(300) % 3
    features = torch.randn(300, 20, generator=g) + 2.0 * torch.nn.functional.one_hot(labels, 20)
    chosen = {fit_probe(features + 1e-6 * torch.randn(300, 20, generator=g), labels).l2 for _ in range(4)}
    assert len(chosen) == 1
    noise = torch.randn(300, 20, generator=g)  # says nothing of the labels: the strongest is as good as any
    assert fit_probe(noise, labels).l2 == 1.0
