"""Readers of the formats in which data sets are published: IDX, CIFAR's batches, PNG rows, and NumPy's npz.

A decoder takes the bytes of files and raises ValueError with a short clause; `read_layout` and `read_npz` add the path
and turn it into a message for the user. No code found in a file is ever run, and no more memory is taken than a file's
header justifies: compressed files are read up to a limit, and the arrays of an npz file only if they fit into memory.
"""

from __future__ import annotations

import gzip
import io
import json
import math
import pickle
import pickletools
import tarfile
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from byov._core import memory
from byov._core.errors import BadInput
from byov.data.images import SPLITS, ImageSet, Split

Images = NDArray[np.uint8]  # (N, C, H, W)
Labels = NDArray[np.int64]  # (N,)
Decoded = tuple[Images, Labels]

_CIFAR = (3, 32, 32)
_GZIP = b"\x1f\x8b"
_MOST_FILE = 1 << 28  # bytes of an unpacked file: five times the largest that is published
_MOST_ARCHIVE = 1 << 29  # and of an unpacked archive: three times
MOST_CLASSES = 1 << 16  # three times ImageNet-21k's; a probe and a report have a row for each


@dataclass(frozen=True)
class Layout:
    """Which files contain a split, and how to decode their bytes."""

    files: Mapping[Split, tuple[str, ...]]
    decode: Callable[[list[bytes]], Decoded]


def read_layout(path: Path, layout: Layout, split: Split, classes: tuple[str, ...] | None = None) -> ImageSet:
    """Read a split from a folder, or from a tar archive whatever its folders. Any file may be gzipped."""
    try:
        files = (_from_folder if path.is_dir() else _from_archive)(path, layout.files[split])
        images, labels = layout.decode(list(map(_unpacked, files)))
        if len(images) != len(labels):
            raise ValueError(f"it contains {len(images)} {split} images but {len(labels)} labels")
    except Exception as error:  # a damaged archive makes tarfile and zlib raise almost anything
        reason = error if isinstance(error, (ValueError, OSError)) else "it is damaged or truncated"
        raise BadInput(f"cannot read the {split} images in {path}: {reason}; replace or remove it.") from error
    return ImageSet(torch.from_numpy(np.ascontiguousarray(images)), torch.from_numpy(labels), classes)


class _Limited:
    """A file of which at most so many bytes are read."""

    def __init__(self, file: IO[bytes] | gzip.GzipFile, most: int) -> None:
        self._file, self._most, self._left = file, most, most

    def read(self, size: int = -1) -> bytes:
        data = self._file.read(self._left + 1 if size < 0 else min(size, self._left + 1))
        if len(data) > self._left:
            raise ValueError(f"it unpacks to more than {memory.in_gib(self._most)}, as no published file does")
        self._left -= len(data)
        return data


def _unpacked(data: bytes) -> bytes:
    if not data.startswith(_GZIP):
        return data
    with gzip.GzipFile(fileobj=io.BytesIO(data)) as file:
        return _Limited(file, _MOST_FILE).read()


def _from_folder(folder: Path, names: tuple[str, ...]) -> list[bytes]:
    def find(name: str) -> Path:
        for path in (folder / name, folder / f"{name}.gz"):
            if path.is_file():
                return path
        raise ValueError(f"the file {name} is missing")

    def read(path: Path) -> bytes:
        with path.open("rb") as file:
            return _Limited(file, _MOST_FILE).read()

    return [read(find(name)) for name in names]


def _from_archive(path: Path, names: tuple[str, ...]) -> list[bytes]:
    found: dict[str, bytes] = {}
    with path.open("rb") as packed:
        gzipped = packed.read(2) == _GZIP
        packed.seek(0)
        limited = _Limited(gzip.GzipFile(fileobj=packed) if gzipped else packed, _MOST_ARCHIVE)
        # Read in one pass, and no links: those would be followed.
        with tarfile.open(fileobj=limited, mode="r|") as archive:  # type: ignore[call-overload]
            for member in archive:
                name = Path(member.name).name.removesuffix(".gz")
                if name in names and member.isreg() and (file := archive.extractfile(member)) is not None:
                    found[name] = file.read()
    if missing := [name for name in names if name not in found]:
        raise ValueError(f"the file {missing[0]} is missing")
    return [found[name] for name in names]


