"""The documentation is true: its Python runs, and the API reference has the names and signatures of the code."""

from __future__ import annotations

import ast
import inspect
import pkgutil
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import byov
from byov import metrics
from byov.backbones._torchvision import import_torchvision
from byov.cli.main import main
from byov.config import Config, Model, Monitor, Optim
from byov.data.sources import names as source_names
from byov.data.sources import open_source
from byov.export import export
from byov.training.prepare import prepare

ROOT = Path(__file__).resolve().parents[1]
API = ROOT / "docs" / "api.md"
PYTHON = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
PAGES = [
    page for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))) if PYTHON.search(page.read_text())
]


# ------------------------------------------------------------------------------------------------------------ examples


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the examples find in their folder: a small run under the names they use, its export, a table of scores."""
    folder = tmp_path_factory.mktemp("docs")
    model, optim = Model(width=16, depth=1, heads=2, head_hidden=16, head_output=8), Optim(epochs=1, batch_size=32)
    config = Config(images=128, threads=1, device="cpu", model=model, optim=optim, monitor=Monitor(tensorboard=False))
    run = folder / "runs" / "mine"
    prepare(config, run, say=lambda text: None).run()
    for name in ("cifar-byov", "photos"):
        shutil.copytree(run, folder / "runs" / name)
    table = ["--out", str(folder / "odd.parquet"), "--draws", "2", "--no-page", "--threads", "1"]
    export(byov.load(run), "timm", folder / "encoder-timm.safetensors")
    import_torchvision()  # before timm imports it, in the way that fails beside a CPU build of torch
    with pytest.raises(SystemExit, match="0"):
        main(["score", str(run), "digits@test", *table])
    return folder


def names_that_examples_use() -> dict[str, Any]:
    """What a reader has: images with labels, a network, batches of something."""
    torch.manual_seed(0)
    digits = open_source("digits").load("test")
    images, labels = digits.images[:40], digits.labels[:40]
    flat = images.flatten(1).float() / 255
    return {
        "images": images,
        "labels": labels,
        "ids": torch.arange(40),
        "net": nn.Sequential(nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, 10)),
        "batches": [(flat[:20], labels[:20]), (flat[20:], labels[20:])],
        "loss_function": nn.functional.cross_entropy,
        "number_of_images": len(images),
    }


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_examples_run(page: Path, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of a page's blocks, one after the other, as a reader would type them."""
    place = tmp_path / "place"
    shutil.copytree(finished, place)
    monkeypatch.chdir(place)
    known = names_that_examples_use()
    text = page.read_text(encoding="utf-8")
    for block in PYTHON.finditer(text):
        line = text[: block.start(1)].count("\n")
        exec(compile("\n" * line + block[1], str(page), "exec"), known)  # an error names the page's own line


def test_the_loop_of_ones_own_learns_and_has_ten_lines() -> None:
    text = (ROOT / "docs" / "guide.md").read_text(encoding="utf-8")
    section = text[text.index("## A training loop of your own in ten lines") :]
    block = PYTHON.search(section)
    assert block is not None
    loop = next(node for node in ast.parse(block[1]).body if isinstance(node, ast.For))
    assert loop.end_lineno is not None and loop.end_lineno - loop.lineno + 1 <= 10
    known = names_that_examples_use() | {"images": open_source("digits").load("train").images[:256]}
    exec(compile(block[1], "guide.md", "exec"), known)
    posterior, teacher = known["posterior"], known["teacher"]
    assert known["losses"][-1] < known["losses"][0]
    assert float(posterior.log_variances.detach().std()) > 0, "the variances have moved, each by itself"
    assert 0 < teacher.distance(posterior) < 1


# ----------------------------------------------------------------------------------------------------------- reference


