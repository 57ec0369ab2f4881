"""Scores of several runs: their draws pooled as if one run had them all, and what cannot be one ensemble."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import byov
import handmade
from byov._core.errors import BadInput
from byov.inference.run import ReferenceSet, Run, at_draw
from byov.scoring.ensemble import EnsembleScorer
from byov.scoring.scores import NEAR_SHARES, NEIGHBOURS, Scorer, neighbour_count, usual_images
from byov.scoring.table import identity

IMAGES = handmade.images(7, seed=1)
DRAWS = 3


@pytest.fixture
def runs(tmp_path: Path) -> list[Run]:
    torch.manual_seed(0)
    return [handmade.run(tmp_path / name, handmade.Affine(width), sigma=0.3) for name, width in (("a", 6), ("b", 5))]


@pytest.fixture
def same_source(runs: list[Run]) -> list[Run]:
    """The same two, from one source."""
    return [runs[0], replace(runs[1], config=replace(runs[1].config, data=runs[0].config.data))]


def by_hand(runs: list[Run], draws: int) -> torch.Tensor:
    """The definition, pair by pair: neighbours in common at each size, times the mean distance."""
    among = usual_images(ReferenceSet(runs[0]))
    near, far = [], []
    for run in runs:
        reference = ReferenceSet(run)
        for k in range(draws):
            with at_draw(run.encoder, run.config.seed, k):
                images = reference.aligned(run.encoder(IMAGES), k)
            others = reference.aligned(reference.at(k).features, k)[among]
            centre = reference.means.moments.mean.float()
            cosine = torch.nn.functional.cosine_similarity
            near.append(cosine(images[:, None], others[None], dim=2).argsort(1, descending=True))
            centred = cosine((images - centre)[:, None], (others - centre)[None], dim=2)
            far.append(1 - centred.topk(NEIGHBOURS, dim=1).values.mean(1))
    apart = []
    for share in NEAR_SHARES:
        size = neighbour_count(len(among), share)
        for i, one in enumerate(near):
            for other in near[:i]:
                common = [len(set(a[:size].tolist()) & set(b[:size].tolist())) for a, b in zip(one, other, strict=True)]
                apart.append(1 - torch.tensor(common) / size)
    return torch.stack(apart).double().mean(0) * torch.stack(far).double().mean(0)


def test_the_uncertainty_is_that_of_all_draws_of_all_runs(runs: list[Run]) -> None:
    found = EnsembleScorer(runs[0], runs[1:], DRAWS).scores(IMAGES)
    torch.testing.assert_close(found.uncertainty, by_hand(runs, DRAWS), rtol=1e-4, atol=1e-6)


def test_alone_it_is_a_scorer_and_the_first_run_gives_oddness_and_embedding(runs: list[Run]) -> None:
    alone = Scorer(runs[0], draws=DRAWS).scores(IMAGES)
    torch.testing.assert_close(EnsembleScorer(runs[0], [], DRAWS).scores(IMAGES), alone)
    both = EnsembleScorer(runs[0], runs[1:], DRAWS).scores(IMAGES)
    for name in ("oddness", "oddness_percentile", "embedding"):
        torch.testing.assert_close(getattr(both, name), getattr(alone, name))
    assert not torch.allclose(both.uncertainty, alone.uncertainty)


def test_percentiles_are_among_the_ensembles_own_scores(runs: list[Run]) -> None:
    scorer = EnsembleScorer(runs[0], runs[1:], DRAWS)
    among = scorer.scores(ReferenceSet(runs[0]).calibration_images())
    assert sorted(among.uncertainty_percentile.tolist()) == [5 * i + 2.5 for i in range(20)]
    alone = Scorer(runs[0], draws=DRAWS).calibration["uncertainty"]
    assert not torch.allclose(scorer.calibration["uncertainty"], alone)  # cached under another name


def test_runs_without_random_weights_give_their_means(tmp_path: Path) -> None:
    torch.manual_seed(0)
    plain = [handmade.run(tmp_path / name, handmade.Affine(6), where="none") for name in "ab"]
    found = EnsembleScorer(plain[0], plain[1:]).scores(IMAGES)
    assert found.uncertainty.std() > 0 and found.uncertainty_percentile is not None


def test_a_table_names_all_runs(runs: list[Run], tmp_path: Path) -> None:
    from byov.data.sources import open_stream

    stream = open_stream(runs[0].config.data, handmade.SIDE)
    settings = identity(EnsembleScorer(runs[0], runs[1:], DRAWS), stream)
    assert len(settings["ensemble"]) == 1 and str(runs[1].folder) in settings["ensemble"][0]
    assert "ensemble" not in identity(Scorer(runs[0], draws=DRAWS), stream)


def test_what_cannot_be_one_ensemble(runs: list[Run], tmp_path: Path) -> None:
    torch.manual_seed(1)
    smaller = handmade.run(tmp_path / "c", handmade.Affine(6), calibration=30)
    changed = handmade.run(tmp_path / "d", handmade.Affine(6), source=handmade.images(120, seed=5))
    renamed = replace(changed, config=replace(changed.config, data=runs[0].config.data))
    for other, says in (
        (runs[0], "is in the ensemble twice"),
        (smaller, "cannot be one ensemble, since"),
        (renamed, "since their images have changed between them"),
    ):
        with pytest.raises(BadInput, match=says):
            EnsembleScorer(runs[0], [other])
    with pytest.raises(BadInput, match="images is 100 in one and 90 in the other"):
        same = replace(smaller, config=replace(smaller.config, data=runs[0].config.data))
        EnsembleScorer(same, runs[:1])


def test_from_python(runs: list[Run]) -> None:
    run = byov.Run(**vars(runs[0]))
    found = run.score(IMAGES, draws=DRAWS, ensemble=runs[1:])
    torch.testing.assert_close(found.uncertainty, EnsembleScorer(runs[0], runs[1:], DRAWS).scores(IMAGES).uncertainty)
    assert not torch.allclose(run.score(IMAGES, draws=DRAWS).uncertainty, found.uncertainty)
    with pytest.raises(BadInput, match="leave out ensemble or fast"):
        run.score(IMAGES, fast=True, ensemble=runs[1:])
