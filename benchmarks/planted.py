"""Plant odd images in a folder of ordinary ones, and measure how well a score finds them.

    python benchmarks/planted.py build --normal CLASS_FOLDER --odd noise:20 charts:30:alike --images 1300 --out FOLDER
    python benchmarks/planted.py folders --set report --data DATA --out FOLDER
    python benchmarks/planted.py table --scores a.parquet b.parquet --truth a/truth.csv b/truth.csv --column uncertainty

A planted folder has `images/`, which is what to train on and to score, and `truth.csv`: path below `images/`, and kind
(`normal` for the ordinary images). Names, order, formats and subfolders say nothing about the kind. The same seed gives
the same bytes, as long as numpy, Pillow and matplotlib stay the same.

An odd kind is one of KINDS, or NAME=PATH for photographs sampled from a folder; NAME is then the kind in truth.csv.
With `:alike`, the images are near-copies of one image, and the kind is, for example, `charts:alike`: groups of alike
images are harder for scores that compare an image with its nearest neighbours.

`folders` builds one of the fixed sets in FOLDERS. Settings are chosen on `choice` and reported on `report`; the two
sets share no ordinary image and no odd kind. DATA holds imagenette-224/ (train and val) and oxford-iiit-pet-128/images.
"""

from __future__ import annotations

import argparse
import csv
import io
import math
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from itertools import chain
from pathlib import Path

import numpy as np
import torch
from numpy.random import Generator
from PIL import Image

from byov._core.errors import BadInput
from byov._core.files import folder_written_whole, write_json
from byov.data.image_files import list_images
from byov.data.sources import open_source
from byov.metrics.ranking import auroc
from odd_images import RENDERERS, Array, darkened, enlarged, varied

NORMAL, ALIKE = "normal", ":alike"
SMALLEST = 80  # pixels of a photograph's shorter side, where there are so many
GREY = {"digits": "digits", "clothes": "fashion_mnist"}  # sources of small grey images
KINDS = (*RENDERERS, *GREY, "dark")

Kind = Callable[[Generator, int], Iterator[Image.Image]]
"""Give this many independent images, from this generator."""


# -------------------------------------------------------------------------------------------------------- fixed folders


@dataclass(frozen=True)
class Planted:
    """What to build: ordinary images, and odd ones as `KIND:COUNT[:alike]`."""

    normal: tuple[str, ...]
    """Folders of photographs, or one kind."""
    odd: tuple[str, ...]
    images: int = 1300
    """Ordinary ones."""
    seed: int = 0


TENCH, SPRINGER, CASSETTE, CHAINSAW, CHURCH = "n01440764", "n02102040", "n02979186", "n03000684", "n03028079"
HORN, TRUCK, PUMP, GOLF, PARACHUTE = "n03394916", "n03417042", "n03425413", "n03445777", "n03888257"
PETS = "pets=oxford-iiit-pet-128/images"


def _classes(*names: str) -> tuple[str, ...]:
    """Both splits of some classes: one class alone has fewer than 1,300 images in either."""
    return tuple(f"imagenette-224/{split}/{name}" for name in names for split in ("train", "val"))


FOLDERS: Mapping[str, Mapping[str, Planted]] = {
    "choice": {
        "church": Planted(_classes(CHURCH), ("noise:15", "scans:15", "tiny:10", f"{PETS}:15"), seed=1),
        # No pets here: springers are dogs.
        "tench-springer": Planted(
            _classes(TENCH, SPRINGER),
            ("scans:30:alike", "noise:10", "tiny:10", f"churches=imagenette-224/train/{CHURCH}:12"),
            seed=2,
        ),
        "cassette-chainsaw": Planted(
            _classes(CASSETTE, CHAINSAW), (f"{PETS}:30:alike", "tiny:12", "noise:12", "scans:8"), seed=3
        ),
    },
    "report": {
        "parachute": Planted(_classes(PARACHUTE), ("charts:30:alike", "letters:15", "dark:12"), 1250, seed=11),
        "truck-pump": Planted(_classes(TRUCK, PUMP), ("screens:30:alike", "thermal:15", "clothes:15"), seed=12),
        "horn": Planted(_classes(HORN), ("letters:30:alike", "microscopy:15", "clothes:15"), seed=13),
        "golf": Planted(_classes(GOLF), ("thermal:30:alike", "charts:15", "screens:12"), seed=14),
        "five-classes": Planted(
            _classes(HORN, TRUCK, PUMP, GOLF, PARACHUTE),
            ("microscopy:30:alike", "dark:12", "letters:12", "digits:12"),
            seed=15,
        ),
        "truck": Planted(
            _classes(TRUCK),
            ("dark:30:alike", "digits:12", f"parachutes=imagenette-224/train/{PARACHUTE}:15"),
            1250,
            seed=16,
        ),
        # Two folders whose ordinary images are not photographs.
        "clothes": Planted(("clothes",), ("digits:30:alike", "thermal:12", "microscopy:12", "letters:12"), seed=17),
        "microscopy": Planted(
            ("microscopy",),
            ("clothes:30:alike", "charts:12", "screens:12", f"horns=imagenette-224/train/{HORN}:12"),
            seed=18,
        ),
    },
}


