import math

import pytest
import torch
from torch import nn

import byov
import tiny
from byov.training.monitors import (
    FirstBadOutput,
    collapse_warning,
    effective_rank,
    feature_std,
    first_bad_parameter,
    layer_statistics,
    peak_memory_mib,
)


def test_feature_std_is_one_for_isotropic_and_zero_for_constant_features() -> None:
    torch.manual_seed(0)
    assert feature_std(torch.randn(4000, 64)) == pytest.approx(1.0, abs=0.02)
    assert feature_std(torch.ones(50, 8)) == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize("rank", [1, 3, 10])
def test_effective_rank_counts_equal_directions(rank: int) -> None:
    rows = torch.cat([torch.eye(16)[:rank], -torch.eye(16)[:rank]])
    assert effective_rank(rows) == pytest.approx(rank)


def test_effective_rank_of_constant_features_is_zero() -> None:
    assert effective_rank(torch.ones(5, 3)) == 0


def test_collapse_warning_says_what_to_do() -> None:
    assert collapse_warning(0.9, 10) is None
    assert "optim.lr" in (collapse_warning(0.01, 10) or "")


def test_a_collapsing_run_is_told_once(tmp_path) -> None:
    said: list[str] = []
    trainer = tiny.trainer(tmp_path, tiny.config("byol"), say=said.append)
    last = trainer.learner.posterior.module.projector[-1]
    with torch.no_grad():
        last.weight.zero_()
    last.weight.requires_grad_(False)
    last.register_forward_hook(lambda module, inputs, output: output + 1)
    trainer.run()
    assert len([s for s in said if "collapsing" in s]) == 1


def test_layer_statistics_by_hand() -> None:
    posterior = byov.Posterior(nn.Linear(2, 1), init_log_variance=2 * math.log(0.5))
    with torch.no_grad():
        posterior.means.copy_(torch.tensor([1.0, -2.0, 4.0]))
    weight, bias = layer_statistics(posterior)
    assert weight["layer"] == "weight" and weight["sigma_mean"] == pytest.approx(0.5)
    assert weight["snr_mean"] == pytest.approx(3.0) and weight["snr_max"] == pytest.approx(4.0)
    assert bias["snr_max"] == pytest.approx(8.0) and bias["weights"] == 1


def test_first_bad_parameter_and_output() -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
    posterior = byov.Posterior(net)
    assert first_bad_parameter(posterior) is None
    with torch.no_grad():
        posterior.means[7] = float("inf")
    assert first_bad_parameter(posterior) == "2.weight"
    with FirstBadOutput(net) as watch:
        posterior(torch.ones(1, 2))
    assert watch.name == "2"
    assert all(not m._forward_hooks for m in net)


def test_peak_memory_is_that_of_this_process() -> None:
    assert 50 < peak_memory_mib(torch.device("cpu")) < 1e6
