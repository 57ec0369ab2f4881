"""The parts of SNR, on weights whose means and sigmas are set by hand."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from byov.posterior import Posterior
from byov.pruning.criteria import drop_weights
from byov.studies.measurements.snr_components import part_scores


class Two(nn.Module):
    """An encoder of two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(4, 1, bias=False), nn.Linear(4, 1, bias=False))


@pytest.fixture
def posterior() -> Posterior:
    made = Posterior(Two())
    with torch.no_grad():
        made.means.copy_(torch.tensor([1.0, -2.0, 3.0, 4.0, 10.0, 20.0, -30.0, 40.0]))
        made.log_variances.copy_(2 * torch.tensor([1.0, 4.0, 2.0, 1.0, 40.0, 10.0, 10.0, 20.0]).log())
    return made


def flat(scores: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.cat([score.flatten() for score in scores.values()])


def test_snr_magnitude_and_variance_are_those_of_prune(posterior: Posterior) -> None:
    snr = torch.tensor([1.0, 0.5, 1.5, 4.0, 0.25, 2.0, 3.0, 2.0])
    torch.testing.assert_close(flat(part_scores(posterior, "snr")), snr)
    torch.testing.assert_close(flat(part_scores(posterior, "magnitude")), posterior.means.detach().abs())
    torch.testing.assert_close(flat(part_scores(posterior, "variance")), 1 / posterior.sigma)


def test_a_layers_sigma_changes_the_order_between_layers_alone(posterior: Posterior) -> None:
    magnitude, scaled = (part_scores(posterior, part) for part in ("magnitude", "magnitude_by_layer"))
    expected = torch.tensor([0.5, 1.0, 1.5, 2.0, 0.5, 1.0, 1.5, 2.0])  # mean sigmas 2 and 20
    torch.testing.assert_close(flat(scaled), expected)
    for name, mask in drop_weights(magnitude, 0.5).items():
        assert torch.equal(mask, drop_weights(scaled, 0.5)[name])
    everywhere = [flat(drop_weights(scores, 0.5, "global")).tolist() for scores in (magnitude, scaled)]
    assert everywhere[0] == [False] * 4 + [True] * 4  # the second layer's weights are all larger
    assert everywhere[1] == [False, False, True, True] * 2


def test_shuffled_sigmas_are_the_layers_own_in_another_order(posterior: Posterior) -> None:
    shuffled = part_scores(posterior, "snr_shuffled", seed=1)
    sigmas = posterior.means.detach().abs() / flat(shuffled)
    own = posterior.sigma
    for layer in (slice(0, 4), slice(4, 8)):
        torch.testing.assert_close(sigmas[layer].sort().values, own[layer].sort().values)
    assert not torch.allclose(sigmas, own)
    assert torch.equal(flat(shuffled), flat(part_scores(posterior, "snr_shuffled", seed=1)))
    with pytest.raises(ValueError, match="no part 'sigma'"):
        part_scores(posterior, "sigma")