def decode_idx(data: bytes) -> Images:
    """Decode an IDX array of bytes: two zeros, the type (8), the number of axes, the axes as big-endian uint32."""
    if len(data) < 4 or data[:3] != b"\x00\x00\x08":
        raise ValueError("it is not an IDX file of unsigned bytes")
    start = 4 + 4 * data[3]
    if len(data) < start:
        raise ValueError("the IDX file is truncated")
    shape = tuple(int(n) for n in np.frombuffer(data[4:start], ">u4"))
    if len(data) - start != math.prod(shape):
        raise ValueError(f"the IDX file has {len(data) - start} bytes of data, but its header says {math.prod(shape)}")
    return np.frombuffer(data, np.uint8, offset=start).reshape(shape).copy()  # a copy, which is writable


def _decode_idx_pair(files: list[bytes]) -> Decoded:
    images, labels = (decode_idx(data) for data in files)
    if images.ndim != 3 or labels.ndim != 1:
        raise ValueError(f"images must have 3 axes and labels 1, not {images.ndim} and {labels.ndim}")
    return images[:, None], labels.astype(np.int64)


class _ArraysOnly(pickle.Unpickler):
    """Unpickle plain containers and numpy arrays only; any other global, and so any code, is refused."""

    def find_class(self, module: str, name: str) -> Any:
        reconstruct = np.empty(0).__reduce__()[0]  # wherever this version of numpy has it
        allowed: dict[tuple[str, str], Any] = {
            ("numpy.core.multiarray", "_reconstruct"): reconstruct,
            ("numpy._core.multiarray", "_reconstruct"): reconstruct,
            ("numpy", "ndarray"): np.ndarray,
            ("numpy", "dtype"): np.dtype,
            ("_codecs", "encode"): lambda text, _: text.encode("latin1"),  # how protocol 2 writes bytes
        }
        if (module, name) not in allowed:
            raise pickle.UnpicklingError(f"it imports {module}.{name}, which image data never needs")
        return allowed[module, name]


_SIZED = ("PUT", "BINPUT", "LONG_BINPUT")


def _decode_pickled_batch(data: bytes) -> Decoded:
    try:
        for code, argument, _ in pickletools.genops(data):
            if code.name in _SIZED and int(argument or 0) >= len(data):  # memory that C code takes at once
                raise pickle.UnpicklingError(f"it asks for {argument:,} objects")
        batch = _ArraysOnly(io.BytesIO(data), encoding="bytes").load()
        fields = {key.decode() if isinstance(key, bytes) else key: value for key, value in batch.items()}
        images, labels = np.asarray(fields["data"]), np.asarray(fields["labels"])
    except Exception as error:  # a broken pickle may raise anything
        reason = str(error) if isinstance(error, pickle.UnpicklingError) else "it is damaged or not a CIFAR batch"
        raise ValueError(f"a CIFAR batch cannot be unpickled ({reason})") from error
    if images.dtype != np.uint8 or images.shape[1:] != (math.prod(_CIFAR),) or labels.dtype.kind not in "iu":
        raise ValueError(f"a CIFAR batch has uint8 rows of 3072 and integer labels, not {images.dtype} {images.shape}")
    return images.reshape(-1, *_CIFAR), labels.astype(np.int64)


def _decode_binary_batch(data: bytes) -> Decoded:
    """Decode records of one byte of label and 3072 bytes of image."""
    record = 1 + math.prod(_CIFAR)
    if not data or len(data) % record:
        raise ValueError(f"a CIFAR batch of {len(data)} bytes is truncated: its records have {record}")
    rows = np.frombuffer(data, np.uint8).reshape(-1, record)
    return rows[:, 1:].reshape(-1, *_CIFAR), rows[:, 0].astype(np.int64)


