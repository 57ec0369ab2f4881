"""The report of fabricated runs: the numbers are on it, it is self-contained, and nothing missing breaks it."""

from __future__ import annotations

import html
import json
import math
import re
import shlex
from html.parser import HTMLParser
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from byov._core.errors import BadInput
from byov.cli.parsing import parse
from byov.config import Config, Optim, to_dict
from byov.report.page import render, summary_rows, write_report
from byov.report.plots import svg_charts
from byov.report.run_data import load_runs
from byov.runs import checkpoints
from byov.runs.folder import RunFolder

RESULTS = {
    "top1": 0.7573,
    "top5": 0.991,
    "ece": 0.0432,
    "brier": 0.3461,
    "reliability": 0.08,
    "resolution": 0.5,
    "uncertainty": 0.9,
    "nll": 0.6789,
    "median_sigma": 0.01123,
    "untrained.top1": 0.6391,
    "untrained.ece": 0.0691,
    "untrained.brier": 0.497,
    "untrained.nll": 1.017,
    "pixels.top1": 0.5512,
    "pixels.ece": 0.123,
    "pixels.brier": 0.601,
    "pixels.nll": 1.33,
    "bins": [[0, 0.0, 0.0]] * 3 + [[10 * i, (i + 0.5) / 15, (i + 0.3) / 15] for i in range(3, 15)],
    "settings": {"data": "digits", "probe": {"l2": 0.01}},
}
LAYERS = [
    "encoder.stem.weight",
    *(f"encoder.blocks.{i}.{part}.weight" for i in range(2) for part in ("attention.qkv", "mlp.0", "mlp.2")),
    "projector.0.weight",
    "predictor.0.weight",
]


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests of the text alone: drawing takes most of the time."""
    for name in ("curves", "reliability", "heat_maps"):
        monkeypatch.setattr(svg_charts, name, lambda *_, **__: "<svg></svg>")


def write_config(folder: Path, config: Config) -> None:
    (folder / "config.yaml").write_text(yaml.safe_dump(to_dict(config)))


def lines(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def fabricate(folder: Path, method: str = "byov", epochs: int = 10, whole: bool = True) -> Path:
    """A run folder as training and evaluation leave it; if not whole, as they leave it halfway."""
    folder.mkdir(parents=True)
    write_config(folder, Config(method=method, optim=Optim(epochs=epochs)))  # type: ignore[arg-type]
    bayesian = method == "byov"
    rows: list[dict[str, Any]] = []
    for step in range(0, 20 * epochs, 2):
        done = step / (20 * epochs)
        row = {
            "step": step,
            "epoch": step / 20,
            "nll": 2 * math.exp(-3 * done) + 0.1 * math.sin(step),
            "lr": 1e-3 * (1 - done),
        }
        row |= {
            "beta": done,
            "tau": 0.99 + 0.01 * done,
            "grad_norm": 1 + math.cos(step),
            "images_per_second": 800 + step % 7,
        }
        row |= {"kl": 4e6 * (1 - 0.9 * done) if bayesian else 0.0, "log_variance_lr": 2e-2 * (1 - done)}
        row |= {
            "loss": row["nll"] + done * 0.2 * bayesian,
            "feature_std": 0.05 + 0.03 * done,
            "effective_rank": 10 + 20 * done,
            "projection_std": 0.9,
        }
        row |= {"teacher_moved": 0.01 * (1 - done) + 1e-5, "memory_mib": 512.0}
        rows.append(row | ({"knn": 0.5 + 0.3 * done} if step % 40 == 0 else {}))
    lines(folder / "metrics.jsonl", rows)
    if bayesian:
        lines(
            folder / "posterior.jsonl",
            [
                {"epoch": epoch, "step": 20 * epoch, "layer": layer, "weights": 1000 * (i + 1)}
                | {"sigma_mean": 0.007 * (1 + i * epoch / 10), "sigma_median": 0.007, "sigma_max": 0.1 + 0.01 * epoch}
                | {"snr_mean": 3 / (1 + i), "snr_max": 50.0}
                for epoch in range(1, epochs + 1)
                for i, layer in enumerate(LAYERS)
            ],
        )
    if whole:
        (folder / "results").mkdir()
        (folder / "results" / "evaluation.json").write_text(json.dumps(RESULTS))
        (folder / "summary.json").write_text(json.dumps({"images_per_second": 803.7, "peak_memory_mib": 1234.5}))
    return folder


class Outside(HTMLParser):
    """Collects what a page would fetch: any src or href that is neither an anchor nor inline data."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.tags: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        for name, value in attrs:
            inside = (value or "").startswith(("#", "data:image/"))
            if name.split(":")[-1] in ("src", "href", "srcset", "data", "action") and not inside:
                self.found.append(f"{tag} {name}={value}")


