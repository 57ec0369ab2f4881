"""Settings that came later leave the names of earlier runs alone."""

from __future__ import annotations

import json
from dataclasses import replace
from hashlib import sha256

from byov.config import Config, Objective, flatten, to_dict
from byov.studies.framework.lab import identity


def test_runs_of_the_first_studies_keep_their_names() -> None:
    """The hash of what a config was before `posterior.scale` and `objective` existed."""
    flat = {k: v for k, v in flatten(to_dict(Config())).items() if k not in ("threads", "device", "posterior.scale")}
    flat = {k: v for k, v in flat.items() if not k.startswith(("monitor.", "objective."))}
    assert identity(Config()) == sha256(json.dumps(flat, sort_keys=True).encode()).hexdigest()[:12]


def test_a_later_setting_counts_once_it_is_used() -> None:
    config = Config()
    soft = replace(config, posterior=replace(config.posterior, scale="softplus"))
    pushed = replace(config, objective=Objective("byol_negatives"))
    stronger = replace(config, objective=Objective("byol_negatives", negatives_weight=2.0))
    assert len({identity(c) for c in (config, soft, pushed, stronger)}) == 4