def _in_batches(decode: Callable[[bytes], Decoded]) -> Callable[[list[bytes]], Decoded]:
    def decode_all(files: list[bytes]) -> Decoded:
        images, labels = zip(*map(decode, files), strict=True)
        return np.concatenate(images), np.concatenate(labels)

    return decode_all


def _decode_png_rows(files: list[bytes]) -> Decoded:
    """Decode RGB PNGs whose rows of 1024 pixels are one image each; the last file is a JSON list of labels."""
    labels = np.asarray(json.loads(files[-1]))
    if labels.ndim != 1 or labels.dtype.kind not in "iu":
        raise ValueError("the labels are not a list of integers")
    batches = [_png(file) for file in files[:-1]]
    # A PNG stores the channels of a pixel together; here each channel is a plane.
    images = np.concatenate([b.transpose(0, 2, 1).reshape(-1, *_CIFAR) for b in batches])
    return images, labels.astype(np.int64)


_MOST_ROWS = 10_000  # images


def _png(data: bytes) -> Images:
    try:
        with Image.open(io.BytesIO(data), formats=["PNG"]) as picture:
            if picture.mode == "RGB" and picture.width == 1024 and picture.height <= _MOST_ROWS:
                return np.asarray(picture)
    except Exception as error:  # a broken file makes Pillow raise almost anything
        raise ValueError("a PNG is damaged or truncated") from error
    raise ValueError(f"a PNG is not RGB with 1024 pixels per row and at most {_MOST_ROWS:,} rows")


def _cifar(suffix: str, train: tuple[str, ...] = (), test: tuple[str, ...] = ()) -> Mapping[Split, tuple[str, ...]]:
    batches = tuple(f"data_batch_{i}{suffix}" for i in range(1, 6))
    return {"train": (*batches, *train), "test": (f"test_batch{suffix}", *test)}


IDX = Layout(
    {
        "train": ("train-images-idx3-ubyte", "train-labels-idx1-ubyte"),
        "test": ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"),
    },
    _decode_idx_pair,
)
CIFAR_PICKLED = Layout(_cifar(""), _in_batches(_decode_pickled_batch))
CIFAR_BINARY = Layout(_cifar(".bin"), _in_batches(_decode_binary_batch))
CIFAR_PNG = Layout(_cifar(".png", ("train_lables.json",), ("test_lables.json",)), _decode_png_rows)  # their spelling


# A file with a single set of images is "train". The first pair of keys whose images exist is taken.
_NPZ_KEYS: Mapping[Split, tuple[tuple[str, str], ...]] = {
    "train": (("x_train", "y_train"), ("images", "labels"), ("x", "y")),
    "test": (("x_test", "y_test"),),
}


def npz_splits(path: Path) -> tuple[Split, ...]:
    """Return the splits in an npz file, from its keys alone."""
    keys = _npz_keys(path)
    splits = tuple(split for split in SPLITS if any(images in keys for images, _ in _NPZ_KEYS[split]))
    if not splits:
        held = ", ".join(sorted(keys)) or "nothing"
        raise BadInput(f"{path} contains {held}; name its images x_train and x_test, or images (labels: y_train, ...).")
    return splits


def read_npz(path: Path, split: Split) -> ImageSet:
    """Read a split of an npz file: images (N, H, W), (N, H, W, C) or (N, C, H, W), uint8 or floats in [0, 1]."""
    keys = _npz_keys(path)
    found = [pair for pair in _NPZ_KEYS[split] if pair[0] in keys]
    if not found:
        raise BadInput(f"{path} has no {split} images; add them as x_{split}, or use its other split.")
    image_key, label_key = found[0]
    images = _npz_images(_npz_array(path, image_key), f"{image_key} in {path}")
    if label_key not in keys:
        return ImageSet(images)
    return ImageSet(images, _npz_labels(_npz_array(path, label_key), len(images), f"{label_key} in {path}"))


