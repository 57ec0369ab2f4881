"""Planted folders: what is built, that it is built twice the same, and the table's arithmetic."""

from __future__ import annotations

import csv
import hashlib
import json
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

ROOM = Path(__file__).resolve().parents[1] / "benchmarks"
sys.path.append(str(ROOM))  # its files are scripts, not a package

import odd_images  # noqa: E402
import planted  # noqa: E402

ALL_BUT_CLOTHES = [kind for kind in planted.KINDS if kind != "clothes"]  # those would need a download


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """40 small JPEGs, each of another colour."""
    folder = tmp_path / "photos"
    folder.mkdir()
    for k in range(40):
        values = np.random.default_rng(k).integers(0, 256, (4, 5, 3), dtype=np.uint8)
        Image.fromarray(values).resize((110, 90), Image.Resampling.BICUBIC).save(folder / f"{k}.JPEG")
    return folder


def built(photos: Path, out: Path, *odd: str, images: int = 30, seed: int = 3) -> Path:
    planted.build(planted.Planted((str(photos),), odd, images, seed), out)
    return out


def truth(folder: Path) -> dict[str, str]:
    with (folder / "truth.csv").open(encoding="utf-8", newline="") as file:
        return {row["path"]: row["kind"] for row in csv.DictReader(file)}


def contents(folder: Path) -> dict[str, str]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


# ---------------------------------------------------------------------------------------------------------------- build


def test_truth_names_every_image_and_its_kind(photos: Path, tmp_path: Path) -> None:
    folder = built(photos, tmp_path / "out", "noise:3", "tiny:2:alike", f"pets={photos}:4")
    kinds = truth(folder)
    assert Counter(kinds.values()) == {"normal": 30, "noise": 3, "tiny:alike": 2, "pets": 4}
    assert set(kinds) == {str(path.relative_to(folder / "images")) for path in (folder / "images").rglob("*.*")}
    for path, kind in kinds.items():
        with Image.open(folder / "images" / path) as image:
            image.load()
            assert (max(image.size) < 25) == (kind == "tiny:alike")


def test_the_same_seed_gives_the_same_bytes(photos: Path, tmp_path: Path) -> None:
    odd = [f"{kind}:{1 + (kind == 'letters')}" for kind in ALL_BUT_CLOTHES]
    first, second = (contents(built(photos, tmp_path / name, *odd)) for name in ("first", "second"))
    assert first == second
    assert first != contents(built(photos, tmp_path / "third", *odd, seed=4))


def test_another_odd_kind_does_not_change_which_photographs_are_taken(photos: Path) -> None:
    def normal(*odd: str) -> list[bytes]:
        _, _, images = next(planted._groups(planted.Planted((str(photos),), odd, 30)))
        return [image.tobytes() for image in images]

    assert normal("noise:2") == normal("tiny:5", "dark:1")


def test_the_folder_is_messy_and_its_names_say_nothing(photos: Path, tmp_path: Path) -> None:
    for k in range(40, 200):
        (photos / f"{k}.JPEG").write_bytes((photos / f"{k % 40}.JPEG").read_bytes())
    folder = built(photos, tmp_path / "out", "letters:100", images=200)
    kinds = truth(folder)
    odd = [kind != "normal" for _, kind in sorted(kinds.items())]
    assert 20 < sum(odd[:150]) < 80
    for label in ("normal", "letters"):
        paths = [path for path, kind in kinds.items() if kind == label]
        assert {Path(path).suffix for path in paths} == {".jpg", ".JPG", ".jpeg", ".png"}
        assert len({str(Path(path).parent) for path in paths}) == 5
    images = [Image.open(folder / "images" / path) for path, kind in kinds.items() if kind == "normal"]
    assert len({image.size for image in images}) > 20
    assert {image.mode for image in images} == {"L", "RGB"}
    assert any(image.info.get("progressive") for image in images)


def likeness(images: list[Image.Image]) -> float:
    """The mean correlation of two images' grey values, which a change of brightness leaves as it is."""
    grey = np.stack([np.asarray(image.convert("L").resize((16, 16)), float).ravel() for image in images])
    return float(np.corrcoef(grey)[np.triu_indices(len(images), 1)].mean())


