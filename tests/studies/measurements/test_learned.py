"""Whether an encoder has learned: compared with its rivals on the same images, and what is reported."""

from __future__ import annotations

from typing import Any

import pytest

from byov.studies.framework.lab import Lab
from byov.studies.measurements.learned import RIVALS, learned_caveats


def row(seed: int, over: float, method: str = "byov") -> dict[str, Any]:
    found: dict[str, Any] = {"method": method, "seed": seed}
    return (
        found | {f"{name}.difference": over + 0.001 * seed for name in RIVALS} | {f"{n}.error": 0.001 for n in RIVALS}
    )


def test_both_rivals_must_be_beaten_with_an_interval() -> None:
    assert learned_caveats([row(seed, 0.02) for seed in range(3)]) == []
    weak = [row(seed, 0.02) | {"pixels.difference": 0.02 * (-1) ** seed} for seed in range(3)]
    (caveat,) = learned_caveats(weak)
    assert "raw pixels" in caveat and "untrained" not in caveat
    assert learned_caveats([row(0, 0.003)]) == []  # one seed: the images alone
    assert len(learned_caveats([row(0, 0.001)])) == 1
    assert len(learned_caveats([])) == 1  # not measured


def test_the_first_arm_of_each_method_is_checked(lab: Lab) -> None:
    configs = [
        lab.config("byol"),
        lab.config("byov"),
        lab.config("byov", 0, {"posterior.beta_end": 0.5}),
        lab.config("supervised-bbb"),
    ]
    lab.train(configs[:2])
    found = lab.learned(configs)
    assert [r["method"] for r in found] == ["byol", "byov"]
    for r in found:
        for name in RIVALS:
            assert r[f"{name}.difference"] == pytest.approx(r["top1"] - r[f"{name}.top1"])
    assert found[0]["pixels.top1"] == found[1]["pixels.top1"] > 0.5
    assert lab.learned(configs) == found  # from the cache