def documented() -> Iterator[tuple[str, str, str | None]]:
    """Module, name and, where it has one, the signature of every row of the reference."""
    module = ""
    for line in API.read_text(encoding="utf-8").splitlines():
        if heading := re.fullmatch(r"### `([\w.]+)`", line):
            module = heading[1]
        elif row := re.match(r"\| `([\w.]+)(?:\((.*?)\))?` \|", line):
            yield module, row[1], row[2]


@pytest.mark.parametrize(("module", "name", "signature"), list(documented()))
def test_names_and_signatures_are_those_of_the_code(module: str, name: str, signature: str | None) -> None:
    found: Any = pkgutil.resolve_name(module)  # `byov.priors` is an alias
    for part in name.split("."):
        assert not part.startswith("_")
        found = getattr(found, part)
    if signature is None:
        assert isinstance(found, (property, type)), "a function is shown with its parameters"
        return
    own = [p for p in inspect.signature(found).parameters.values() if p.name != "self" and p.kind is not p.VAR_KEYWORD]
    shown, shortened = _parameters(signature)
    if shortened:  # the rest is left out, but must not be needed
        assert all(p.default is not p.empty for p in own if p.name not in shown)
        own = [p for p in own if p.name in shown]
    assert list(shown) == [p.name for p in own]
    for p in own:
        default, by_name = shown[p.name]
        assert by_name == (p.kind is p.KEYWORD_ONLY), f"{p.name} is after the * in one of them only"
        assert default in (p.default, ...)


def _parameters(signature: str) -> tuple[dict[str, tuple[Any, bool]], bool]:
    """Of a signature as it is shown: name -> default (`...`: not told) and whether it is by name only; is it cut?"""
    cut = signature.removesuffix(", ...")
    arguments = ast.parse(f"def f({cut}): ...").body[0].args  # type: ignore[attr-defined]
    nothing = [inspect.Parameter.empty] * (len(arguments.args) - len(arguments.defaults))
    defaults = [*nothing, *map(ast.literal_eval, arguments.defaults)]
    shown = {a.arg: (d, False) for a, d in zip(arguments.args, defaults, strict=True)}
    if arguments.vararg:
        shown[arguments.vararg.arg] = (inspect.Parameter.empty, False)
    for a, d in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        shown[a.arg] = (inspect.Parameter.empty if d is None else ast.literal_eval(d), True)
    return shown, cut != signature


def test_what_is_exported_is_documented() -> None:
    """Also as a module: `byov.metrics` is one of its own names."""
    rows = list(documented())
    modules = {module for module, _, _ in rows}
    assert {name for module, name, _ in rows if module == "byov.metrics"} == set(metrics.__all__)
    for name in byov.__all__:
        assert f"byov.{name}" in modules or name in {row for _, row, _ in rows}


# --------------------------------------------------------------------------------------------------------------- links


@pytest.mark.parametrize(
    "page", [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))], ids=lambda page: page.name
)
def test_links_lead_somewhere(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for target, _, heading in (link.partition("#") for link in re.findall(r"\]\(([^)\s]+)\)", text)):
        if "://" in target:
            continue
        there = page.parent / target if target else page
        assert there.exists(), f"{page.name} links to {target}"
        if heading:
            headings = re.findall(r"^#+ (.*)$", there.read_text(encoding="utf-8"), re.MULTILINE)
            assert heading in {re.sub(r"[^\w -]", "", found.lower()).replace(" ", "-") for found in headings}
    for name in re.findall(r"`(docs/[\w./-]+)`", text):
        assert (ROOT / name).exists(), f"{page.name} names {name}"


def test_commands_use_sources_that_there_are() -> None:
    for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        text = page.read_text(encoding="utf-8").replace("\\\n", " ")  # a command may go on in the next line
        for command in re.findall(r"^(?:byov|torchrun) .*$", text, re.MULTILINE):
            words = command.partition(" #")[0].split()
            for flag in ("--data", "--ood", "get"):
                for word in words[words.index(flag) + 1 :] if flag in words else []:
                    if word.startswith("-"):
                        break
                    assert ":" in word or word in source_names(), f"{page.name}: {command}"
