"""Scores, masks and whole units: which weights go, and that a network without empty units computes the same."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils import prune as torch_prune

from byov._core.errors import BadInput
from byov.backbones import build_encoder
from byov.config import Model
from byov.posterior import Posterior
from byov.pruning.criteria import Pruning, choose_masks, drop_weights, prunable_weights, sparsity_of, weight_scores
from byov.pruning.prune import numbers, stored_bytes, without
from byov.pruning.structured import compact, drop_units, layers_of

VIT = Model(width=16, depth=2, heads=4, patch=2)
MODELS = {
    "vit": VIT,
    "cls": Model(width=16, depth=1, heads=2, patch=4, pool="cls", positions="learned", stem="conv"),
    "resnet-18": Model(backbone="resnet-18", width=4),
    "resnet-50": Model(backbone="resnet-50", width=4),
    "no norm": Model(backbone="resnet-18", width=4, norm="none"),
}


class Network(nn.Module):
    """What a run has: an encoder, and something else."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.encoder = build_encoder(model, (1, 8, 8))
        self.projector = nn.Linear(self.encoder.features, 3)


def posterior_over(model: Model, where: str = "all") -> Posterior:
    torch.manual_seed(0)
    posterior = Posterior(Network(model), where)
    with torch.no_grad():
        posterior.means.normal_()
        posterior.log_variances.normal_()
    return posterior


@pytest.mark.parametrize("where", ["all", "none"])
def test_frozen_stages_are_not_prunable(where: str) -> None:
    """SNR knows no sigma there: all scores must rank the same weights."""
    posterior = posterior_over(Model(width=16, depth=2, heads=4, patch=2, frozen_until="blocks.0"), where)
    found = set(prunable_weights(posterior))
    assert found == set(weight_scores(posterior, "magnitude"))
    assert found and all(name.startswith("encoder.backbone.blocks.1.") for name in found)
    if where == "all":
        assert found == set(weight_scores(posterior, "snr"))


@pytest.fixture
def linear() -> Posterior:
    """mean 3, -1, 2, sigma 1, 1/2, 4: one layer small enough for pencil and paper."""
    network = nn.Module()
    network.encoder = nn.Linear(3, 1)
    posterior = Posterior(network)
    with torch.no_grad():
        posterior.means.copy_(torch.tensor([3.0, -1.0, 2.0, 0.1]))
        posterior.log_variances.copy_(2 * torch.tensor([1.0, 0.5, 4.0, 9.0]).log())
    return posterior


def test_scores_by_hand(linear: Posterior) -> None:
    expected = {"snr": [3, 2, 0.5], "magnitude": [3, 1, 2], "variance": [1, 2, 0.25]}
    for by, values in expected.items():
        scores = weight_scores(linear, by)
        assert list(scores) == ["encoder.weight"]  # the bias stays
        torch.testing.assert_close(scores["encoder.weight"], torch.tensor([values], dtype=torch.float32))
    first = {"snr": 2, "magnitude": 1, "variance": 2}
    for by, place in first.items():
        masks = choose_masks(linear, Pruning(by, 1 / 3), 1 / 3, {})
        assert (~masks["encoder.weight"]).flatten().nonzero().item() == place


def test_a_random_order_is_the_seeds_own(linear: Posterior) -> None:
    a, b, c = (weight_scores(linear, "random", seed=seed)["encoder.weight"] for seed in (1, 1, 2))
    assert torch.equal(a, b) and not torch.equal(a, c)


def test_the_parts_and_what_is_not_random() -> None:
    posterior = posterior_over(VIT)
    inside, everything = weight_scores(posterior, "snr"), weight_scores(posterior, "snr", "all")
    assert set(everything) - set(inside) == {"projector.weight"}
    weights = {s.name for s in posterior.segments if s.kind == "weight"}
    assert set(everything) == weights and "encoder.backbone.norm.weight" not in weights
    plain = posterior_over(VIT, "none")
    assert set(weight_scores(plain, "magnitude")) == set(inside)
    with pytest.raises(BadInput, match="--by magnitude"):
        weight_scores(plain, "snr")
    mixed = posterior_over(VIT, "no_conv")  # the patch convolution has no variance: only magnitudes can tell
    assert set(inside) - set(weight_scores(mixed, "snr")) == {"encoder.backbone.stem.weight"}
    assert set(weight_scores(mixed, "random")) == set(inside)