def outside(page: str) -> Outside:
    parser = Outside()
    parser.feed(page)
    return parser


def text_of(page: str) -> str:
    return re.sub(r"\s+", " ", re.sub(r"<[^>]*>", " ", page))


def test_numbers_and_sections_are_there(tmp_path: Path) -> None:
    out = write_report([fabricate(tmp_path / "byov")], tmp_path / "new" / "report.html")
    page = out.read_text()
    text = text_of(page)
    for number in ("75.7", "0.043", "0.346", "0.679", "0.0112", "804", "1,23", "63.9", "55.1", "1.330"):
        assert number in text, number
    for words in ("untrained encoder", "raw pixels", "Effective rank", "Online kNN", "KL to the prior", "confidence"):
        assert words in text
    assert "encoder.blocks.1.attention.qkv.weight" in text and "optim.epochs" in text and "settings.probe.l2" in text
    assert "What is missing" not in text
    assert page.count("<figure") == 1 + 8 + 7 + 3  # reliability; training; monitors; sigma, SNR and the heat maps


def test_nothing_outside_is_needed(tmp_path: Path) -> None:
    page = write_report([fabricate(tmp_path / "a"), fabricate(tmp_path / "b", "byol")], tmp_path / "r.html").read_text()
    found = outside(page)
    assert found.found == []
    assert not {"script", "link", "iframe", "object"} & set(found.tags)
    assert "http://" not in page and "https://" not in page and "@import" not in page
    assert not re.findall(r"url\((?!#)", page)
    ids = re.findall(r'\sid="([^"]*)"', page)
    assert len(ids) == len(set(ids))
    assert set(re.findall(r'href="#([^"]*)"', page)) | set(re.findall(r"url\(#([^)]*)\)", page)) <= set(ids)


def test_several_runs_side_by_side(tmp_path: Path, undrawn: None) -> None:
    runs = [fabricate(tmp_path / "byov"), fabricate(tmp_path / "byol", "byol", epochs=7)]
    worse = RESULTS | {"top1": 0.7001, "ece": 0.0999}
    (runs[1] / "results" / "evaluation.json").write_text(json.dumps(worse))
    page = write_report(runs, tmp_path / "r.html").read_text()
    assert '<td class="best">75.7</td>' in page and '<td class="best">0.043</td>' in page
    assert "<td>70.0</td>" in page
    assert page.count("untrained encoder</th>") == 1  # the same for both: shown once
    assert re.search(r'class="differs"><th scope="row">method</th><td>byov</td><td>byol</td>', page)
    assert "the weights of byol are not random" in page


def test_seven_runs_with_the_same_folder_name(tmp_path: Path) -> None:
    runs = [fabricate(tmp_path / f"seed{i}" / "run", "byol", epochs=1, whole=False) for i in range(7)]
    page = write_report(runs, tmp_path / "r.html").read_text()
    assert "seed0/run" in page and "seed6/run" in page


def test_references_that_differ_are_shown_for_each(tmp_path: Path, undrawn: None) -> None:
    runs = [fabricate(tmp_path / "a", "byol"), fabricate(tmp_path / "b", "byol")]
    (runs[1] / "results" / "evaluation.json").write_text(json.dumps(RESULTS | {"untrained.top1": 0.5}))
    page = write_report(runs, tmp_path / "r.html").read_text()
    assert "untrained encoder (a)" in page and "untrained encoder (b)" in page and "raw pixels (" not in page


