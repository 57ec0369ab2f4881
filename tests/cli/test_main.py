"""Whole commands: what they print, what they leave behind, and how they say no."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

import byov
from byov.cli.main import main
from byov.training.loop import Trainer
from commands import run

BYOV = Path(sys.executable).parent / "byov"
# Small enough that a run takes less than the start of a process.
SMALL = [
    *("--images", "64", "--optim.batch-size", "16", "--optim.epochs", "2", "--threads", "1"),
    *("--model.width", "32", "--model.depth", "1", "--model.heads", "2"),
    *("--model.head-hidden", "32", "--model.head-output", "16", "--monitor.no-tensorboard"),
]
LAST = Path("checkpoints") / "last.safetensors"


def train(out: Path, *more: object) -> None:
    assert run("train", "digits", "--out", out, *SMALL, *more) == 0


def complaint(capsys: pytest.CaptureFixture[str], *arguments: object, code: int = 2) -> str:
    """The one sentence of a command that must say no."""
    capsys.readouterr()
    assert run(*arguments) == code
    printed = capsys.readouterr()
    assert printed.out == ""
    lines = printed.err.splitlines()
    assert "Traceback" not in printed.err and "│" not in printed.err
    assert lines and lines[-1].startswith("byov: ") and sum(line.startswith("byov: ") for line in lines) == 1
    if code == 2:
        assert len(lines) == 1, printed.err
    assert lines[-1].endswith((".", "?")), lines[-1]
    return lines[-1].removeprefix("byov: ")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run; do not change it."""
    out = tmp_path_factory.mktemp("trained") / "run"
    train(out)
    return out


