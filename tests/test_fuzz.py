"""A short form of the fuzzing of `make chaos` (tests/fuzz.py): nothing is lost."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

import fuzz

CASES = 400
SEED = 20  # another than that of `make chaos`


@pytest.fixture(scope="module")
def campaigns(tmp_path_factory: pytest.TempPathFactory) -> dict[str, fuzz.Campaign]:
    return {campaign.name: campaign for campaign in fuzz.campaigns(tmp_path_factory.mktemp("fuzz"))}


@pytest.mark.parametrize(
    "name", ["images", "settings", "checkpoints", "weights", "caches", "reference", "logs", "tables"]
)
def test_no_damaged_file_ends_in_a_traceback(campaigns: dict[str, fuzz.Campaign], name: str) -> None:
    share = campaigns[name].share / sum(campaign.share for campaign in campaigns.values())
    result = fuzz.campaign_run(campaigns[name], range(max(8, int(CASES * share))), SEED)
    assert not result.lost, "\n".join(result.lost)
    assert result.read + result.refused == result.cases


def test_a_case_can_be_repeated(campaigns: dict[str, fuzz.Campaign]) -> None:
    for campaign in campaigns.values():
        first, second = (campaign.make(random.Random("0 x 17")) for _ in range(2))
        assert first == second


def test_what_is_lost_is_found(tmp_path: Path) -> None:
    def read(data: bytes) -> None:
        if data == b"bad":
            raise KeyError("x")

    bad = fuzz.Campaign("a", lambda rng: rng.choice((b"good", b"bad")), read)
    result = fuzz.campaign_run(bad, range(20), 0)
    assert result.lost and "KeyError" in result.lost[0] and result.read + len(result.lost) == 20
