"""Settings: recipes over defaults, flags over recipes; what is wrong is named."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from byov._core.errors import BadInput
from byov.config import (
    LARGEST,
    Config,
    check_ranges,
    differences,
    find_recipe,
    flatten,
    keys_of,
    merge,
    near_keys,
    read_config,
    read_recipe,
    read_yaml,
    recipe_folder,
    to_dict,
    to_yaml,
)


def test_merge_changes_what_is_named_and_nothing_else() -> None:
    changed = merge(Config(), {"optim": {"lr": 0.5, "betas": [0.8, 0.9]}, "seed": 3}, "here")
    assert (changed.optim.lr, changed.optim.betas, changed.seed) == (0.5, (0.8, 0.9), 3)
    assert differences(Config(), changed).keys() == {"optim.lr", "optim.betas", "seed"}


def test_merge_reads_what_yaml_does_not() -> None:
    tree = yaml.safe_load("optim: {lr: 1e-3, clip: null}")
    assert isinstance(tree["optim"]["lr"], str)  # YAML 1.1 wants 1.0e-3
    changed = merge(Config(), tree, "here")
    assert changed.optim.lr == 1e-3 and changed.optim.clip is None
    assert merge(Config(), {"optim": {"lr": 1}}, "here").optim.lr == 1


@pytest.mark.parametrize(
    ("changes", "telling"),
    [
        ({"optim": {"epoch": 3}}, "did you mean optim.epochs?"),
        ({"optim": {"width": 3}}, "did you mean model.width?"),
        ({"epochs": 3}, "optim.epochs"),
        ({"flip": 0.5}, "views.first.flip or views.second.flip"),
        ({"zzzzzzzz": 1}, "--help"),
        ({1: 2}, "'1'"),
        ({"optim": {"epochs": 1.5}}, "optim.epochs is 1.5, but int is needed"),
        ({"optim": {"epochs": True}}, "optim.epochs"),
        ({"optim": {"lr": "fast"}}, "optim.lr"),
        ({"optim": {"lr": None}}, "optim.lr"),
        ({"optim": {"betas": [0.9]}}, "optim.betas"),
        ({"optim": {"betas": [0.9, "x"]}}, "optim.betas"),
        ({"optim": [1]}, "is a section"),
        ({"method": "bvov"}, "supervised-bbb"),
        ({"posterior": {"where": "some"}}, "no_conv"),
        ({"monitor": {"tensorboard": "perhaps"}}, "monitor.tensorboard"),
        ({"data": 3}, "data"),
    ],
)
def test_merge_names_what_is_wrong(changes: dict[Any, Any], telling: str) -> None:
    with pytest.raises(BadInput) as error:
        merge(Config(), changes, "mine.yaml")
    assert telling in str(error.value) and str(error.value).startswith("mine.yaml")
    assert "\n" not in str(error.value)


def test_near_keys() -> None:
    known = keys_of(Config)
    assert near_keys("optim.epoch", known) == ["optim.epochs"]
    assert near_keys("posterior.lr", known) == ["optim.lr"]
    assert "views.second.crop_area" in near_keys("crop_area", known)
    assert near_keys("nothing_like_it_at_all", known) == []


def test_a_config_survives_its_file(tmp_path: Path) -> None:
    config = merge(Config(), {"optim": {"lr": 1.5e-7, "clip": None}, "views": {"first": {"flip": 0.25}}}, "here")
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    assert read_config(tmp_path / "config.yaml") == config


def test_what_is_not_identity_may_differ() -> None:
    config = Config()
    changed = replace(config, threads=7, device="cpu", monitor=replace(config.monitor, log_every=3))
    assert differences(config, changed) == {}
    assert differences(config, replace(config, seed=1)) == {"seed": (0, 1)}


def test_flatten() -> None:
    assert flatten({"a": {"b": 1, "c": {"d": 2}}, "e": [3]}) == {"a.b": 1, "a.c.d": 2, "e": [3]}
    assert set(keys_of(Config)) == set(flatten(to_dict(Config())))


@pytest.mark.parametrize("path", sorted(recipe_folder().glob("*.yaml")), ids=lambda path: path.stem)
def test_every_recipe_can_be_read(path: Path) -> None:
    for method in ("byov", "byol", "supervised", "supervised-bbb"):
        assert read_recipe(path.stem, method).method == method
    assert path.read_text(encoding="utf-8").startswith("#"), (
        "a recipe begins with its command, machine, time and number"
    )


def test_a_recipe_differs_by_method(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("optim: {lr: 0.1}\nmethods:\n  byol:\n    optim: {weight_decay: 0.3}\n")
    assert read_recipe(str(path)).optim.weight_decay is None
    byol = read_recipe(str(path), "byol")
    assert (byol.method, byol.optim.lr, byol.optim.weight_decay) == ("byol", 0.1, 0.3)
    path.write_text("method: byol\nmethods:\n  byol:\n    optim: {weight_decay: 0.3}\n")
    assert read_recipe(str(path)).optim.weight_decay == 0.3


@pytest.mark.parametrize(
    "text",
    [
        "methods: {byol: {optim: {lrr: 1}}}",
        "methods: [byol]",
        "methods: {byol: 3}",
        "methods: 3",
    ],
)
def test_a_bad_part_for_methods(tmp_path: Path, text: str) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    with pytest.raises(BadInput, match=r"mine\.yaml"):
        read_recipe(str(path), "byol")


def test_a_missing_or_broken_file_is_bad_input(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="digits"):
        find_recipe("no-such-recipe")
    with pytest.raises(BadInput, match="cannot read"):
        read_yaml(tmp_path / "nowhere.yaml")
    (tmp_path / "bad.yaml").write_text("a: [1,\nb: }")
    with pytest.raises(BadInput, match=r"not valid YAML \(line 2\)"):
        read_yaml(tmp_path / "bad.yaml")
    (tmp_path / "list.yaml").write_text("- 1")
    with pytest.raises(BadInput, match="mapping"):
        read_yaml(tmp_path / "list.yaml")


@pytest.mark.parametrize(
    "text",
    [
        "seed: 2024-99-99",
        "seed: 2024-02-30 25:61:61",
        "seed: !!int x",
        "seed: !!float [1]",
        "seed: !!binary '*'",
        "seed: !!timestamp x",
        "seed: !!python/object/apply:os.system ['true']",
        "? {a: 1}\n: 2",
        "? [a]\n: 2",
        "seed: " + "9" * 5000,
        "seed: 0x" + "f" * 5000,
        "seed: 190:20:30.15e" + "9" * 400,
        "seed: " + "[" * 5000,
        "seed: " + "{a: " * 3000,
        "a: &a 1\nseed: *a",
        "<<: [1, 2]",
        "seed: \x00",
        "seed: '\\ud800'",
        "data: " + "x" * 70_000,
    ],
    ids=lambda text: text[:20],
)
def test_no_yaml_ends_in_a_traceback(tmp_path: Path, text: str) -> None:
    (tmp_path / "mine.yaml").write_text(text)
    with pytest.raises(BadInput) as caught:
        read_recipe(str(tmp_path / "mine.yaml"))
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 500 + len(str(tmp_path))


def test_a_yaml_bomb_is_refused_and_not_printed(tmp_path: Path) -> None:
    lines = ["a0: &a0 [lol, lol, lol, lol, lol, lol, lol, lol, lol]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 9)]
    (tmp_path / "mine.yaml").write_text("\n".join([*lines, "seed: *a8"]))
    with pytest.raises(BadInput, match=r"not valid YAML \(line 2\)"):
        read_recipe(str(tmp_path / "mine.yaml"))


@pytest.mark.parametrize(
    ("changes", "telling"),
    [
        ({"seed": 10**5000}, "seed is a int too long to show"),
        ({"seed": 2**63}, "seed is 9223372036854775808, but int is needed"),
        ({"optim": {"lr": float("nan")}}, "optim.lr is nan, but float is needed"),
        ({"optim": {"lr": "inf"}}, "optim.lr is 'inf', but"),
        ({"optim": {"lr": 10**400}}, "optim.lr is"),
        ({"seed": [["x" * 1000] * 1000] * 1000}, "seed is [["),
        ({"x" * 100_000: 1}, "there is no setting 'xxx"),
    ],
)
def test_wrong_values_are_shown_shortly(changes: dict[Any, Any], telling: str) -> None:
    with pytest.raises(BadInput) as caught:
        merge(Config(), changes, "here")
    assert telling in str(caught.value) and len(str(caught.value)) < 400


@pytest.mark.parametrize(
    ("key", "value", "telling"),
    [
        ("threads", 100_000, "threads is 100,000, but at most 1,024 is possible: give less."),
        ("image_size", 2**31, "image_size is 2,147,483,648"),
        ("model.depth", 10**9, "model.depth is 1,000,000,000"),
        ("model.predictor_layers", 10**6, "model.predictor_layers"),
        ("optim.epochs", 10**12, "optim.epochs"),
        ("optim.lr", float("nan"), "optim.lr is nan, but a number is needed"),
        ("optim.betas", (0.9, float("inf")), "optim.betas is inf"),
        ("seed", 2**64, "seed is 18446744073709551616"),
    ],
)
def test_sizes_are_bounded(key: str, value: Any, telling: str) -> None:
    section, _, name = key.rpartition(".")
    config = Config()
    inner = replace(getattr(config, section), **{name: value}) if section else value
    with pytest.raises(BadInput) as caught:
        check_ranges(replace(config, **{section or name: inner}))
    assert telling in str(caught.value)
    check_ranges(Config())


def test_every_bound_is_of_a_setting() -> None:
    assert set(LARGEST) <= set(keys_of(Config))