def under(data: Path, planted: Planted) -> Planted:
    """Return the same with its paths below the data folder."""
    normal = tuple(name if name in KINDS else str(data / name) for name in planted.normal)
    odd = tuple(text.replace("=", f"={data}/", 1) for text in planted.odd)
    return replace(planted, normal=normal, odd=odd)


# --------------------------------------------------------------------------------------------------------------- images


def _rendered(render: Callable[[Generator], Image.Image]) -> Kind:
    return lambda rng, count: map(render, rng.spawn(count))


def _sampled(rng: Generator, count: int, have: int, name: str) -> Iterable[tuple[int, Generator]]:
    """Draw positions without repetition, each with a generator for what happens to the image there."""
    if count > have:
        raise BadInput(f"{count} images of the kind {name} are asked for, but there are only {have}: ask for fewer.")
    return zip(rng.permutation(have)[:count].tolist(), rng.spawn(count), strict=True)


def _enlarged(name: str, source: str) -> Kind:
    """Take small grey images, each at most once."""

    def images(rng: Generator, count: int) -> Iterator[Image.Image]:
        values = _grey(source)
        return (enlarged(values[k], child) for k, child in _sampled(rng, count, len(values), name))

    return images


@lru_cache
def _grey(source: str) -> Array:
    """Return the train images of a source, (N, H, W)."""
    return open_source(source).load("train").images[:, 0].numpy()


def _photographs(name: str, paths: Sequence[Path]) -> Kind:
    """Take photographs, each at most once, and make their sizes as mixed as a user's."""
    return lambda rng, count: (_mixed(paths[k], child) for k, child in _sampled(rng, count, len(paths), name))


def _mixed(path: Path, rng: Generator) -> Image.Image:
    """Open a photograph; some become grey, some narrower, some smaller."""
    grey, narrower, smaller = rng.random(3) < (0.04, 0.15, 0.35)
    try:
        with Image.open(path) as opened:
            image = opened.convert("L" if grey or opened.mode == "L" else "RGB")
    except OSError as error:
        raise BadInput(f"{path} cannot be read as an image: remove it, or give another folder.") from error
    if narrower:
        width, height = image.size
        share = rng.uniform(0.7, 0.95)
        image = image.crop((0, 0, *((share * width, height) if width > height else (width, share * height))))
    if smaller:
        # Not below the side of a small network: enlarged again, a photograph would stand out by its blur alone.
        share = min(1, max(rng.uniform(0.4, 0.9), SMALLEST / min(image.size)))
        image = image.resize([max(1, int(share * side)) for side in image.size])
    return image


def _alike(kind: Kind) -> Kind:
    """Give near-copies of one image."""

    def images(rng: Generator, count: int) -> Iterator[Image.Image]:
        base = next(kind(rng, 1))
        return (varied(base, child) for child in rng.spawn(count))

    return images


def _dark(kind: Kind) -> Kind:
    def images(rng: Generator, count: int) -> Iterator[Image.Image]:
        pairs = zip(kind(rng, count), rng.spawn(count), strict=True)
        return (darkened(image, child) for image, child in pairs)

    return images


def _listed(folder: Path) -> list[Path]:
    if not folder.is_dir():
        raise BadInput(f"{folder} is not a folder: give folders of images, or one kind alone: {', '.join(KINDS)}.")
    return [folder / file.path for file in list_images(folder).files]


# ---------------------------------------------------------------------------------------------------------------- build


@dataclass(frozen=True)
class Odd:
    """A group of odd images that the user asked for."""

    kind: str
    path: Path | None
    count: int
    alike: bool

    @property
    def label(self) -> str:
        return self.kind + ALIKE * self.alike