@settings(deadline=None, max_examples=40)
@given(
    st.lists(st.lists(st.integers(0, 20), min_size=1, max_size=30), min_size=1, max_size=4),
    st.floats(0, 0.999),
    st.floats(0, 0.999),
    st.sampled_from(["layer", "global"]),
)
def test_the_lowest_go_and_more_sparsity_takes_more(rows: list[list[int]], a: float, b: float, scope: str) -> None:
    scores = {str(i): torch.tensor(row, dtype=torch.float32) for i, row in enumerate(rows)}
    few, many = (drop_weights(scores, s, scope) for s in sorted((a, b)))
    for name in scores:
        assert not (many[name] & ~few[name]).any()
    groups = [[name] for name in scores] if scope == "layer" else [list(scores)]
    for group in groups:
        score, kept = (torch.cat([t[name] for name in group]) for t in (scores, many))
        assert int((~kept).sum()) == round(max(a, b) * len(score))
        if kept.any() and not kept.all():
            assert score[~kept].max() <= score[kept].min()


def test_magnitude_prunes_what_torch_prunes() -> None:
    layers = {"a": nn.Linear(13, 7), "b": nn.Linear(7, 5)}
    scores = {name: layer.weight.detach().abs() for name, layer in layers.items()}
    for sparsity in (0.1, 0.5, 0.9):
        for name, layer in layers.items():
            pruner = torch_prune.L1Unstructured(round(sparsity * layer.weight.numel()))
            expected = pruner.compute_mask(layer.weight, torch.ones_like(layer.weight))
            assert torch.equal(drop_weights(scores, sparsity)[name], expected.bool())
        together = torch.cat([s.flatten() for s in scores.values()])
        pruner = torch_prune.L1Unstructured(round(sparsity * len(together)))
        kept = drop_weights(scores, sparsity, "global")
        assert torch.equal(
            torch.cat([k.flatten() for k in kept.values()]), pruner.compute_mask(together, together * 0 + 1) > 0
        )


@pytest.mark.parametrize("structured", [False, True])
@pytest.mark.parametrize("by", ["snr", "variance", "random"])
def test_what_was_pruned_stays_pruned(by: str, structured: bool) -> None:
    posterior = posterior_over(VIT)
    how = Pruning(by, 0.8, structured=structured)
    first = choose_masks(posterior, how, 0.4, {})
    second = choose_masks(posterior, how, 0.8, first)
    again = choose_masks(posterior, how, 0.4, first)
    for name, mask in first.items():
        assert torch.equal(again[name], mask)
        assert not (second[name] & ~mask).any()
    prunable = {name: mask for name, mask in first.items() if name.endswith("weight")}
    assert abs(sparsity_of(second, prunable) - 0.8) < (0.01 if not structured else 0.06)


def test_rounds_take_the_same_part_of_what_is_left() -> None:
    how = Pruning("snr", 0.875, rounds=3, epochs=1)
    assert [how.sparsity_after(r, 0.0) for r in (1, 2, 3)] == pytest.approx([0.5, 0.75, 0.875])
    assert how.sparsity_after(3, 0.3) == pytest.approx(0.875)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"sparsity": 1.0}, "between 0 and 1"),
        ({"sparsity": math.nan}, "between 0 and 1"),
        ({"by": "luck"}, "one of snr"),
        ({"rounds": 2}, "give --epochs"),
        ({"rounds": 0}, "at least 1"),
        ({"epochs": -1}, "not negative"),
        ({"structured": True, "part": "all"}, "leave out --part"),
    ],
)
def test_what_cannot_be_pruned_is_refused(wrong: dict[str, object], says: str) -> None:
    with pytest.raises(BadInput, match=says):
        Pruning(**({"by": "snr", "sparsity": 0.5} | wrong))