@pytest.mark.parametrize("kind", ALL_BUT_CLOTHES)
def test_alike_images_are_alike_and_others_are_not(kind: str, photos: Path) -> None:
    spare = planted._photographs("dark", planted._listed(photos))
    make = planted._kind(planted.Odd(kind, None, 6, False), spare)
    alike = list(planted._alike(make)(np.random.default_rng(0), 6))
    assert len({image.tobytes() for image in alike}) == 6
    assert likeness(alike) > 0.7  # seeds 0 to 4 of all kinds: 0.71 to 1.00, and independent ones -0.14 to 0.62
    assert likeness(list(make(np.random.default_rng(0), 6))) < 0.65


def test_dark_photographs_are_almost_black(photos: Path, tmp_path: Path) -> None:
    folder = built(photos, tmp_path / "out", "dark:5")
    for path, kind in truth(folder).items():
        if kind == "dark":
            assert np.asarray(Image.open(folder / "images" / path)).mean() < 25


def test_ordinary_images_may_be_of_one_kind(tmp_path: Path) -> None:
    planted.build(planted.Planted(("thermal",), ("digits:2",), 5), tmp_path / "out")
    assert Counter(truth(tmp_path / "out").values()) == {"normal": 5, "digits": 2}


def test_an_existing_folder_is_not_overwritten(
    photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "out").mkdir()
    command = ["build", "--normal", str(photos), "--odd", "noise:1", "--images", "5", "--out", str(tmp_path / "out")]
    assert planted.main(command) == 2
    said = capsys.readouterr().err
    assert said == f"{tmp_path / 'out'} is already there and is not overwritten: choose another --out, or remove it.\n"
    assert not list((tmp_path / "out").iterdir())


