"""The documentation is correct: its Python runs, its links resolve, and the API reference has every public name."""

from __future__ import annotations

import ast
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import nn

import byov
from byov.backbones._torchvision import import_torchvision
from byov.cli.main import main
from byov.config import Config, Model, Monitor, Optim
from byov.data.sources import names as source_names
from byov.data.sources import open_source
from byov.export import export
from byov.training.prepare import prepare

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
PYTHON = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))]
WITH_EXAMPLES = [page for page in PAGES if PYTHON.search(page.read_text(encoding="utf-8"))]


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


# ------------------------------------------------------------------------------------------------------------ examples


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prepare the folder of the examples: a small run under the names they use, its export, a table of scores."""
    folder = tmp_path_factory.mktemp("docs")
    model, optim = Model(width=16, depth=1, heads=2, head_hidden=16, head_output=8), Optim(epochs=1, batch_size=32)
    config = Config(images=128, threads=1, device="cpu", model=model, optim=optim, monitor=Monitor(tensorboard=False))
    run = folder / "runs" / "mine"
    prepare(config, run, say=lambda text: None).run()
    for name in ("cifar-byov", "photos"):
        shutil.copytree(run, folder / "runs" / name)
    (folder / "new-photos").mkdir()
    for i, image in enumerate(open_source("digits").load("test").images[:12, 0].numpy()):
        Image.fromarray(image).save(folder / "new-photos" / f"{i}.png")
    table = ["--out", str(folder / "odd.parquet"), "--draws", "2", "--no-page", "--threads", "1"]
    export(byov.load(run), "timm", folder / "encoder-timm.safetensors")
    import_torchvision()  # before timm imports it in the way that fails with a CPU build of torch
    with pytest.raises(SystemExit, match="0"):
        main(["score", str(run), "digits@test", *table])
    return folder


def names_that_examples_use() -> dict[str, Any]:
    """Return what a reader has: images with labels, a network, batches."""
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


@pytest.mark.parametrize("page", WITH_EXAMPLES, ids=name_of)
def test_examples_run(page: Path, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run all blocks of a page, one after the other, as a reader would type them."""
    place = tmp_path / "place"
    shutil.copytree(finished, place)
    monkeypatch.chdir(place)
    known = names_that_examples_use()
    text = page.read_text(encoding="utf-8")
    for block in PYTHON.finditer(text):
        line = text[: block.start(1)].count("\n")
        exec(compile("\n" * line + block[1], str(page), "exec"), known)  # an error names the line of the page


def test_your_own_training_loop_learns_and_has_ten_lines() -> None:
    text = (DOCS / "how-to" / "training-loop.md").read_text(encoding="utf-8")
    section = text[text.index("## A training loop in ten lines") :]
    block = PYTHON.search(section)
    assert block is not None
    loop = next(node for node in ast.parse(block[1]).body if isinstance(node, ast.For))
    assert loop.end_lineno is not None and loop.end_lineno - loop.lineno + 1 <= 10
    known = names_that_examples_use() | {"images": open_source("digits").load("train").images[:256]}
    exec(compile(block[1], "training-loop.md", "exec"), known)
    posterior, teacher = known["posterior"], known["teacher"]
    assert known["losses"][-1] < known["losses"][0]
    assert float(posterior.log_variances.detach().std()) > 0, "the variances have moved, each separately"
    assert 0 < teacher.distance(posterior) < 1


# ----------------------------------------------------------------------------------------------------------- reference


def test_the_reference_has_every_public_name() -> None:
    """`make docs` fails on a name that does not exist; this test fails on a public one that is missing."""
    shown = re.findall(r"^::: byov\.(\w+)$", (DOCS / "reference" / "api.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(shown) == sorted(byov.__all__)


# --------------------------------------------------------------------------------------------------------------- links


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for target, _, heading in (link.partition("#") for link in re.findall(r"\]\(([^)\s]+)\)", text)):
        if "://" in target:
            continue
        there = page.parent / target if target else page
        assert there.exists(), f"{page.name} links to {target}"
        if heading:
            found = there.read_text(encoding="utf-8")
            headings = [re.sub(r"[^\w -]", "", h.lower()) for h in re.findall(r"^#+ (.*)$", found, re.MULTILINE)]
            generated = re.findall(r"^::: (\S+)$", found, re.MULTILINE)
            assert heading in [*(h.replace(" ", "-") for h in headings), *generated]
    for name in re.findall(r"`(docs/[\w./-]+)`", text):
        assert (ROOT / name).exists(), f"{page.name} names {name}"


def test_commands_use_sources_that_exist() -> None:
    for page in PAGES:
        text = page.read_text(encoding="utf-8").replace("\\\n", " ")  # a command may continue in the next line
        for command in re.findall(r"^(?:byov|torchrun) .*$", text, re.MULTILINE):
            words = command.partition(" #")[0].split()
            for flag in ("--data", "--ood", "get"):
                for word in words[words.index(flag) + 1 :] if flag in words else []:
                    if word.startswith("-"):
                        break
                    assert ":" in word or word in source_names(), f"{page.name}: {command}"