# --------------------------------------------------------------------------------------------------------- whole units


def test_the_units_of_a_vit_by_hand() -> None:
    encoder = build_encoder(Model(width=8, depth=1, heads=2, patch=4), (1, 8, 8))
    heads, neurons = layers_of(encoder)
    assert (heads.kind, heads.units, neurons.kind, neurons.units) == ("heads", 2, "neurons", 32)
    path = "backbone.blocks.0."
    scores = {f"{path}attention.qkv.weight": torch.ones(24, 8), f"{path}attention.output.weight": torch.ones(8, 8)}
    scores[f"{path}attention.qkv.weight"][12:16] = 0.0  # keys (rows 8 to 16) of the second head
    masks = drop_units(encoder, scores, 0.5)
    gone = (~masks[f"{path}attention.qkv.weight"]).all(dim=1).nonzero()[:, 0].tolist()
    assert gone == [4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23]  # of queries, keys and values
    assert (~masks[f"{path}attention.qkv.bias"]).nonzero()[:, 0].tolist() == gone
    assert (~masks[f"{path}attention.output.weight"]).all(dim=0).nonzero()[:, 0].tolist() == [4, 5, 6, 7]
    assert set(masks) == set(scores) | {f"{path}attention.qkv.bias"}


@pytest.mark.parametrize("scope", ["layer", "global"])
@pytest.mark.parametrize("name", MODELS)
def test_an_encoder_without_its_empty_units_computes_the_same(name: str, scope: str) -> None:
    posterior = posterior_over(MODELS[name])
    encoder = posterior.part("encoder").unwrapped()
    with torch.no_grad():
        for parameter in encoder.parameters():
            parameter.mul_(0.3)
    images = torch.rand(6, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    encoder.train()(images)  # statistics of BatchNorm that are not the initial ones
    encoder.eval()
    masks = choose_masks(posterior, Pruning("snr", 0.5, scope, structured=True), 0.5, {})
    masked = without(encoder, masks)
    smaller = compact(masked, {k.removeprefix("encoder."): v for k, v in masks.items()})
    assert numbers(smaller) < 0.8 * numbers(encoder) and stored_bytes(smaller) < 0.8 * stored_bytes(encoder)
    with torch.no_grad():
        a, b = masked.double()(images), smaller.double()(images)
    torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)
    zeros = sum(int((p == 0).sum()) for p in smaller.parameters())
    assert zeros == 0  # nothing empty is left


def test_each_layer_keeps_a_unit_and_the_part_is_near() -> None:
    posterior = posterior_over(VIT)
    scores = weight_scores(posterior, "magnitude")
    for scope in ("layer", "global"):
        for sparsity in (0.25, 0.5, 0.99):
            masks = drop_units(posterior.module, scores, sparsity, scope)
            for layer in layers_of(posterior.module):
                member = layer.members[0]
                kept = int(member.by_unit(masks[member.name]).any(dim=1).sum())
                assert kept >= 1
                if scope == "layer":
                    assert kept == max(1, round((1 - sparsity) * layer.units))


def test_encoders_without_units_say_so() -> None:
    group = posterior_over(Model(backbone="resnet-18", width=4, norm="group"))
    with pytest.raises(BadInput, match="leave out --structured"):
        choose_masks(group, Pruning("snr", 0.5, structured=True), 0.5, {})


def test_single_weights_leave_the_shapes_alone_and_compress() -> None:
    posterior = posterior_over(VIT)
    encoder = posterior.part("encoder").unwrapped()
    masks = choose_masks(posterior, Pruning("snr", 0.9), 0.9, {})
    masked = without(encoder, masks)
    own = {k.removeprefix("encoder."): v for k, v in masks.items()}
    assert numbers(compact(masked, own)) == numbers(encoder)
    sizes = [stored_bytes(m, compressed=c) for c in (False, True) for m in (encoder, masked)]
    assert sizes[0] == sizes[1] == sum(t.numel() * t.element_size() for t in encoder.state_dict().values())
    assert sizes[3] < 0.5 * sizes[2]