def _npz_keys(path: Path) -> set[str]:
    """The names of the arrays in a file."""
    if not path.is_file():
        raise BadInput(f"there is no file {path}; check the path.")
    with path.open("rb") as file:
        try:
            return {name.removesuffix(".npy") for name in zipfile.ZipFile(file).namelist()}
        except Exception as error:  # a damaged file makes zipfile raise almost anything
            raise BadInput(f"{path} is not an npz file, or is damaged; write it with numpy.savez.") from error


def _npz_array(path: Path, key: str) -> NDArray[Any]:
    """Read an array after a look at its header: its size must be that of the entry, and it must fit into memory."""
    try:
        with zipfile.ZipFile(path) as archive, archive.open(f"{key}.npy") as file:
            version = np.lib.format.read_magic(file)
            read_header = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
            shape, _, dtype = read_header[version](file)
            size = math.prod(shape) * dtype.itemsize
            if not dtype.hasobject and size != archive.getinfo(f"{key}.npy").file_size - file.tell():
                raise ValueError("the header does not fit the data")
            # Next to it, the images as contiguous bytes.
            memory.require(size + math.prod(shape), f"{key} in {path}", "use fewer or smaller images, or folder:PATH")
            file.seek(0)
            return np.asarray(np.lib.format.read_array(file, allow_pickle=False))
    except BadInput:
        raise
    except Exception as error:  # a damaged file makes zipfile, zlib and numpy raise almost anything
        reason = "it contains Python objects" if "pickle" in str(error) else "the file is damaged"
        raise BadInput(f"cannot read {key} in {path}: {reason}; write it again as a plain array.") from error


def _npz_images(images: NDArray[Any], what: str) -> torch.Tensor:
    if images.ndim == 3:
        images = images[:, None]
    elif images.ndim == 4 and images.shape[3] in (1, 3):  # first: the usual layout of images in NumPy
        images = images.transpose(0, 3, 1, 2)
    elif images.ndim != 4 or images.shape[1] not in (1, 3):
        shape = tuple(images.shape)
        raise BadInput(f"{what} has shape {shape}; (N, H, W), (N, H, W, C) or (N, C, H, W), C 1 or 3, is needed.")
    if 0 in images.shape:
        raise BadInput(f"{what} contains no images (shape {tuple(images.shape)}); give at least one.")
    if images.dtype.kind == "f":
        if not (images.min() >= 0 and images.max() <= 1):  # also False for NaN
            raise BadInput(f"{what} is {images.dtype} with values outside [0, 1]; save it as uint8, or divide by 255.")
        images = _as_bytes(images)
    if images.dtype != np.uint8:
        raise BadInput(f"{what} is {images.dtype}; save it as uint8 in 0..255, or as floats in [0, 1].")
    return torch.from_numpy(np.ascontiguousarray(images))


def _as_bytes(images: NDArray[Any]) -> Images:
    """Convert floats, an image at a time: a float copy of all would take up to eight times the result."""
    found = np.empty(images.shape, np.uint8)
    for image, place in zip(images, found, strict=True):
        place[...] = np.round(image.astype(np.float32) * 255)
    return found


def _npz_labels(labels: NDArray[Any], count: int, what: str) -> torch.Tensor:
    if labels.shape not in ((count,), (count, 1)) or labels.dtype.kind not in "iu" or labels.min() < 0:
        found = f"{labels.dtype} {tuple(labels.shape)}"
        raise BadInput(f"{what} is {found}; {count} class numbers (integers from 0), one per image, are needed.")
    if labels.max() >= MOST_CLASSES:
        raise BadInput(f"{what} has the class number {labels.max()}; number the classes from 0, without gaps.")
    return torch.from_numpy(labels.reshape(count).astype(np.int64))