def test_a_run_that_has_just_begun(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    write_config(run, Config())
    text = text_of(write_report([run], tmp_path / "r.html").read_text())
    for words in ("No training curve", "no sigma", "Not evaluated yet", "byov evaluate", "training has not ended"):
        assert words in text


def test_broken_lines_are_left_out(tmp_path: Path) -> None:
    run = fabricate(tmp_path / "run", whole=False)
    with (run / "metrics.jsonl").open("a") as log:
        log.write('{"step": 10, "epoch": 0.5, "lo{"step": 12, "epoch": 0.6, "loss": NaN}\n{"step": 400, "lo')
    with (run / "posterior.jsonl").open("a") as log:
        log.write('{"epoch": 11, "lay')
    text = text_of(write_report([run], tmp_path / "r.html").read_text())
    assert "2 lines of metrics.jsonl could not be read" in text
    assert "One line of posterior.jsonl could not be read" in text
    assert "803" in text  # the median speed so far, as there is no summary


def test_numbers_that_cannot_be_drawn(tmp_path: Path) -> None:
    run = fabricate(tmp_path / "run")
    rows = [{"step": s, "epoch": s / 2, "loss": v, "knn": None} for s, v in enumerate([1.0, math.nan, math.inf, 0.5])]
    lines(run / "metrics.jsonl", rows)
    lines(run / "posterior.jsonl", [{"epoch": 1, "layer": "w", "weights": 3, "sigma_mean": math.nan, "snr_mean": 0.0}])
    (run / "results" / "evaluation.json").write_text(json.dumps(RESULTS | {"bins": [[1, None, 0.2]], "ece": math.nan}))
    text = text_of(write_report([run], tmp_path / "r.html").read_text())
    assert "no reliability diagram" in text


@pytest.mark.parametrize("method", ["byov", "byol"])
@pytest.mark.parametrize("whole", [False, True])
def test_every_suggested_command_is_one(tmp_path: Path, undrawn: None, method: str, whole: bool) -> None:
    """With the real parser, for a path that needs quotes; and pruning names its criterion."""
    run = fabricate(tmp_path / "it's a run", method, whole=whole)
    page = render(load_runs([run]))
    commands = {html.unescape(code) for code in re.findall(r"<code>(byov [a-z]+ .*?)</code>", page)}
    found = {}
    for command in commands:
        _, name, *arguments = shlex.split(command)
        options = import_module(f"byov.cli.commands.{name}").Options
        found[name] = parse(options, name, arguments)
        assert found[name].run == run
    assert found.keys() == {"evaluate", "prune"}
    assert found["prune"].by == ("snr" if method == "byov" else "magnitude")


def test_an_evaluation_of_an_earlier_state_is_marked(tmp_path: Path, undrawn: None) -> None:
    run = fabricate(tmp_path / "run", epochs=1)
    evaluation = run / "results" / "evaluation.json"
    evaluation.write_text(json.dumps(RESULTS | {"settings": {"step": 84}}))
    for step, name in ((84, "run"), (168, "run, evaluated at step 84 of 168")):
        checkpoints.save(RunFolder(run).checkpoint, {"x": torch.zeros(1)}, {"step": step})
        runs = load_runs([run])
        assert summary_rows(runs)[0].name == name
        sentence = "The evaluation of run is of an earlier state of the run (step 84 of 168): <code>byov evaluate"
        assert (sentence in render(runs)) == (step == 168)
    evaluation.write_text(json.dumps(RESULTS | {"settings": {"step": 168, "weights": "an earlier digest"}}))
    assert summary_rows(load_runs([run]))[0].name == "run, evaluated at the same step with other weights"


def test_names_are_escaped(tmp_path: Path, undrawn: None) -> None:
    page = write_report([fabricate(tmp_path / "<b>&run", "byol", epochs=1)], tmp_path / "r.html").read_text()
    assert "<b>&run" not in page and "&lt;b&gt;&amp;run" in page


def test_the_page_may_load_and_run_nothing(tmp_path: Path, undrawn: None) -> None:
    page = write_report([fabricate(tmp_path / "run", "byol", epochs=1)], tmp_path / "r.html").read_text()
    policy = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
    assert f'<meta http-equiv="Content-Security-Policy" content="{policy}">' in page.partition("<title>")[0]
    assert "<script" not in page


def test_same_runs_same_page_and_no_leftovers(tmp_path: Path) -> None:
    run = fabricate(tmp_path / "run", epochs=2)
    folder = tmp_path / "out"
    first = write_report([run], folder / "r.html").read_text()
    assert write_report([run], folder / "r.html").read_text() == first
    assert [path.name for path in folder.iterdir()] == ["r.html"]


def test_bad_input_gets_a_sentence(tmp_path: Path, undrawn: None) -> None:
    run = fabricate(tmp_path / "run", epochs=1)
    for runs, out, says in (
        ([tmp_path], tmp_path / "r.html", "not a run folder"),
        ([tmp_path / "nowhere"], tmp_path / "r.html", "not a run folder"),
        ([], tmp_path / "r.html", "at least one run"),
        ([run, run], tmp_path / "r.html", "given twice"),
        ([run], tmp_path, "is a folder"),
    ):
        with pytest.raises(BadInput, match=says):
            write_report(runs, out)
    assert not (tmp_path / "r.html").exists()


def test_a_pruned_run_is_distinguished_from_the_one_it_was_made_from(tmp_path: Path, undrawn: None) -> None:
    whole, pruned = fabricate(tmp_path / "whole", epochs=1), fabricate(tmp_path / "pruned")
    (pruned / "results" / "pruning.json").write_text(json.dumps({"sparsity": 0.499, "rounds": []}))
    page = write_report([whole, pruned], tmp_path / "page.html").read_text(encoding="utf-8")
    assert "byov on digits, vit-micro, 1 epoch, seed 0<br>" in page
    assert "10 epochs, seed 0, 50% of its weights pruned</p>" in page
    assert page.count("those of the run it was made from") == 1
