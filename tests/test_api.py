"""The public API: its names, their examples, and images of every kind through `Run`."""

from __future__ import annotations

import doctest
import inspect
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import byov
from byov import BadInput
from byov.data.image_files import decode
from byov.data.image_folder import storage_side
from byov.data.transforms import resized

SMALL: dict[str, Any] = {
    "images": 64,
    "threads": 1,
    "device": "cpu",
    "model": {"width": 16, "depth": 1, "heads": 2, "head_hidden": 16, "head_output": 8},
    "optim": {"epochs": 1, "batch_size": 32},
    "monitor.tensorboard": False,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the examples find: `runs/mine`, a small run on digits."""
    place = tmp_path_factory.mktemp("api")
    byov.train("digits", place / "runs" / "mine", "digits", say=lambda text: None, **SMALL)
    return place


@pytest.fixture(scope="module")
def run(folder: Path) -> byov.Run:
    return byov.load(folder / "runs" / "mine")


@pytest.fixture(scope="module")
def colour(tmp_path_factory: pytest.TempPathFactory) -> tuple[byov.Run, Path]:
    """A run on a folder of small photos, and that folder."""
    place = tmp_path_factory.mktemp("colour")
    photos = place / "photos"
    photos.mkdir()
    for i in range(20):
        Image.fromarray(noise((30 + i, 40, 3), i)).resize((200, 150)).save(photos / f"{i:02d}.png")
    model = SMALL | {"images": None, "image_size": 32, "optim": {"epochs": 1, "batch_size": 8}, "init": "none"}
    return byov.train(photos, place / "run", "folder-64", "byov", say=lambda text: None, **model), photos


def noise(shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


# --------------------------------------------------------------------------------------------------------------- names


def test_every_public_name_is_there_and_importing_waits_for_no_torch() -> None:
    assert len(byov.__all__) == len(set(byov.__all__)) and set(byov.__all__) <= set(dir(byov))
    for name in byov.__all__:
        assert inspect.getdoc(getattr(byov, name)), f"byov.{name} has no docstring"
    with pytest.raises(AttributeError, match="no_such_name"):
        byov.no_such_name  # noqa: B018
    code = "import sys, byov; assert not {'torch', 'numpy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def examples() -> Iterator[doctest.DocTest]:
    """The examples of the public names: in their docstrings and those of their methods."""
    finder = doctest.DocTestFinder(recurse=False)
    for name in byov.__all__:
        public = getattr(byov, name)
        if inspect.ismodule(public):
            continue
        methods = vars(public).items() if inspect.isclass(public) else ()
        members = [(name, public), *((f"{name}.{key}", value) for key, value in methods if not key.startswith("_"))]
        found = [
            example
            for title, member in members
            if ">>>" in (getattr(member, "__doc__", None) or "")
            for example in finder.find(member, f"byov.{title}", module=False, globs={})
        ]
        assert found, f"byov.{name} has no example"
        yield from found


@pytest.mark.parametrize("example", list(examples()), ids=lambda example: example.name)
def test_examples_run(example: doctest.DocTest, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(shutil.copytree(folder, tmp_path / "place"))
    torch.manual_seed(0)
    example.globs.update({"byov": byov, "torch": torch, "nn": nn, "np": np, "Path": Path})
    said: list[str] = []
    options = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    assert not doctest.DocTestRunner(optionflags=options).run(example, out=said.append).failed, "".join(said)


@pytest.mark.parametrize("name", [name for name in byov.__all__ if inspect.isfunction(getattr(byov, name))])
def test_functions_document_arguments_result_and_errors(name: str) -> None:
    doc = inspect.getdoc(getattr(byov, name)) or ""
    assert all(f"\n{section}:\n" in doc for section in ("Args", "Returns", "Raises"))
    assert all(
        re.search(rf"^ +\W*{argument}: ", doc, re.M) for argument in inspect.signature(getattr(byov, name)).parameters
    )


# --------------------------------------------------------------------------------------------------------------- train


def test_train_is_the_command(folder: Path, tmp_path: Path, run: byov.Run) -> None:
    from commands import run as command

    flags = ["--images", "64", "--threads", "1", "--device", "cpu", "--model.width", "16", "--model.depth", "1"]
    flags += ["--model.heads", "2", "--model.head-hidden", "16", "--model.head-output", "8", "--optim.epochs", "1"]
    flags += ["--optim.batch-size", "32", "--monitor.no-tensorboard"]
    assert command("train", "digits", "--out", tmp_path / "run", *flags) == 0
    ours, theirs = run.learner.posterior.tensors(), byov.load(tmp_path / "run").learner.posterior.tensors()
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_train_chooses_resumes_and_reports(tmp_path: Path) -> None:
    said: list[str] = []
    told: list[tuple[str, int, int]] = []
    chosen = byov.train("digits", tmp_path / "run", say=said.append, progress=lambda *what: told.append(what), **SMALL)
    assert "digits (chosen from the images)" in "".join(said) and chosen.config.method == "byov"
    assert told[-1] == ("training", chosen.step, chosen.step)
    again = byov.train("digits", tmp_path / "run", resume=True, say=said.append)
    assert again.step == chosen.step and again.config == chosen.config


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"epochs": 3}, "did you mean optim.epochs?"),
        ({"optim": {"epoch": 3}}, "did you mean optim.epochs?"),
        ({"optim.epochs": "many"}, "optim.epochs is 'many'"),
        ({"method": "bvov"}, "bvov"),
        ({"recipe": "no-such-recipe"}, "there is no recipe"),
        ({"data": "digts"}, "did you mean digits"),
        ({"resume": True}, "holds no run"),
    ],
)
def test_what_train_refuses(tmp_path: Path, settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(BadInput, match=sentence.replace("?", r"\?")):
        byov.train(**{"data": "digits", "out": tmp_path / "run"} | settings)
    assert not any(tmp_path.iterdir())


# -------------------------------------------------------------------------------------------------------------- images


def test_arrays_and_tensors_of_every_shape_give_the_same_features(run: byov.Run) -> None:
    grey = noise((3, 8, 8, 1))
    tensor = torch.from_numpy(grey).permute(0, 3, 1, 2)
    expected = run.features(tensor)
    assert expected.shape == (3, 64)
    for same in (grey, tensor / 255, grey / 255, list(grey), [grey[0, :, :, 0], tensor[1], grey[2] / np.float32(255)]):
        torch.testing.assert_close(run.features(same), expected, rtol=1e-4, atol=1e-5)
    for one in (grey[0], grey[0, :, :, 0], tensor[0], tensor[:1], grey[0].astype(np.float64) / 255):
        torch.testing.assert_close(run.features(one), expected[:1], rtol=1e-4, atol=1e-5)
    rgb = np.repeat(grey, 3, 3)
    torch.testing.assert_close(run.features(rgb), expected, rtol=1e-2, atol=1e-2)  # luma rounds


def test_other_sizes_are_cropped_to_the_middle_and_resized(run: byov.Run) -> None:
    wide = torch.from_numpy(noise((2, 1, 20, 30)))
    assert torch.equal(run.features(wide), run.features(resized(wide[:, :, :, 5:25], 8)))
    sizes = [noise((9, 30)), noise((8, 8, 3)), torch.rand(1, 40, 17)]
    alone = torch.cat([run.features(each) for each in sizes])
    torch.testing.assert_close(run.features(sizes), alone, rtol=1e-4, atol=1e-5)


def test_files_pictures_and_arrays_agree(colour: tuple[byov.Run, Path]) -> None:
    run, photos = colour
    paths = sorted(photos.iterdir())
    expected = run.features(photos)
    as_trained = torch.stack([torch.from_numpy(decode(path, storage_side(32))) for path in paths])
    assert torch.equal(expected, run.features(resized(as_trained, 32)))
    for same in (str(photos), f"folder:{photos}", paths, [str(path) for path in paths]):
        assert torch.equal(run.features(same), expected)
    torch.testing.assert_close(run.features([Image.open(path) for path in paths]), expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(run.features(paths[3]), expected[3:4], rtol=1e-4, atol=1e-4)
    with Image.open(paths[0]) as picture:
        torch.testing.assert_close(run.features(picture), expected[:1], rtol=1e-4, atol=1e-4)
        array = run.features(np.asarray(picture))  # resized once instead of twice: nearly the same
    assert float(torch.cosine_similarity(array, expected[:1])) > 0.99
    scores = run.score(photos, draws=2)
    assert scores.paths == tuple(path.name for path in paths) and torch.equal(scores.embedding, expected)
    assert run.score(paths[:2], draws=2).paths == tuple(map(str, paths[:2]))
    assert run.score(np.asarray(Image.open(paths[0])), draws=2).paths is None


def test_files_that_cannot_be_read(colour: tuple[byov.Run, Path], tmp_path: Path, capsys) -> None:
    run, photos = colour
    for path in sorted(photos.iterdir())[:2]:
        shutil.copy(path, tmp_path)
    (tmp_path / "broken.png").write_bytes(b"no image")
    assert len(run.features(tmp_path)) == 2
    assert "1 files in" in (said := capsys.readouterr().err) and "broken.png (not an image)" in said
    with pytest.raises(BadInput, match=r"broken\.png cannot be used"):
        run.features(sorted(tmp_path.iterdir()))
    for path in tmp_path.glob("0*"):
        path.unlink()
    with pytest.raises(BadInput, match="none of the images"):
        run.features(tmp_path)
    (tmp_path / "broken.png").unlink()
    with pytest.raises(BadInput, match="no images in"):
        run.score(tmp_path)
    with pytest.raises(BadInput, match="no file or folder"):
        run.features(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("images", "sentence"),
    [
        (np.full((2, 8, 8, 1), 255.0), "reach 255: divide by 255"),
        (torch.full((2, 1, 8, 8), 2.0), "reach 2: divide by 255"),
        (torch.full((2, 1, 8, 8), -1.5), "undo the normalization"),
        (torch.full((1, 8, 8), float("nan")), "not finite"),
        (np.full((8, 8), np.inf), "not finite"),
        (np.zeros((8, 8), dtype=np.int64), "int64 cannot be used: give uint8"),
        (np.zeros((8, 8), dtype=bool), "bool cannot be used: give uint8"),
        (np.zeros((8, 8), dtype=complex), "complex128 cannot be used"),
        (np.zeros((2, 8, 8)), r"\(H, W, C\) or \(N, H, W, C\), with 1 or 3 channels, not \(2, 8, 8\)"),
        (np.zeros((8, 8, 4)), "drop the alpha channel"),
        (torch.zeros(8, 8), r"\(C, H, W\) or \(N, C, H, W\)"),
        (torch.zeros(2, 8, 8, 3), "reorder the axes"),
        (torch.zeros(2, 1, 0, 8), "have no pixels"),
        ([], "no images in the list"),
        (3, "not as int"),
        ([3], "not int"),
    ],
)
def test_images_that_cannot_be_used(run: byov.Run, images: Any, sentence: str) -> None:
    for use in (run.features, run.score):
        with pytest.raises(BadInput, match=sentence) as error:
            use(images)
        assert "\n" not in str(error.value) and str(error.value).endswith(".")


def test_floats_may_round_beyond_the_range(run: byov.Run) -> None:
    assert torch.equal(run.features(torch.full((1, 1, 8, 8), 1.0001)), run.features(torch.ones(1, 1, 8, 8)))


def test_no_images_give_no_rows(run: byov.Run) -> None:
    nothing = torch.empty((0, 1, 8, 8), dtype=torch.uint8)
    for empty in (nothing, nothing.numpy().reshape(0, 8, 8, 1), torch.empty(0, 3, 50, 40)):
        assert run.features(empty).shape == (0, 64)
        scores = run.score(empty)
        assert scores.oddness.shape == scores.uncertainty.shape == (0,) and scores.embedding.shape == (0, 64)
        assert scores.oddness_percentile is not None and scores.oddness_percentile.shape == (0,)


def test_fast_scores_have_the_same_oddness(run: byov.Run) -> None:
    images = noise((6, 8, 8, 1))
    exact, fast = run.score(images, draws=2), run.score(images, draws=2, fast=True)
    torch.testing.assert_close(fast.oddness, exact.oddness, rtol=1e-4, atol=1e-6)
    assert fast.uncertainty.shape == (6,) and not torch.equal(fast.uncertainty, exact.uncertainty)
