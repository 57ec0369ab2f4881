"""Ablation of SNR pruning: scores by hand, rows, signs and the figure; and the whole study on tiny runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from byov.posterior import Posterior
from byov.pruning.criteria import drop_weights
from byov.studies.beyond import pruning_ablation
from byov.studies.beyond.pruning_ablation import CLAIMS, PARTS, SCOPES, SPARSITIES, part_scores
from byov.studies.framework.checklist import sections
from byov.studies.framework.claims import select
from byov.studies.framework.lab import Lab
from byov.studies.framework.replicates import packed

SOME = (0.5, 0.9)


def row(by: str | None, top1: float, kind: str = "weights", scope: str = "layer", asked: float = 0.5) -> dict[str, Any]:
    found = {"method": "byov", "seed": 0, "kind": kind, "by": by, "scope": scope, "asked": asked, "sparsity": asked}
    found |= {"top1": top1, "top1.error": 0.03 if by == "snr" else 0.04, "refitted.top1": top1, "ece": 0.1}
    found |= {"top1.difference": top1 - 0.75}  # to magnitude
    return found | {"compressed_bytes": 1024.0 * (100 - asked), "speed": 1.0}


def test_claims_of_readers_are_not_counted_as_the_papers() -> None:
    assert [sections(claim.where) for claim in CLAIMS] == [[]] * len(CLAIMS)


def test_claims_are_positive_where_sigma_helps() -> None:
    rows = [row("snr", 0.8), row("snr_shuffled", 0.7), row("magnitude", 0.75), row("variance", 0.6)]
    rows += [row("snr", 0.1, asked=0.9), row("snr", 0.2, scope="global")]  # not what is judged
    (shuffled,), (variance,) = (claim.effects(rows) for claim in CLAIMS)
    assert shuffled.value == pytest.approx(10.0) and shuffled.error == pytest.approx(5.0)  # 3 and 4 in squares
    assert variance.value == pytest.approx(-15.0)


def test_two_differences_to_magnitude_are_compared_on_the_same_resamples() -> None:
    """What magnitude does to both cancels: in squares it would count twice."""
    g = torch.Generator().manual_seed(0)
    own, other, magnitude = 0.01 * torch.randn(3, 500, generator=g, dtype=torch.float64) * torch.tensor([[1], [1], [9]])
    columns = [
        {"top1.error": float(found.std()), "top1.replicates": packed(found)}
        for found in (own - magnitude, other - magnitude)
    ]
    rows = [row("snr", 0.8) | columns[0], row("snr_shuffled", 0.7) | columns[1]]
    (found,) = CLAIMS[0].effects(rows)
    assert found.error == pytest.approx(100 * float((own - other).std()), rel=0.05)


def test_the_figure_has_one_line_per_part() -> None:
    rows = [row(by, 0.9 - asked / 2, "weights", s, asked) for by in PARTS for s in SCOPES for asked in SPARSITIES]
    rows += [row(None, 0.95, "none", asked=0.0), row("snr", 0.9, "units"), row("snr", 0.92, "retrained", asked=0.9)]
    figure = pruning_ablation.draw(rows, "test")
    layer = figure.axes[0]
    assert len(layer.get_lines()) == len(PARTS)
    assert list(layer.get_lines()[0].get_xdata()) == list(SPARSITIES)
    assert list(layer.get_lines()[0].get_ydata()) == pytest.approx([100 * (0.9 - s / 2) for s in SPARSITIES])


def test_the_study_from_runs_to_figure(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("byov.studies.beyond.pruning_ablation.SPARSITIES", SOME)
    monkeypatch.setattr("byov.studies.beyond.pruning_ablation.UNITS", (0.5,))
    monkeypatch.setattr("byov.studies.beyond.pruning_ablation.IMAGES", 50)
    lab.seeds = 1
    lab.train(pruning_ablation.runs(lab))
    rows = pruning_ablation.results(lab)
    weights = select(rows, kind="weights", method="byov")
    assert len(weights) == len(PARTS) * len(SCOPES) * len(SOME)
    assert all(r["sparsity"] == pytest.approx(r["asked"], abs=0.01) for r in weights)
    for sparsity in SOME:  # a layer's factor changes no order within it
        same = [select(weights, by=by, scope="layer", asked=sparsity)[0] for by in ("magnitude", "magnitude_by_layer")]
        assert same[0]["top1"] == same[1]["top1"] and same[1]["top1.difference"] == 0
    assert [r["sparsity"] for r in select(rows, kind="retrained")] == pytest.approx([0.536, 0.785, 0.9], abs=0.02)
    unpruned = select(rows, kind="none", method="byov")[0]
    assert all(r["compressed_bytes"] < unpruned["compressed_bytes"] for r in select(rows, kind="units"))
    assert {r["by"] for r in select(rows, kind="weights", method="byol")} == {"magnitude"}
    assert all(len(claim.effects(rows)) == 1 for claim in CLAIMS)
    for r in rows:  # all of the same 50 images
        assert 50 * r["top1"] == pytest.approx(round(50 * r["top1"]))
    pruning_ablation.draw(rows, lab.name)
    monkeypatch.setattr(pruning_ablation, "ablation_rows", lambda: None)  # a call with arguments fails
    assert pruning_ablation.results(lab) == rows  # from the cache
    monkeypatch.setattr("byov.studies.beyond.pruning_ablation.IMAGES", 60)
    with pytest.raises(TypeError):  # it would be measured again
        pruning_ablation.results(lab)


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