@pytest.fixture
def halfway(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run that stopped in its middle, as by kill -9."""
    out = tmp_path / "halfway"

    def pull_the_plug(trainer: Trainer) -> bool:
        if trainer.step == 5:
            raise ZeroDivisionError
        return trainer.step == 3

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_due", pull_the_plug)
        with pytest.raises(ZeroDivisionError):
            main(["train", "digits", "--out", str(out), *SMALL])
    return out


# ------------------------------------------------------------------------------------------------------------ it works


def test_train_evaluate_report(tmp_path: Path, trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = tmp_path / "byol"
    train(other, "--method", "byol")
    printed = capsys.readouterr()
    assert "byol on digits: 64 images" in printed.err and "images_per_second" in printed.out
    assert {p.name for p in trained.iterdir()} >= {"config.yaml", "metrics.jsonl", "posterior.jsonl", "checkpoints"}
    assert run("evaluate", other, "--threads", 1) == 0
    results = json.loads((other / "results" / "evaluation.json").read_text())
    assert 0 <= results["top1"] <= 1 and results["settings"]["data"] == "digits"
    printed = capsys.readouterr()
    assert "raw pixels" in printed.out and str(other) in printed.out
    page = tmp_path / "page.html"
    assert run("report", other, trained, "--out", page) == 0
    assert "<html" in page.read_text(encoding="utf-8")
    assert capsys.readouterr().out.endswith(f"written: {page}\n")


def test_a_process_with_the_recipe_anywhere(tmp_path: Path) -> None:
    """The recipe may stand after the flags; as a separate process, including its start."""
    recipe = tmp_path / "mine.yaml"
    recipe.write_text("optim: {lr: 5e-4}\nmethods:\n  byol: {optim: {tau: 0.9}}\n")
    command = [BYOV, "train", *SMALL, "--method=byol", "--out", tmp_path / "run", recipe]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stderr
    assert "step" in done.stdout and "mine.yaml" in done.stderr and "Traceback" not in done.stderr
    config = byov.config.read_config(tmp_path / "run" / "config.yaml")
    assert (config.method, config.optim.lr, config.optim.tau, config.images) == ("byol", 5e-4, 0.9, 64)


def test_no_recipe_chooses_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("train", "--data", "digits", "--out", tmp_path / "run", *SMALL) == 0
    assert "digits (chosen from the images)" in capsys.readouterr().err


def test_help_is_quick_and_whole(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--help") == 0
    printed = capsys.readouterr().out
    assert all(name in printed for name in ("train", "evaluate", "report", "data"))
    assert run() == 0
    for command, telling in {"train": "[RECIPE]", "evaluate": "RUN", "report": "RUN", "data": "{list,get}"}.items():
        assert run(command, "--help") == 0
        printed = capsys.readouterr().out
        assert telling in printed and "{None}" not in printed
    assert run("--version") == 0
    assert capsys.readouterr().out == f"byov {byov.__version__}\n"


def test_help_waits_for_no_torch_and_survives_a_closed_pipe() -> None:
    for arguments, unwanted in ((["train", "--help"], "torch"), (["--help"], "tyro")):
        code = (
            f"import sys; from byov.cli.main import main\ntry: main({arguments})"
            f"\nfinally: print('{unwanted}' in sys.modules)"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert done.returncode == 0 and done.stdout.endswith("False\n")
    piped = subprocess.run(f"{BYOV} train --help | head -n 1", shell=True, capture_output=True, text=True)
    assert piped.stdout.startswith("usage: byov train") and piped.stderr == ""


def test_help_shows_what_people_use_and_help_all_the_rest(capsys: pytest.CaptureFixture[str]) -> None:
    def shown(*arguments: str) -> tuple[str, list[str]]:
        assert run("train", *arguments) == 0
        printed = capsys.readouterr().out
        return printed, re.findall(r"^[ │] {0,2}(?:-h, )?(--\w[\w.-]+|\[RECIPE\])", printed, re.MULTILINE)

    text, flags = shown("--help")
    assert len(flags) == 22 and flags[-1] == "--optim.lr" and "(default: 60)" in text  # the recipe digits has 60 epochs
    assert "--help-all" in text and "recipe digits" in " ".join(text.split())
    _, all_flags = shown("--help-all")
    assert set(flags) < set(all_flags) and len(all_flags) > 70 and "--views.second.solarise" in all_flags
    text, same = shown("adapt-photos", "--method", "byov", "--help")
    assert same == flags and "(default: 128)" in text and "efficientnet-lite0)" in text
    assert shown("fashion", "--optim.epochs", "--help")[1] == flags  # an unfinished command
    assert run("train", "no-such-recipe", "--help") == 2
    assert run("report", "--help-all") == 0


def test_completion(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--tyro-print-completion", "bash") == 0
    printed = capsys.readouterr().out
    assert "complete -F" in printed and "--optim.epochs" in printed and "evaluate" in printed


def test_data(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("data", "list") == 0
    printed = capsys.readouterr().out
    assert all(name in printed for name in ("digits", "cifar10", "fashion_mnist", "mnist", "50,000"))
    assert run("data", "get", "digits") == 0
    assert "nothing to fetch" in capsys.readouterr().out


# --------------------------------------------------------------------------------------------------------- it says no


@pytest.mark.parametrize(
    ("arguments", "telling"),
    [
        (["trian"], "did you mean `byov train`?"),
        (["evalute"], "did you mean `byov evaluate`?"),
        (["publish"], "use one of train, evaluate"),
        (["train", "digits"], "--out"),
        (["train", "digits", "--out"], "--out"),
        (["train", "digits", "--out", "OUT", "--optim.epoch", "3"], "--optim.epochs?"),
        (["train", "digits", "--out", "OUT", "--epochs", "3"], "--optim.epochs"),
        (["train", "digits", "--out", "OUT", "--optim.lr", "fast"], "--optim.lr: 'fast' is not a number"),
        (["train", "digits", "--out", "OUT", "--images", "1.5"], "--images: '1.5' is not a whole number"),
        (["train", "digits", "--out", "OUT", "--optim.betas", "0.9"], "--optim.betas"),
        (["train", "digits", "--out", "OUT", "--method", "bvov"], "byov"),
        (["train", "digits", "--out", "OUT", "--posterior.where", "some"], "no_conv"),
        (["train", "digits", "--out", "OUT", "more"], "'more'"),
        (["train", "no-such-recipe", "--out", "OUT"], "digits"),
        (["train", "--data", "cifar", "--out", "OUT"], "cifar10"),
        (["train", "digits", "--data", "digts", "--out", "OUT"], "did you mean digits"),
        (["train", "digits", "--data", "npz:nowhere.npz", "--out", "OUT"], "nowhere.npz"),
        (["train", "digits", "--out", "OUT", "--model.patch", "3"], "model.patch"),
        (["train", "digits", "--out", "OUT", "--images", "1"], "images=1"),
        (["train", "digits", "--out", "OUT", "--threads", "0"], "threads"),
        (["train", "digits", "--out", "OUT", "--device", "abacus"], "device"),
        (["train", "digits", "--out", "OUT", "--init", "nowhere"], "--init"),
        (["train", "digits", "--out", "OUT", "--posterior.prior", "pretrained"], "--init"),
        (["train", "--out", "OUT", "--resume"], "holds no run"),
        (["train", "digits", "--out", "OUT", "--resume"], "holds no run"),
        (["train", "--out", "OUT", "--extend", "1"], "holds no run"),
        (["evaluate"], "RUN"),
        (["evaluate", "OUT"], "there is no run"),
        (["report"], "byov report RUN"),
        (["report", "OUT"], "byov train"),
        (["data"], "{list,get}"),
        (["data", "give"], "list"),
        (["data", "get"], "byov data get"),
        (["data", "get", "cifar11"], "cifar10"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_input(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    telling: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    sentence = complaint(capsys, *arguments)
    assert telling in sentence
    assert not any(tmp_path.iterdir()), "something was left behind"


@pytest.mark.parametrize(
    ("recipe", "telling"),
    [
        ("optim: {epoch: 3}", "did you mean optim.epochs?"),
        ("optim: {width: 3}", "model.width"),
        ("optim: {epochs: many}", "optim.epochs"),
        ("optim: 3", "section"),
        ("methods: {bvol: {}}", "bvol"),
        ("- a\n- list", "mapping"),
        ("optim: {epochs: 3\nmodel", "not valid YAML"),
        ("", "mapping"),
        (b"\xff\xfe\x00 not text", "cannot read"),
    ],
)
def test_bad_recipe(tmp_path: Path, capsys: pytest.CaptureFixture[str], recipe: str | bytes, telling: str) -> None:
    path = tmp_path / "mine.yaml"
    path.write_bytes(recipe if isinstance(recipe, bytes) else recipe.encode())
    sentence = complaint(capsys, "train", path, "--out", tmp_path / "run")
    assert telling in sentence and "mine.yaml" in sentence
    assert not (tmp_path / "run").exists()


def test_a_run_folder_is_never_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str], trained: Path) -> None:
    before = (trained / LAST).read_bytes()
    assert "--resume" in complaint(capsys, "train", "digits", "--out", trained, *SMALL)
    assert (trained / LAST).read_bytes() == before
    (tmp_path / "file").write_text("mine")
    assert "exists" in complaint(capsys, "train", "digits", "--out", tmp_path / "file", *SMALL)
    assert (tmp_path / "file").read_text() == "mine"


def test_resume_with_another_config_names_the_key(capsys: pytest.CaptureFixture[str], halfway: Path) -> None:
    before = (halfway / LAST).read_bytes()
    sentence = complaint(capsys, "train", "--out", halfway, "--resume", "--optim.lr", "0.5")
    assert "optim.lr=" in sentence and "not 0.5" in sentence
    assert "seed=0, not 1" in complaint(capsys, "train", "digits", "--out", halfway, "--resume", *SMALL, "--seed", 1)
    assert "--resume first" in complaint(capsys, "train", "--out", halfway, "--extend", 1)
    assert (halfway / LAST).read_bytes() == before
    assert run("train", "--out", halfway, "--resume", "--monitor.log-every", 2) == 0  # the log is no part of it
    assert "at least 1 epoch" in complaint(capsys, "train", "--out", halfway, "--extend", -1)


@pytest.mark.parametrize("damage", ["cut", "empty", "random", "plain", "other model", "other method", "missing"])
def test_bad_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], trained: Path, halfway: Path, damage: str
) -> None:
    last = halfway / LAST
    whole = last.read_bytes()
    if damage in ("cut", "empty", "random"):
        noise = np.random.default_rng(0).bytes(len(whole))
        last.write_bytes({"cut": whole[: len(whole) // 2], "empty": b"", "random": noise}[damage])
    elif damage == "plain":
        save_file({"weight": torch.zeros(3)}, last)
    elif damage == "missing":
        last.unlink()
    else:
        change = ["--model.width", "48"] if damage == "other model" else ["--method", "supervised"]
        train(tmp_path / "other", *change)
        last.write_bytes((tmp_path / "other" / LAST).read_bytes())
    sentence = complaint(capsys, "train", "--out", halfway, "--resume")
    assert "last.safetensors" in sentence
    if not damage.startswith("other"):  # a checkpoint knows its own model
        assert "last.safetensors" in complaint(capsys, "evaluate", halfway)


def test_weights_that_do_not_fit(tmp_path: Path, capsys: pytest.CaptureFixture[str], trained: Path) -> None:
    out = tmp_path / "run"
    start = ("train", "digits", "--out", out, *SMALL, "--init")
    sentence = complaint(capsys, *start, trained, "--model.width", 48)
    assert "do not fit" in sentence and "encoder." in sentence
    save_file({"weight": torch.zeros(3)}, tmp_path / "plain.safetensors")
    assert "do not fit" in complaint(capsys, *start, tmp_path / "plain.safetensors")
    (tmp_path / "noise.safetensors").write_bytes(b"no weights at all")
    assert "cannot read weights" in complaint(capsys, *start, tmp_path / "noise.safetensors")
    assert not out.exists()


def test_images_that_cannot_be_trained_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run"
    images = np.random.default_rng(0).integers(0, 256, (8, 8, 8), dtype=np.uint8)

    def say(images: np.ndarray, *more: object) -> str:
        np.savez(tmp_path / "images.npz", images=images)
        return complaint(
            capsys, "train", "digits", "--data", f"npz:{tmp_path / 'images.npz'}", "--out", out, *SMALL, *more
        )

    assert "no images" in say(images[:0])
    assert "1 training image: at least 2" in say(images[:1])
    assert "needs labels" in say(images, "--images", 8, "--method", "supervised")
    assert "needs labels" in say(images, "--images", 8, "--method", "supervised-bbb")
    assert "square" in say(images[:, :, :4])
    assert not out.exists()


def test_no_space_left(tmp_path: Path, capsys: pytest.CaptureFixture[str], halfway: Path, files_up_to: Any) -> None:
    before = (halfway / LAST).read_bytes()
    with files_up_to(len(before) // 4):
        sentence = complaint_of_full_disk(
            capsys, "train", "--out", halfway, "--resume", "--monitor.checkpoint-steps", 1
        )
        new = complaint(capsys, "train", "digits", "--out", tmp_path / "new", *SMALL)
    assert "no space left" in sentence and "--resume" in sentence and "no space left" in new
    assert not (tmp_path / "new").exists(), "a run that could not begin stands in the way of the next"
    assert (halfway / LAST).read_bytes() == before
    assert not list(halfway.rglob("*.tmp"))
    assert run("train", "--out", halfway, "--resume") == 0


def complaint_of_full_disk(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """A run that has begun says so on stderr first; the complaint is its last line."""
    capsys.readouterr()
    assert run(*arguments) == 2
    printed = capsys.readouterr().err
    assert "Traceback" not in printed
    return printed.splitlines()[-1]


@pytest.mark.parametrize("method", ["byov", "byol"])
def test_a_nan_stops_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str], method: str) -> None:
    out = tmp_path / "run"
    wild = ("--optim.lr", "1e30", "--optim.clip", "None", "--method", method)
    sentence = complaint(capsys, "train", "digits", "--out", out, *SMALL, *wild, code=1)
    assert "step " in sentence and "the loss without the KL is" in sentence and "last.safetensors" in sentence
    assert any(part in sentence for part in ("encoder.", "projector.", "predictor."))
    last = byov.load(out)
    assert all(t.isfinite().all() for t in last.learner.posterior.tensors().values())


def test_a_folder_that_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("mine")
    assert "cannot use" in complaint(capsys, "train", "digits", "--out", tmp_path / "file" / "run", *SMALL)


def test_ctrl_c_before_there_is_anything_to_keep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("byov.training.prepare.prepare", interrupted)
    assert complaint(capsys, "train", "digits", "--out", tmp_path / "run", code=130) == "interrupted."
    assert not (tmp_path / "run").exists()


def test_resuming_what_is_finished_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(tmp_path / "run")
    before = (tmp_path / "run" / LAST).read_bytes()
    capsys.readouterr()
    assert run("train", "--out", tmp_path / "run", "--resume") == 0
    assert "this run is finished; --extend EPOCHS trains it for longer\n" in capsys.readouterr().err
    assert (tmp_path / "run" / LAST).read_bytes() == before


@pytest.mark.parametrize("seconds", [0.1, 0.2, 0.4, 0.8])
def test_ctrl_c_while_libraries_are_loaded(tmp_path: Path, seconds: float) -> None:
    """Python needs about 30 ms before any of our code runs: a Ctrl-C then is Python's."""
    command = [sys.executable, "-c", "import sys, byov.cli.main as m; print('x', flush=True); m.main()", "train"]
    command += ["digits", "--out", str(tmp_path / "run")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    process.stdout.readline()
    time.sleep(seconds)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130 and "Traceback" not in err and "interrupted" in err, err


def test_names_that_are_not_utf8(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], trained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    odd = Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff"))
    try:
        odd.mkdir()
    except OSError:
        pytest.skip("this file system takes no such names")
    Image.new("RGB", (8, 8)).save(odd / "a.png")
    for arguments in (
        ("train", "digits", "--out", odd / "run", *SMALL),
        ("train", "digits", "--out", tmp_path / "run", *SMALL, "--init", odd / "w.pt"),
        ("train", "--data", f"folder:{odd}", "--out", tmp_path / "run"),
        ("score", trained, odd, "--out", tmp_path / "o.csv"),
        ("score", trained, "digits", "--out", odd / "o.csv"),
        ("report", trained, "--out", odd / "page.html"),
        ("export", trained, "--format", "safetensors", "--out", odd / "e.safetensors"),
    ):
        assert "is not valid UTF-8: rename" in complaint(capsys, *arguments)
    monkeypatch.chdir(odd)
    assert "is not valid UTF-8" in complaint(capsys, "train", "digits", "--out", "run", *SMALL)
    assert [path.name for path in odd.iterdir()] == ["a.png"]


def test_damaged_logs_do_not_prevent_a_report_or_resuming(tmp_path: Path, halfway: Path) -> None:
    rows = [b'{"step": "x"}', b'{"step": null, "epoch": []}', b'{"step": 1, "epoch": [], "layer": {}}']
    junk = [b"\xff\xfe", b"[" * 100_000, b"[1]", b"9" * 5000, b"{", *rows]
    (halfway / "results").mkdir()
    for lines in (junk, junk[1:2], junk[3:4]):  # whole files of one kind, too
        for file in ("metrics.jsonl", "posterior.jsonl"):
            with (halfway / file).open("ab") as log:
                log.write(b"\n".join(lines) + b"\n")
        for file in ("summary.json", "results/pruning.json", "results/evaluation.json"):
            (halfway / file).write_bytes(lines[0])
        assert run("report", halfway, "--out", tmp_path / "page.html") == 0
    assert run("train", "--out", halfway, "--resume") == 0


@pytest.mark.parametrize("count", ["0", "-1", "100000", "9" * 30])
def test_threads_are_bounded(tmp_path: Path, capsys: pytest.CaptureFixture[str], trained: Path, count: str) -> None:
    assert "threads" in complaint(capsys, "train", "digits", "--out", tmp_path / "run", "--threads", count)
    assert "threads" in complaint(capsys, "evaluate", trained, "--threads", count)
