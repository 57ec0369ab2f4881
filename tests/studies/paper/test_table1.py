"""Table 1's rows, its figure, and its claims on the paper's own numbers."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from torch import nn

from byov.backbones.vit import ViT
from byov.posterior import Posterior
from byov.studies.framework.claims import verdict
from byov.studies.framework.lab import Lab
from byov.studies.paper import fig2, table1
from byov.studies.paper.table1 import BASELINE, COMPARISONS, TABLE, Setting

BEST = 75.57  # the paper's best fully Bayesian model


def top(setting: Setting, measure: str) -> float:
    return (getattr(setting, f"paper_{measure}") or BEST) / 100


def rows(seeds: int = 2) -> list[dict[str, Any]]:
    """The paper's own numbers, seeds a little apart."""
    by_name = {setting.arm: setting for setting in TABLE}
    return [
        {
            **{"arm": arm, "seed": seed, "at": "means", "against": reference, **by_name[arm]._asdict()},
            **{m: top(by_name[arm], m) for m in ("top1", "top5")},
            **{
                f"{m}.difference": (top(by_name[arm], m) - top(by_name[reference], m)) * (1 + 0.01 * seed)
                for m in ("top1", "top5")
            },
            **{f"{m}.error": 1e-4 for m in ("top1", "top5")},
        }
        for reference, others in COMPARISONS.items()
        for arm in (reference, *others)
        for seed in range(seeds)
    ]


def test_the_papers_numbers_show_its_claims_at_their_sizes() -> None:
    for claim in table1.CLAIMS:
        assert verdict(claim, rows()).word == "shown", claim.says
        assert claim.effects(rows())[0].value == pytest.approx(claim.size), claim.says
        high, *taken = (float(number) for number in re.findall(r"\d+\.\d+", claim.paper))
        assert claim.size == pytest.approx(high - sum(taken))


def test_the_opposite_is_found_where_signs_are_turned() -> None:
    turned = [row | {"top1.difference": -row["top1.difference"]} for row in rows()]
    assert {verdict(claim, turned).word for claim in table1.CLAIMS} == {"opposite"}


def test_every_row_is_drawn_next_to_the_papers() -> None:
    figure = table1.draw(rows(), "micro")
    left, right = figure.axes
    assert len(left.get_yticklabels()) == len(TABLE) == 11
    paper = [line for line in left.lines if line.get_marker() == "D"]
    assert [line.get_xdata()[0] for line in paper][:3] == pytest.approx([73.68 - 75.97, 73.97 - 75.97, 69.73 - 75.97])
    assert any("73.68" in text.get_text() for text in left.texts) and any("91.43" in t.get_text() for t in right.texts)


@pytest.mark.parametrize("stem", ["patch", "conv"])
def test_no_conv_makes_all_random_but_the_convolutions_that_cut_patches(stem: Any) -> None:
    """Of a stem of several layers too; its norms are random, as all norms are."""
    posterior = Posterior(ViT((8, 8), 4, size=(16, 1, 2), stem=stem), where="no_conv")  # type: ignore[arg-type]
    fixed = dict(posterior.module.named_parameters())
    convolutions = [module for module in posterior.module.modules() if isinstance(module, nn.Conv2d)]
    assert len(convolutions) == {"patch": 1, "conv": 3}[stem]
    assert {id(p) for p in fixed.values()} == {id(p) for c in convolutions for p in (c.weight, c.bias)}
    random = {segment.name for segment in posterior.segments}
    assert {"blocks.0.norm1.weight", "blocks.0.attention.qkv.weight", "norm.bias"} < random
    assert ("stem.1.weight" in random) == (stem == "conv")


def test_the_study_from_runs_to_figure(lab: Lab) -> None:
    lab.seeds = 1
    arms = table1.arms(lab)
    wheres = {arm: config(0).posterior.where for arm, config in arms.items()}
    assert wheres["no_conv teacher_mean 0->1"] == "no_conv" and wheres["linear standard 1->1"] == "linear"
    fully = {lab.path(arms[setting.arm](0)) for setting in TABLE if setting.where in ("all", BASELINE)}
    assert fully < {lab.path(config) for config in fig2.runs(lab)}  # nothing is trained twice
    found = table1.results(lab)
    assert {row["arm"] for row in found if row["against"] == BASELINE} == {setting.arm for setting in TABLE}
    assert {row["against"] for row in found} == set(COMPARISONS)
    json.dumps(found, allow_nan=False)  # strict
    table1.draw(found, "tiny")
