"""The benchmark room's arithmetic: statistics of the conductor, and a table that hides no miss."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

import handmade
from byov._core.errors import BadInput
from byov.inference.run import ReferenceSet, before_draws
from byov.scoring import scores
from byov.scoring.ensemble import EnsembleScorer
from byov.studies.beyond.score import candidate_scores

ROOM = Path(__file__).resolve().parents[1] / "benchmarks"
sys.path.append(str(ROOM))  # its files are scripts, not a package

import accuracy  # noqa: E402
import bayesian_step  # noqa: E402
import cached_views  # noqa: E402
import conductor  # noqa: E402
import ensemble_ablation  # noqa: E402
import inference  # noqa: E402
import memory  # noqa: E402
import photos  # noqa: E402
import predictive  # noqa: E402
import profiled  # noqa: E402
import run  # noqa: E402
import score_ablation  # noqa: E402
import table  # noqa: E402
import tricks  # noqa: E402


def test_summary_is_median_and_quartiles() -> None:
    assert conductor.summary([5.0, 1.0, 2.0, 3.0, 4.0]) == (3.0, 2.0, 4.0)
    assert conductor.summary([7.0]) == (7.0, 7.0, 7.0)


def test_ratios_are_taken_within_a_round() -> None:
    # The machine was ten times slower in the second round; the ratio is 2 in both.
    times = {"a": [2.0, 20.0], "b": [1.0, 10.0]}
    assert conductor.ratios(times, "a", "b") == (2.0, 2.0, 2.0)


def test_a_turn_counts_its_steps_on() -> None:
    seen: list[int] = []
    turn = conductor.steps_of(seen.append)
    turn(2)
    turn(3)
    assert seen == [0, 1, 2, 3, 4]


def results(help_seconds: float) -> dict:
    numbers = {
        "seconds": {"byov --help": (help_seconds, 0.9 * help_seconds, 1.1 * help_seconds)},
        "import_ratio": (1.1, 1.0, 1.2),
    }
    machine = {"cpu": "a CPU", "cores": 2, "memory_gib": 24.0, "python": "3.11", "versions": {"torch": "2.13.0"}}
    how = {"date": "2026-01-01", "seconds": 60.0, "threads": 2, "quick": False, "busy": False}
    return {"machine": machine, "parts": {"startup": how | {"numbers": numbers}}}


def test_a_miss_is_marked_and_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = table.render(results(0.4), tmp_path)
    assert "**MISS**" in text
    assert "- `byov --help`: not explained yet." in text
    monkeypatch.setitem(table.WHY, "`byov --help`", "the disk was cold.")
    assert "- `byov --help`: the disk was cold." in table.render(results(0.4), tmp_path)


def test_a_bar_that_is_met_is_not_a_miss(tmp_path: Path) -> None:
    text = table.render(results(0.2), tmp_path)
    assert "MISS" not in text
    assert "| ≤ 0.3 s: met |" in text


def test_every_part_is_run() -> None:
    assert set(run.PARTS) == {path.stem for path in ROOM.glob("*.py") if "\ndef measure(" in path.read_text()}


def test_the_predictive_counts_the_reference_set_only_in_words() -> None:
    speed = {
        "images": 1000,
        "draws": 4,
        "bank": 500,
        "images_per_second": {"byov, bank cached": 950.0, "byov, bank made too": 640.0},
        "rate": {"byov, bank cached": (0.95, 0.9, 1.0), "byov, bank made too": (0.64, 0.6, 0.7)},
        "speedup": {"bayesian-torch": (1.3, 1.2, 1.4)},
    }
    memory = predictive.compare({5: [400.0, 424.0], 200: [424.0, 440.0]})
    rows = table.rows({"predictive": {"speed": {"1000": speed}, "memory": memory}})
    assert [row.missed for row in rows] == [False, True, False, True]
    assert "0.960x if the 500 reference images" in rows[1].note
    assert rows[3].note == "424 against 400 MiB"
    assert rows[3].spread == (1.0, 1.1)


def test_byovs_own_way_is_chosen_before_the_measured_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """The way that is chosen plays for the bar, also where the other one was luckier in the measured run."""
    chosen, lucky = bayesian_step.OURS
    asked: list[list[str]] = []

    def fastest(candidates: list[conductor.Variant], steps: int) -> conductor.Variant:
        asked.append([candidate.name for candidate in candidates])
        return candidates[0]

    def interleave(variants: list[conductor.Variant], rounds: int, steps: int) -> dict[str, list[float]]:
        return {variant.name: [1.0 if variant.name == lucky else 2.0] * rounds for variant in variants}

    monkeypatch.setattr(bayesian_step, "fastest", fastest)
    monkeypatch.setattr(bayesian_step, "interleave", interleave)
    measured = bayesian_step.measure(quick=True)
    assert asked.count([chosen, lucky]) == len(measured)  # for each size
    assert all(it["ours"] == chosen and it["speedup"]["blitz"][0] == 1.0 for it in measured.values())
    notes = [row.note for row in table.rows({"bayesian_step": measured}) if row.against == "deterministic step"]
    assert notes == [chosen] * len(measured)
    assert f"{lucky} (for information)" in table._details({"bayesian_step": measured})
    assert f"{chosen} (for information)" not in table._details({"bayesian_step": measured})


def test_a_bar_within_the_spread_is_missed_by_less_than_it() -> None:
    assert "not explained yet" in table._misses([table.Row("a", "b", 1.1, spread=(1.06, 1.2), bar=table.most(1.05))])
    assert "less than its own spread" in table._misses(
        [table.Row("a", "b", 1.1, spread=(1.0, 1.2), bar=table.most(1.05))]
    )


def test_memory_is_the_ratio_of_the_least_peaks_and_its_spread_all_runs() -> None:
    found = memory.compare({"a": [(100.0, 300.0), (100.0, 330.0)], "b": [(100.0, 200.0), (100.0, 220.0)]}, "b")
    assert found["ratio"]["a"] == 1.5
    assert found["spread"]["a"] == (300 / 220, 330 / 200)
    assert found["ratio_above_imports"]["a"] == 2.0


def test_memory_at_21M_weights_stands_beside_our_byol_with_its_miss() -> None:
    small = memory.compare({name: [(100.0, 200.0)] for name in memory.VARIANTS}, memory.PLAIN)
    large = memory.compare({memory.BYOL: [(100.0, 300.0)], memory.BYOV: [(100.0, 450.0)]}, memory.BYOL)
    batches = {str(batch): large for batch in memory.BATCHES}
    rows = table.rows({"memory": small | {"large": batches}})
    assert [row.missed for row in rows] == [False, False, True, True]
    assert all(row.spread == (1.5, 1.5) for row in rows[2:])
    assert "40 bytes per weight" in table._misses(rows)
    assert "not explained" not in table._misses(rows)
    assert len(table.rows({"memory": small})) == 2  # older results


def test_every_part_has_rows_and_one_that_lacks_is_named(tmp_path: Path) -> None:
    assert set(table.MAKERS) == set(run.PARTS)
    found = results(0.2)
    found["parts"]["compiled"] = found["parts"]["startup"] | {"numbers": {}}  # what a quick run leaves
    told = next(line for line in table.render(found, tmp_path).splitlines() if "Not measured yet" in line)
    assert all(part in told for part in run.PARTS if part != "startup")
    assert "startup" not in told


@pytest.mark.parametrize(("gain", "told"), [(1.0, "gains nothing"), (1.3, "gains, but")])
def test_what_is_said_of_compiling_follows_from_its_gain(gain: float, told: str) -> None:
    numbers = {"milliseconds": {"compiled": 10.0, "eager": 10.0 * gain}, "gain": (gain, gain, gain)}
    assert table.rows({"compiled": {"2.7M": numbers}})[0].note.startswith(told)


@pytest.mark.parametrize("setting", ["slice", "resample"])
def test_an_explanation_is_of_the_library_whatever_its_setting(setting: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kornia = f"kornia, {setting}"
    monkeypatch.setitem(table.WHY, "views, 32 px / kornia: times faster", "a reason.")
    numbers = {"images_per_second": {"byov": 200.0, kornia: 100.0}, "speedup": {kornia: (2.0, 1.9, 2.1)}}
    missed = table.rows({"views": {"32": numbers}})
    assert missed[0].missed and missed[0].note == f"{setting}; 200 against 100 images/s"
    assert "not explained" not in table._misses(missed)
    assert "at 32 px blur is off" in table._below({"views": {"32": numbers}})


def test_growth_with_processes_has_slope_and_efficiency() -> None:
    rates = {"1 process x 1 thread": 200.0, "1 process x 2 threads": 300.0, "2 processes x 1 thread": 360.0}
    shared = {"processes_to_threads": (1.2, 1.1, 1.3), "communication_share": (0.1, 0.1, 0.1)}
    part = shared | {"images_per_second": rates, "speedup_of_two_processes": (1.8, 1.7, 1.9)}
    row = next(row for row in table.rows({"processes": part}) if row.what == "growth with processes")
    assert row.value == 0.9 and row.spread == (0.85, 0.95)
    assert "160 images/s per process; 2 cores allow no third point" in row.note


def test_rates_say_when_and_how_they_were_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    def interleave(variants: list[conductor.Variant], rounds: int, steps: int) -> dict[str, list[float]]:
        return {variant.name: [1.0 + variant.arguments["workers"], 9.0] for variant in variants}

    monkeypatch.setattr(accuracy, "interleave", interleave)
    monkeypatch.setattr(accuracy, "machine", lambda: {"versions": {"torch": "2.13.0"}})
    rates = accuracy.rates(rounds=2, steps=1)
    assert rates["lightly_workers"] == 0
    assert rates["lightly_candidates"] == {"0 workers": 1.0, "1 workers": 2.0, "2 workers": 3.0}
    assert {"date", "threads", "busy"} <= set(rates) and rates["versions"] == {"torch": "2.13.0"}


def test_the_flags_of_bench_do_not_stop_bench_accuracy() -> None:
    assert accuracy.options_of(["--busy"]).busy


@pytest.mark.parametrize("how", [{}, {"date": "2026-01-01", "threads": 2, "busy": False}])
def test_accuracy_says_how_its_steps_were_found(tmp_path: Path, how: dict) -> None:
    rates = {"seconds": {"byov": 0.25, "byol": 0.2, "lightly": 0.35}, "lightly_workers": 0} | how
    (tmp_path / "rates.json").write_text(json.dumps(rates))
    run = {"method": "byov", "seed": 0, "steps": 10, "images": 640, "top1": 0.5, "minutes": 10.0}
    (tmp_path / "byov-0.json").write_text(json.dumps(run | {"settings": {"optim.clip": 1.0}}))
    text = table._accuracy(tmp_path, {"byol_step": {"batch": 128, "speedup_over_lightly": (1.38, 1.3, 1.4)}})
    assert "byov clips gradients (`optim.clip` 1.0); lightly's documented loop does not." in text
    assert "timed interleaved" in text and ("2026-01-01" in text) == bool(how)
    assert "1.40 times BYOV's; in the table's whole step (batch 128) 1.38 times." in text


def test_without_results_there_is_nothing_to_render(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["run.py", "--render", "--out", str(tmp_path / "empty")])
    with pytest.raises(SystemExit, match="2"):
        run.main()
    path = tmp_path / "empty" / "results.json"
    assert capsys.readouterr().err == f"{path} does not exist: measure first, without --render.\n"
    assert not (tmp_path / "empty").exists()


def test_inference_has_its_bar_on_the_fastest_loop_and_a_row_for_a_draw() -> None:
    times = {inference.PLAIN: [4.0], inference.LAST: [3.0], inference.FROZEN: [2.0]}
    times |= {inference.OURS: [2.0], inference.DRAW: [0.5]}
    part = inference.compare(times, count=100) | {"loops": dict.fromkeys(inference.LOOPS, "batch 64")}
    rows = table.rows({"inference": {"96": part}})
    assert [row.value for row in rows] == [2.0, 1.5, 1.0, 4.0]
    assert [row.bar is not None for row in rows] == [False, False, True, False]
    assert rows[2].missed and rows[2].against == "timm, traced and frozen: times faster"
    assert rows[0].note == "50 against 25 images/s; batch 64"
    assert rows[3].note.startswith("200 images/s; ")


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_every_variant_of_inference_computes_the_same_features(monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        inference.timm_lite0(inference.weights())
    except ImportError:
        pytest.skip("timm is not installed")
    monkeypatch.setattr(inference, "steps_of", lambda step: step)
    images = {"side": 32, "count": 4}
    ours = inference.ours(**images)(0)
    assert ours.shape == (4, 1280)
    for how in inference.LOOPS.values():
        torch.testing.assert_close(inference.loop(**images, batch=2, **how)(0), ours, rtol=1e-3, atol=1e-3)


def test_a_frozen_network_may_choose_its_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inference, "fastest", lambda candidates: candidates[-1])
    frozen, plain = (inference._best({"side": 96, "frozen": frozen}, (32, 64)) for frozen in (True, False))
    assert inference._setting(frozen) == "batch 64, channels_last"
    assert inference._setting(plain) == "batch 64"


def test_photographs_are_encoded_alike_with_the_same_seed_and_repeats_differ(tmp_path: Path) -> None:
    (tmp_path / "photos" / "a").mkdir(parents=True)
    pixels = np.random.default_rng(0).integers(0, 256, (40, 90, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "photos" / "wide.jpg")
    Image.fromarray(pixels[:, :30, 0]).save(tmp_path / "photos" / "a" / "high-grey.png")
    first, again = (photos.reencode(tmp_path / "photos", tmp_path / name, 5) for name in ("first", "again"))
    other = photos.reencode(tmp_path / "photos", tmp_path / "other", 5, seed=1)
    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in again]
    assert [path.read_bytes() for path in first] != [path.read_bytes() for path in other]
    assert len({path.read_bytes() for path in first}) == 5
    for path in first:
        with Image.open(path) as image:
            assert image.size == (500, 375) and image.format == "JPEG" and image.mode == "RGB"


def test_photographs_that_are_not_there_are_bad_input(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="there are no images in"):
        photos.reencode(tmp_path, tmp_path / "out", 5)


def test_photos_report_rates_and_the_cost_of_draws() -> None:
    times = {photos.STILL: [1.0, 10.0], photos.DRAWN: [2.0, 20.0]}
    times |= {photos.LOOP: [1.5, 15.0], photos.LOOP_DRAWN: [8.0, 80.0]}
    how = {"images": 600, "rounds": 2, "draws": 8, "reference": 570, "threads": 2, "busy": True}
    text = "\n".join(photos.lines(how | photos.compare(times, 300)))
    assert "| no draws: `byov score` / loop, times faster | 1.50 | 1.50 - 1.50 |" in text
    assert "| 8 draws: `byov score` / loop, times faster | 4.00 | 4.00 - 4.00 |" in text
    assert "| `byov score`: time with 8 draws / without | 2.00 | 2.00 - 2.00 |" in text
    assert "a busy machine" in text


def test_few_photographs_are_scored_in_fewer_rounds() -> None:
    rounds = [photos.options_of(["--photos", "x", "--images", str(n)]).rounds for n in (100, 600, 10_000)]
    assert rounds == [1, 2, 3]


@pytest.mark.parametrize("name", tricks.TRICKS)
def test_every_trick_has_rounds_enough_for_quartiles(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rounds: list[int] = []

    def interleave(variants: list[conductor.Variant], count: int, steps: int) -> dict[str, list[float]]:
        rounds.append(count)
        return {variant.name: [1.0] * count for variant in variants}

    monkeypatch.setattr(tricks, "interleave", interleave)
    tricks._gain(name, quick=False)
    assert rounds[0] >= 6


def test_every_size_has_its_bar() -> None:
    assert set(table.DETERMINISTIC_BARS) == set(bayesian_step.TASKS)


def test_a_phase_has_the_time_of_all_within_it_and_other_operations_that_of_their_kind() -> None:
    def event(name: str, own: float, parent: object = None) -> SimpleNamespace:
        return SimpleNamespace(name=name, self_cpu_time_total=own, cpu_parent=parent)

    step = event(profiled.STEP, 10.0)
    views, addmm = event(profiled.VIEWS, 20.0, step), event("aten::addmm", 30.0, step)
    found = profiled.shares_of(
        [
            step,
            views,
            event("aten::bmm", 10.0, views),
            addmm,
            event("aten::copy_", 10.0, addmm),
            event("aten::_scaled_dot_product_flash_attention_for_cpu", 15.0, step),
            event("aten::gelu", 5.0, step),
            event("aten::gelu", 99.0),  # of no step
        ]
    )
    kinds = (profiled.GEMM, profiled.ATTENTION, profiled.ELEMENTWISE, profiled.VIEWS, profiled.OTHER)
    assert [found[kind] for kind in kinds] == [0.4, 0.15, 0.05, 0.3, 0.1]


def test_a_step_has_every_share_and_its_products_can_be_called_again() -> None:
    model = replace(profiled.STUDENT, width=16, depth=1, heads=2, head_hidden=16, head_output=8)
    trainer = profiled.trainer_of("byov", model, batch=8, side=32, count=16)
    found = profiled.shares(trainer, steps=2)
    assert sum(found.values()) == pytest.approx(1.0)
    assert all(share > 0 for share in found.values())
    floor, step = (profiled.median_ms(make(trainer), 5) for make in (profiled.products_of, profiled.step_of))
    assert 0 < floor < step


def test_the_ablation_has_the_score_that_byov_score_gives(tmp_path: Path) -> None:
    """Its chosen setting is the candidate `combined`, also for images of the reference set."""
    torch.manual_seed(0)
    made = handmade.run(tmp_path / "run", handmade.Affine(6), sigma=0.2, source=handmade.images(400))
    reference = ReferenceSet(made)
    images = torch.cat([handmade.images(20, seed=1), reference.images[:20]])
    before = [before_draws(made.encoder, some, made.image_shape[-1]) for some in (images, reference.images)]
    draws = score_ablation.draws_of(made, reference, images, before)
    among = score_ablation.usual(reference, scores.FENCE)
    assert torch.equal(among, scores.usual_images(reference)) and len(among) < len(reference.images)
    assert torch.equal(score_ablation.usual(reference, torch.inf), torch.arange(len(reference.images)))
    found = score_ablation.disagreement(draws, among, scores.NEAR_SHARES) * score_ablation.distance(draws, among)
    expected = candidate_scores(made, images, score_ablation.DRAWS, ["combined"])["combined"]
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-5)


def test_the_ensembles_ablation_has_the_score_that_byov_score_gives(tmp_path: Path) -> None:
    torch.manual_seed(0)
    source = handmade.images(400)
    runs = [handmade.run(tmp_path / n, handmade.Affine(6), sigma=0.2, source=source) for n in "ab"]
    images = torch.cat([handmade.images(20, seed=1), source[:20]])
    found = ensemble_ablation.scores_of(runs, images)
    expected = EnsembleScorer(runs[0], runs[1:], score_ablation.DRAWS).scores(images)
    torch.testing.assert_close(found[ensemble_ablation.SHIPPED].double(), expected.uncertainty, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found["oddness of the first"].double(), expected.oddness, rtol=1e-4, atol=1e-5)
    alone = candidate_scores(runs[1], images, score_ablation.DRAWS, ["combined"])["combined"]
    assert found["second run"].shape == alone.shape


def test_cached_views_are_compared_with_fresh_ones_image_by_image() -> None:
    fresh, cached = torch.tensor([[1.0, 1, 0, 1]]), torch.tensor([[1.0, 0, 0, 1]])
    found = {cached_views.START: cached, "2": cached, cached_views.FRESH: fresh}
    lines = cached_views.table(found, dict.fromkeys(found, 60.0), 100).splitlines()
    assert lines[-2] == "| 2 | 50.0 | -25.00 ± 49.00 | +0.00 ± 0.00 | 60 |"
    assert lines[-1] == "| fresh | 75.0 |  | +25.00 ± 49.00 | 60 |"