@pytest.mark.parametrize(
    ("odd", "images", "said"),
    [
        ("noise", 5, "is not a group of odd images"),
        ("noise:0", 5, "is not a group of odd images"),
        ("cats:3", 5, "there is no kind 'cats'"),
        ("normal=photos:3", 5, "needs a name before the ="),
        ("pets=nowhere:3", 5, "nowhere is not a folder"),
        ("noise:1", 41, "have 40 images"),
        ("dark:11", 30, "there are only 10"),
        ("noise:1", 0, "--images must be at least 1"),
    ],
)
def test_bad_input_is_a_sentence_and_leaves_nothing(
    odd: str, images: int, said: str, photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "new" / "out"
    command = ["build", "--normal", str(photos), "--odd", odd, "--images", str(images), "--out", str(out)]
    assert planted.main(command) == 2
    assert said in capsys.readouterr().err
    assert not out.parent.exists()


def test_an_unreadable_photograph_is_named_and_leaves_nothing(photos: Path, tmp_path: Path) -> None:
    (photos / "bad.jpg").write_text("no image")
    with pytest.raises(planted.BadInput, match=r"bad\.jpg cannot be read"):
        built(photos, tmp_path / "new" / "out", "noise:1", images=41)
    assert not list((tmp_path / "new").iterdir())


def test_a_path_may_hold_colons() -> None:
    assert planted.parse_odd("pets=a:b/c:12:alike") == planted.Odd("pets", Path("a:b/c"), 12, True)


# ----------------------------------------------------------------------------------------------------------- fixed sets


def test_the_sets_share_no_class_and_no_odd_kind() -> None:
    def of(name: str) -> tuple[set[str], set[str]]:
        folders = planted.FOLDERS[name].values()
        classes = {Path(normal).name for folder in folders for normal in folder.normal if "/" in normal}
        return classes, {planted.parse_odd(odd).kind for folder in folders for odd in folder.odd}

    (choice_classes, choice_kinds), (report_classes, report_kinds) = of("choice"), of("report")
    assert len(choice_classes) == len(report_classes) == 5
    assert max(choice_classes) < min(report_classes)
    assert not choice_kinds & report_kinds


def test_few_images_are_odd_and_an_alike_group_is_smaller_still() -> None:
    folders = [folder for group in planted.FOLDERS.values() for folder in group.values()]
    assert len({folder.seed for folder in folders}) == len(folders)
    for folder in folders:
        odd = [planted.parse_odd(text) for text in folder.odd]
        total = folder.images + sum(group.count for group in odd)
        assert 0.03 <= sum(group.count for group in odd) / total <= 0.06
        assert all(group.count <= 0.03 * total for group in odd)


def test_paths_of_a_set_lie_below_the_data_folder() -> None:
    moved = planted.under(Path("/data"), planted.FOLDERS["choice"]["church"])
    assert moved.normal[0] == "/data/imagenette-224/train/n03028079"
    assert moved.odd == ("noise:15", "scans:15", "tiny:10", "pets=/data/oxford-iiit-pet-128/images:15")
    assert planted.under(Path("/data"), planted.FOLDERS["report"]["clothes"]).normal == ("clothes",)


# ---------------------------------------------------------------------------------------------------------------- table


def folder_of(place: Path, name: str, rows: dict[str, tuple[float, str]], column: str = "oddness") -> list[Path]:
    """A table of scores and its truth, the latter in another order."""
    (place / name).mkdir()
    scores, answers = place / f"{name}.parquet", place / name / "truth.csv"
    pq.write_table(pa.table({"path": list(rows), column: [value for value, _ in rows.values()]}), scores)
    lines = [f"{path},{kind}\n" for path, (_, kind) in reversed(rows.items())]
    answers.write_text("path,kind\n" + "".join(lines), encoding="utf-8")
    return [scores, answers]


@pytest.fixture
def two(tmp_path: Path) -> list[list[Path]]:
    a = {"1": (9.0, "noise"), "2": (5.0, "normal"), "3": (4.0, "scans:alike"), "4": (1.0, "normal")}
    b = {"1": (0.1, "noise"), "2": (0.2, "noise"), "3": (0.15, "normal"), "4": (0.9, "noise"), "5": (0.3, "normal")}
    return [folder_of(tmp_path, "a", a), folder_of(tmp_path, "b", b)]


def run_table(pairs: list[list[Path]], *more: str) -> int:
    scores, truths = ([str(path) for path in column] for column in zip(*pairs, strict=True))
    return planted.main(["table", "--scores", *scores, "--truth", *truths, *more])


def test_the_table_of_a_hand_computed_example(
    two: list[list[Path]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_table(two, "--out", str(tmp_path / "table.json")) == 0
    results = json.loads((tmp_path / "table.json").read_text())
    a, b, pool = results["folders"]["a"], results["folders"]["b"], results["pooled"]
    assert (a["noise"]["auroc"], a["scans:alike"]["auroc"], a["all odd"]["auroc"]) == (1.0, 0.5, 0.75)
    assert (a["noise"]["found"], a["scans:alike"]["found"], a["all odd"]["found"]) == (1.0, 0.0, 0.5)
    # 0.1 is above none of the two ordinary images, 0.2 above one, 0.9 above both: 3 of 6 pairs
    assert b["noise"] == {"images": 3, "auroc": 0.5, "found": pytest.approx(2 / 3), "folders": 1}
    assert pool["noise"] == {"images": 4, "auroc": pytest.approx((1 + 3 * 0.5) / 4), "found": 0.75, "folders": 2}
    assert pool["all alike"]["images"] == 1
    assert pool["all odd"]["found"] == pytest.approx(3 / 5)  # 1 of 2 and 2 of 3
    said = capsys.readouterr().out
    assert "| a | 2 | 0.750 | 50 |" in said
    assert "| all 2 | 5 | 0.600 | 60 |" in said
    assert "| noise | 2 | 4 | 0.625 | 75 |" in said


def test_equal_scores_share_the_last_places() -> None:
    chances = planted.among_first(torch.tensor([3.0, 2.0, 2.0, 2.0, 1.0], dtype=torch.float64), 2)
    assert chances.tolist() == pytest.approx([1, 1 / 3, 1 / 3, 1 / 3, 0])


def test_any_column_can_be_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pair = folder_of(tmp_path, "c", {"1": (2.0, "tiny"), "2": (1.0, "normal")}, column="uncertainty")
    assert run_table([pair]) == 2
    assert "has no column 'oddness': choose one of path, uncertainty" in capsys.readouterr().err
    assert run_table([pair], "--column", "uncertainty") == 0


def test_a_table_of_another_folder_is_refused(two: list[list[Path]], capsys: pytest.CaptureFixture[str]) -> None:
    assert run_table([[two[0][0], two[1][1]]]) == 2
    assert "differ: score the folder images/ next to that truth.csv." in capsys.readouterr().err


@pytest.mark.parametrize("value", [float("nan"), None])
def test_an_image_without_a_score_is_refused(
    value: float | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = {"1": (2.0, "tiny"), "2": (1.0, "normal"), "3": (value, "normal")}
    assert run_table([folder_of(tmp_path, "c", rows)]) == 2
    assert "needs a number in oddness for each image" in capsys.readouterr().err


def test_renderers_are_keyed() -> None:
    for render in odd_images.RENDERERS.values():
        one, two, other = (render(np.random.default_rng(seed)) for seed in (1, 1, 2))
        assert one.tobytes() == two.tobytes() != other.tobytes()
