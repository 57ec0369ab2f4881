"""Flipout: right marginals for each image, independence between images, and layers as they were afterwards."""

import math

import pytest
import torch
from torch import nn

import byov
from byov._core.randomness import generator


@pytest.mark.parametrize("layer", [nn.Linear(5, 4), nn.Conv2d(2, 4, 3, padding=1)])
def test_images_decorrelate_and_keep_their_variance(layer: nn.Module) -> None:
    posterior = byov.Posterior(layer, init_log_variance=-2.0)
    with torch.no_grad():
        posterior.log_variances.uniform_(-3, -1)
    x = torch.randn(5) if isinstance(layer, nn.Linear) else torch.randn(2, 4, 4)
    twice = torch.stack([x, x])  # the same image twice
    draws = 3000
    outputs = {False: [], True: []}
    with torch.no_grad():
        for flipout, kept in outputs.items():
            for k in range(draws):
                with posterior.sampled(generator(k, 1), flipout=flipout):
                    kept.append(posterior(twice).flatten(1))
    shared, flipped = torch.stack(outputs[False]), torch.stack(outputs[True])
    torch.testing.assert_close(shared[:, 0], shared[:, 1])
    # The bias keeps the shared draw, so only the weights' part decorrelates: compare after taking out the common mean.
    ratio = flipped[:, 0].var(0) / shared[:, 0].var(0)
    assert (ratio - 1).abs().max() < 6 * math.sqrt(4 / draws)
    bias_part = _bias_share(posterior, shared)
    for unit in range(flipped.shape[2]):
        a, b = flipped[:, 0, unit], flipped[:, 1, unit]
        correlation = float(torch.corrcoef(torch.stack([a, b]))[0, 1])
        assert abs(correlation - float(bias_part[unit])) < 5 / math.sqrt(draws)


def _bias_share(posterior: byov.Posterior, shared: torch.Tensor) -> torch.Tensor:
    """Variance of a unit's bias over the unit's whole variance: the correlation that flipout leaves."""
    bias = posterior.segments.named(posterior.sigma**2)["bias"]
    return bias.repeat_interleave(shared.shape[2] // len(bias)) / shared[:, 0].var(0)


def test_gradients_flow_to_means_and_log_variances() -> None:
    net = nn.Sequential(nn.Conv2d(1, 2, 2), nn.Flatten(), nn.Linear(8, 3))
    posterior = byov.Posterior(net, init_log_variance=-3.0)
    with posterior.sampled(generator(1), flipout=True):
        loss = posterior(torch.randn(4, 1, 3, 3)).square().sum()
    loss.backward()
    for flat in (posterior.means.grad, posterior.log_variances.grad):
        assert all(g.abs().sum() > 0 for g in posterior.segments.views(flat))


def test_gradient_of_the_means_is_that_of_the_mean_network_without_noise() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))
    posterior = byov.Posterior(plain, init_log_variance=-60.0)  # no noise to speak of
    x = torch.randn(5, 4)
    posterior(x).square().sum().backward()
    expected = posterior.means.grad.clone()
    posterior.zero_grad()
    with posterior.sampled(generator(1), flipout=True):
        posterior(x).square().sum().backward()
    torch.testing.assert_close(posterior.means.grad, expected)


def test_forward_is_the_layers_own_afterwards() -> None:
    layer = nn.Linear(3, 2)
    posterior = byov.Posterior(layer)
    x = torch.randn(2, 3)
    before = posterior(x).detach()
    with pytest.raises(KeyError), posterior.sampled(flipout=True):
        raise KeyError
    assert "forward" not in layer.__dict__
    assert torch.equal(posterior(x), before)


def test_layers_of_ones_own_keep_their_forward() -> None:
    class Scaled(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 100 * super().forward(x)

    posterior = byov.Posterior(Scaled(3, 2), init_log_variance=-60.0)
    x = torch.randn(2, 3)
    with torch.no_grad():
        expected = posterior(x)
        with posterior.sampled(flipout=True):
            torch.testing.assert_close(posterior(x), expected)


def test_blocks_may_share_a_draw_but_not_the_signs() -> None:
    posterior = byov.Posterior(nn.Linear(6, 5, bias=False), init_log_variance=-1.0)
    x = torch.randn(1, 6)
    outputs = []
    with torch.no_grad():
        for signs in (1, 2):
            with posterior.sampled(generator(3), flipout=generator(signs)):
                outputs.append((posterior.module.weight.clone(), posterior(x)))
    assert torch.equal(outputs[0][0], outputs[1][0]) and not torch.equal(outputs[0][1], outputs[1][1])