def parse_odd(text: str) -> Odd:
    """Read KIND:COUNT[:alike], where KIND may be NAME=PATH with colons in the path."""
    alike = text.endswith(ALIKE)
    name, _, count = text.removesuffix(ALIKE).rpartition(":")
    kind, _, path = name.partition("=")
    if not name or not count.isdecimal() or int(count) == 0:
        raise BadInput(f"{text!r} is not a group of odd images: write KIND:COUNT or KIND:COUNT:alike, as in noise:20.")
    if not path and kind not in KINDS:
        raise BadInput(f"there is no kind {kind!r}: give one of {', '.join(KINDS)}, or NAME=PATH for a folder.")
    if kind in ("", NORMAL):
        raise BadInput(f"{text!r} needs a name before the = that is not {NORMAL!r}, as in pets=PATH:20.")
    return Odd(kind, Path(path) if path else None, int(count), alike)


def build(planted: Planted, out: Path) -> int:
    """Write a planted folder, whole or not at all, and return its number of images."""
    if out.exists():
        raise BadInput(f"{out} is already there and is not overwritten: choose another --out, or remove it.")
    if planted.images < 1 or planted.seed < 0:
        raise BadInput("--images must be at least 1, and --seed at least 0.")
    groups = list(_groups(planted))
    labels = [label for label, count, _ in groups for _ in range(count)]
    images = chain.from_iterable(group for _, _, group in groups)
    paths = _paths(len(labels), _rng(planted.seed, "names"))
    with folder_written_whole(out) as temporary:
        rows = []
        writers = _rng(planted.seed, "files").spawn(len(labels))
        for label, path, image, rng in zip(labels, paths, images, writers, strict=True):
            rows.append((_write(image, temporary / "images", path, rng), label))
        with (temporary / "truth.csv").open("w", encoding="utf-8", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows([("path", "kind"), *sorted(rows)])
    return len(labels)


def _rng(seed: int, *names: object) -> Generator:
    """Return a separate generator for each purpose: one more odd kind must not change the other images."""
    return np.random.default_rng([seed, *(zlib.crc32(str(name).encode()) for name in names)])


def _groups(planted: Planted) -> Iterator[tuple[str, int, Iterator[Image.Image]]]:
    """Yield label, number and images of the ordinary images, then of each group of odd ones."""
    normal, spare = _normal(planted)
    yield NORMAL, planted.images, normal
    for number, odd in enumerate(map(parse_odd, planted.odd)):
        kind = _kind(odd, spare)
        rng = _rng(planted.seed, "odd", number, odd.label)
        yield odd.label, odd.count, (_alike(kind) if odd.alike else kind)(rng, odd.count)


def _normal(planted: Planted) -> tuple[Iterator[Image.Image], Kind]:
    """Return the ordinary images, and a kind that gives others of the same sort, to make dark ones from."""
    rng = _rng(planted.seed, NORMAL)
    if len(planted.normal) == 1 and planted.normal[0] in KINDS and planted.normal[0] != "dark":
        kind = _kind(Odd(planted.normal[0], None, planted.images, False), None)
        return kind(rng, planted.images), kind
    paths = sorted({path for folder in planted.normal for path in _listed(Path(folder))})
    if len(paths) < planted.images:
        raise BadInput(f"the folders of --normal have {len(paths)} images: give more folders or a smaller --images.")
    # By position, so that the choice does not depend on where the data lies.
    order = rng.permutation(len(paths))
    chosen, rest = ([paths[k] for k in part] for part in (order[: planted.images], order[planted.images :]))
    return _photographs(NORMAL, chosen)(rng, len(chosen)), _photographs("dark", rest)


def _kind(odd: Odd, spare: Kind | None) -> Kind:
    if odd.path is not None:
        return _photographs(odd.kind, _listed(odd.path))
    if odd.kind == "dark":
        assert spare is not None
        return _dark(spare)
    if odd.kind in RENDERERS:
        return _rendered(RENDERERS[odd.kind])
    return _enlarged(odd.kind, GREY[odd.kind])


def _paths(count: int, rng: Generator) -> list[str]:
    """Draw paths without a suffix, in random order: most images are at the top, the others in subfolders."""
    numbers = rng.choice(10 * count + 1000, count, replace=False)
    places = rng.choice(("", "2019/", "2020/summer/", "from phone/", "misc/"), count, p=(0.6, 0.1, 0.1, 0.1, 0.1))
    return [f"{place}IMG_{number:05d}" for place, number in zip(places, numbers, strict=True)]


def _write(image: Image.Image, root: Path, path: str, rng: Generator) -> str:
    """Write a file as one of several cameras would, and return its path below the root. The kind does not matter."""
    memory = io.BytesIO()
    if rng.random() < 0.08:
        suffix = ".png"
        image.save(memory, "PNG", compress_level=1)
    else:
        suffix = str(rng.choice((".jpg", ".JPG", ".jpeg")))
        image.save(memory, "JPEG", quality=int(rng.integers(80, 96)), progressive=bool(rng.random() < 0.1))
    file = root / f"{path}{suffix}"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(memory.getvalue())
    return f"{path}{suffix}"


# ---------------------------------------------------------------------------------------------------------------- table


@dataclass(frozen=True)
class Found:
    """How well a score finds one group of odd images in one folder, or in several."""

    images: int
    auroc: float
    """Against all ordinary images of the folder; over several folders the mean, weighted by `images`."""
    found: float
    """Share of the group among the first n images, where n is the number of all odd images of the folder."""
    folders: int = 1


def evaluate(scores: torch.Tensor, kinds: Sequence[str]) -> dict[str, Found]:
    """Measure one folder: each kind, all groups of alike images, all single ones, and all odd images."""
    normal = np.array([kind == NORMAL for kind in kinds])
    alike = np.array([kind.endswith(ALIKE) for kind in kinds])
    groups = {kind: np.array(kinds) == kind for kind in sorted(set(kinds) - {NORMAL})}
    groups |= {"all alike": alike, "all single": ~alike & ~normal, "all odd": ~normal}
    first = among_first(scores.double(), int((~normal).sum()))
    found = {}
    for name, members in groups.items():
        if members.any():
            kept = torch.from_numpy(members | normal)
            area = auroc(scores[kept], torch.from_numpy(members)[kept])
            found[name] = Found(int(members.sum()), area, float(first[torch.from_numpy(members)].mean()))
    return found


def among_first(scores: torch.Tensor, n: int) -> torch.Tensor:
    """Return for each image the chance that it is among the n highest, if equal scores are ordered at random."""
    last = scores.sort(descending=True).values[n - 1]
    above, tied = scores > last, scores == last
    return above.double() + tied * (n - above.sum()) / tied.sum()


def pooled(folders: Iterable[Mapping[str, Found]]) -> dict[str, Found]:
    """Average each kind over the folders that have it, weighted by its number of images.

    Scores of two folders are not comparable, so AUROC is taken within a folder and never over images of several.
    """
    by_kind: dict[str, list[Found]] = {}
    for folder in folders:
        for kind, found in folder.items():
            by_kind.setdefault(kind, []).append(found)
    return {kind: _mean(by_kind[kind]) for kind in sorted(by_kind, key=lambda kind: (kind.startswith("all "), kind))}


def _mean(parts: Sequence[Found]) -> Found:
    weights = [part.images for part in parts]
    means = (np.average([getattr(part, name) for part in parts], weights=weights) for name in ("auroc", "found"))
    return Found(sum(weights), *map(float, means), folders=len(parts))


def read_folder(scores: Path, truth: Path, column: str) -> tuple[torch.Tensor, list[str]]:
    """Return the column's values and the kinds, image by image."""
    import pyarrow.parquet as pq

    for path in (scores, truth):
        if not path.is_file():
            raise BadInput(f"{path} is not there: give tables of `byov score` and the truth.csv of the same folders.")
    with truth.open(encoding="utf-8", newline="") as file:
        kinds = {row["path"]: row["kind"] for row in csv.DictReader(file)}
    names = pq.read_schema(scores).names
    if column not in names:
        raise BadInput(f"{scores} has no column {column!r}: choose one of {', '.join(names)} with --column.")
    table = pq.read_table(scores, columns=["path", column])
    paths, values = table["path"].to_pylist(), table[column].to_pylist()
    if set(paths) != set(kinds):
        raise BadInput(f"the paths in {scores} and {truth} differ: score the folder images/ next to that truth.csv.")
    numbers = all(isinstance(value, int | float) and not math.isnan(value) for value in values)
    if not numbers or NORMAL not in kinds.values() or set(kinds.values()) == {NORMAL}:
        raise BadInput(f"{scores} with {truth} needs a number in {column} for each image, normal ones and odd ones.")
    return torch.tensor(values, dtype=torch.float64), [kinds[path] for path in paths]


def render(column: str, folders: Mapping[str, Mapping[str, Found]], together: Mapping[str, Found]) -> str:
    """Return the three tables in Markdown."""
    summary = [(name, str(found["all odd"].images), *_shown(found["all odd"])) for name, found in folders.items()]
    total = together["all odd"]
    summary.append((f"all {len(folders)}", str(total.images), *_shown(total)))
    kinds = [
        (name, kind, str(found.images), *_shown(found))
        for name, kinds in folders.items()
        for kind, found in kinds.items()
        if not kind.startswith("all ")
    ]
    pool = [(kind, str(found.folders), str(found.images), *_shown(found)) for kind, found in together.items()]
    return "\n\n".join(
        (
            f"Odd images found by `{column}`. n: the number of odd images in the folder.",
            _markdown(("folder", "odd images", "AUROC", "odd among the first n, %"), summary),
            "Each kind against all ordinary images of its folder:",
            _markdown(("folder", "kind", "images", "AUROC", "of them among the first n, %"), kinds),
            "Each kind over all folders: means of the folders' values, weighted by the number of images of the kind.",
            _markdown(("kind", "folders", "images", "AUROC", "of them among the first n, %"), pool),
        )
    )


def brief(column: str, odd: Found) -> str:
    """Return the whole in a line."""
    return (
        f"{odd.images} odd images were planted. By `{column}`, {100 * odd.found:.0f}% of them are among the first "
        f"{odd.images} (AUROC {odd.auroc:.3f}; chance is 0.5)."
    )


def _shown(found: Found) -> tuple[str, str]:
    return f"{found.auroc:.3f}", f"{100 * found.found:.0f}"


def _markdown(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(line)} |" for line in (titles, ["---"] * len(titles), *rows))


# ------------------------------------------------------------------------------------------------------------- commands


def _build(options: argparse.Namespace) -> None:
    planted = Planted(tuple(options.normal), tuple(options.odd), options.images, options.seed)
    print(f"{options.out}: {build(planted, options.out):,} images")


def _folders(options: argparse.Namespace) -> None:
    chosen = FOLDERS[options.set]
    for name in chosen:
        if (options.out / name).exists():
            raise BadInput(f"{options.out / name} is already there and is not overwritten: choose another --out.")
    for name, planted in chosen.items():
        print(f"{options.out / name}: {build(under(options.data, planted), options.out / name):,} images", flush=True)


def _table(options: argparse.Namespace) -> None:
    if len(options.scores) != len(options.truth):
        raise BadInput("--scores and --truth need as many files each, in the same order: one pair for each folder.")
    folders: dict[str, dict[str, Found]] = {}
    for scores, truth in zip(options.scores, options.truth, strict=True):
        name = truth.resolve().parent.name
        name = name if name not in folders else f"{name} ({len(folders) + 1})"
        folders[name] = evaluate(*read_folder(scores, truth, options.column))
    together = pooled(folders.values())
    print(brief(options.column, together["all odd"]) if options.brief else render(options.column, folders, together))
    if options.out:
        plain = {name: {kind: asdict(found) for kind, found in kinds.items()} for name, kinds in folders.items()}
        pool = {kind: asdict(found) for kind, found in together.items()}
        how = "means of the folders' values, weighted by the number of images of the kind"
        write_json(options.out, {"column": options.column, "folders": plain, "pooled": pool, "pooled_by": how})


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    one = commands.add_parser("build", help="one planted folder")
    one.add_argument("--normal", nargs="+", required=True, help="folders of photographs, sampled together; or one kind")
    one.add_argument(
        "--odd", nargs="+", required=True, help=f"KIND:COUNT[:alike]; kinds: {', '.join(KINDS)}, NAME=PATH"
    )
    one.add_argument("--images", type=int, default=1300, help="number of ordinary images")
    one.add_argument("--seed", type=int, default=0)
    one.add_argument("--out", type=Path, required=True, help="a folder that does not exist yet")
    one.set_defaults(run=_build)
    many = commands.add_parser("folders", help="a fixed set of planted folders")
    many.add_argument("--set", choices=FOLDERS, required=True)
    many.add_argument("--data", type=Path, required=True, help="holds imagenette-224 and oxford-iiit-pet-128")
    many.add_argument("--out", type=Path, required=True, help="a folder for the planted folders")
    many.set_defaults(run=_folders)
    table = commands.add_parser("table", help="how well a score finds the odd images")
    table.add_argument(
        "--scores", type=Path, nargs="+", required=True, help="tables of byov score, one for each folder"
    )
    table.add_argument("--truth", type=Path, nargs="+", required=True, help="their truth.csv, in the same order")
    table.add_argument("--column", default="oddness", help="of the tables; higher means odder")
    table.add_argument("--brief", action="store_true", help="print one line for all folders together")
    table.add_argument("--out", type=Path, help="also write the numbers to this JSON file")
    table.set_defaults(run=_table)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    options = _options(arguments)
    try:
        options.run(options)
    except BadInput as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
