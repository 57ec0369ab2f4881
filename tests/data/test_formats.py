"""Small files of every format are read back exactly; damaged ones get a clear message."""

import gzip
import io
import json
import os
import pickle
import struct
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from PIL import Image

from byov._core import memory
from byov._core.errors import BadInput
from byov.data import formats
from byov.data.formats import CIFAR_BINARY, CIFAR_PICKLED, CIFAR_PNG, IDX, decode_idx, npz_splits, read_layout, read_npz

RANDOM = np.random.default_rng(0)


def idx(array):
    return b"\x00\x00\x08" + bytes([array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()


def random_images(count, *shape):
    return RANDOM.integers(0, 256, (count, *shape), dtype=np.uint8)


def idx_files(images, labels, split):
    names = IDX.files[split]
    return {names[0]: idx(images[:, 0]), names[1]: idx(labels.astype(np.uint8))}


class Python2Pickler(pickle._Pickler):
    """Write text and bytes as Python 2's str, as in the published CIFAR batches."""

    def save_string(self, value):
        data = value.encode("latin1") if isinstance(value, str) else value
        self.write(pickle.BINSTRING + struct.pack("<i", len(data)) + data)
        self.memoize(value)

    dispatch = pickle._Pickler.dispatch | {str: save_string, bytes: save_string}


def pickled_by_python2(value):
    stream = io.BytesIO()
    Python2Pickler(stream, protocol=2).dump(value)
    return stream.getvalue().replace(b"numpy._core.multiarray", b"numpy.core.multiarray")


def pickled_by_python3(value):
    return pickle.dumps(value, protocol=2)


def pickled_batch(dump):
    return lambda images, labels: dump({b"data": images.reshape(len(images), -1), b"labels": labels.tolist()})


def binary_batch(images, labels):
    return np.concatenate([labels[:, None].astype(np.uint8), images.reshape(len(images), -1)], axis=1).tobytes()


def png_rows(images):
    stream = io.BytesIO()
    Image.fromarray(images.reshape(len(images), 3, 1024).transpose(0, 2, 1)).save(stream, "PNG")
    return stream.getvalue()


def cifar_files(batch, suffix, images, labels):
    names = CIFAR_PICKLED.files["train"]
    parts = zip(names, np.split(images, 5), np.split(labels, 5), strict=True)
    return {name + suffix: batch(x, y) for name, x, y in parts}


def cifar_png_files(images, labels):
    files = cifar_files(lambda x, _: png_rows(x), ".png", images, labels)
    return files | {"train_lables.json": json.dumps(labels.tolist()).encode()}


def write_folder(path, files):
    path.mkdir(parents=True, exist_ok=True)
    for name, data in files.items():
        (path / name).write_bytes(data)
    return path


def write_archive(path, files):
    with tarfile.open(path, "w:gz") as archive:
        for name, data in files.items():
            member = tarfile.TarInfo(f"package/deep/{name}")
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return path


def zipped(files):
    return {f"{name}.gz": gzip.compress(data) for name, data in files.items()}


CIFAR_WAYS = {
    "python 2 pickles": (CIFAR_PICKLED, lambda x, y: cifar_files(pickled_batch(pickled_by_python2), "", x, y)),
    "python 3 pickles": (CIFAR_PICKLED, lambda x, y: cifar_files(pickled_batch(pickled_by_python3), "", x, y)),
    "binary": (CIFAR_BINARY, lambda x, y: cifar_files(binary_batch, ".bin", x, y)),
    "png rows": (CIFAR_PNG, cifar_png_files),
}


@pytest.mark.parametrize("write", [write_folder, write_archive])
@pytest.mark.parametrize("way", CIFAR_WAYS)
def test_cifar_layouts_are_read_byte_exact(way, write, tmp_path):
    layout, files = CIFAR_WAYS[way]
    images, labels = random_images(10, 3, 32, 32), np.arange(10)
    read = read_layout(write(tmp_path / "cifar", files(images, labels)), layout, "train", ("a", "b"))
    assert np.array_equal(read.images.numpy(), images)
    assert read.images.is_contiguous()
    assert read.labels.tolist() == labels.tolist()
    assert read.classes == ("a", "b")


@pytest.mark.parametrize("write", [write_folder, write_archive])
@pytest.mark.parametrize("pack", [dict, zipped])
def test_idx_layout_is_read_byte_exact(pack, write, tmp_path):
    images, labels = random_images(7, 1, 5, 4), np.arange(7)
    read = read_layout(write(tmp_path / "idx", pack(idx_files(images, labels, "test"))), IDX, "test")
    assert np.array_equal(read.images.numpy(), images)
    assert read.labels.tolist() == labels.tolist()


@settings(max_examples=50, deadline=None)
@given(arrays.arrays(np.uint8, arrays.array_shapes(min_dims=1, max_dims=4, min_side=0, max_side=5)))
def test_idx_round_trip(array):
    read = decode_idx(idx(array))
    assert read.shape == array.shape
    assert np.array_equal(read, array)


@settings(max_examples=50, deadline=None)
@given(st.binary(max_size=40))
def test_no_bytes_upset_the_idx_reader(data):
    try:
        decode_idx(data)
    except ValueError as error:
        assert "IDX" in str(error)


def test_truncated_idx(tmp_path):
    files = idx_files(random_images(3, 1, 4, 4), np.arange(3), "train")
    name = IDX.files["train"][0]
    for broken in (files[name][:-1], files[name][:10], b"", files[name] + b"x", gzip.compress(files[name])[:-12]):
        with pytest.raises(BadInput, match=r"cannot read the train images in .*; replace or remove it"):
            read_layout(write_folder(tmp_path, files | {name: broken}), IDX, "train")


def test_missing_file_is_named(tmp_path):
    with pytest.raises(BadInput, match="train-images-idx3-ubyte is missing"):
        read_layout(tmp_path, IDX, "train")
    with pytest.raises(BadInput, match="t10k-images-idx3-ubyte is missing"):
        read_layout(write_archive(tmp_path / "a.tgz", {"other": b""}), IDX, "test")


def test_counts_must_agree(tmp_path):
    files = idx_files(random_images(3, 1, 4, 4), np.arange(4), "train")
    with pytest.raises(BadInput, match="3 train images but 4 labels"):
        read_layout(write_folder(tmp_path, files), IDX, "train")


def test_truncated_png_binary_and_archive(tmp_path):
    images, labels = random_images(5, 3, 32, 32), np.arange(5)
    for layout, files in ((CIFAR_PNG, cifar_png_files(images, labels)), CIFAR_WAYS["binary"]):
        files = files if isinstance(files, dict) else files(images, labels)
        name = layout.files["train"][2]
        for broken in (files[name][:-1000], b""):
            with pytest.raises(BadInput, match="truncated"):
                read_layout(write_folder(tmp_path / "f", files | {name: broken}), layout, "train")
        archive = write_archive(tmp_path / "whole.tgz", files)
        archive.write_bytes(archive.read_bytes()[:-2000])
        with pytest.raises(BadInput, match="replace or remove it"):
            read_layout(archive, layout, "train")


class Malicious:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_malicious_pickle_is_refused(tmp_path):
    trap = tmp_path / "trap"
    for payload in (Malicious(trap), {b"data": Malicious(trap), b"labels": [1]}):
        files = {name: pickle.dumps(payload) for name in CIFAR_PICKLED.files["train"]}
        with pytest.raises(BadInput, match="image data never needs"):
            read_layout(write_folder(tmp_path / "cifar", files), CIFAR_PICKLED, "train")
    assert not trap.exists()


@pytest.mark.parametrize(
    "batch",
    [
        b"",
        b"no pickle",
        pickle.dumps([1, 2]),
        pickle.dumps({"data": 3}),
        pickle.dumps({"data": [[1.0]], "labels": [1]}),
    ],
)
def test_odd_pickles(batch, tmp_path):
    with pytest.raises(BadInput, match="CIFAR batch"):
        read_layout(write_folder(tmp_path, {"test_batch": batch}), CIFAR_PICKLED, "test")


def save(path, **held):
    np.savez(path, **held)
    return path


@pytest.mark.parametrize("channels", [1, 3])
def test_npz_shapes(channels, tmp_path):
    images = random_images(4, channels, 6, 5)
    last = images.transpose(0, 2, 3, 1)
    for i, array in enumerate([images, last, *([images[:, 0]] if channels == 1 else [])]):
        read = read_npz(save(tmp_path / f"{i}.npz", images=array, labels=np.arange(4)), "train")
        assert torch.equal(read.images, torch.from_numpy(images))
        assert read.images.is_contiguous()
        assert read.labels.tolist() == [0, 1, 2, 3]


def test_npz_splits_and_keys(tmp_path):
    images = random_images(4, 1, 6, 6)
    both = save(tmp_path / "both.npz", x_train=images, y_train=np.arange(4)[:, None], x_test=images[:2])
    assert npz_splits(both) == ("train", "test")
    assert read_npz(both, "train").labels.tolist() == [0, 1, 2, 3]  # (N, 1), as Keras has them
    assert read_npz(both, "test").labels is None
    for keys in ("images", "x", "x_train"):
        assert npz_splits(save(tmp_path / "one.npz", **{keys: images})) == ("train",)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_npz_floats(dtype, tmp_path):
    images = np.arange(256, dtype=np.uint8).reshape(1, 1, 16, 16)
    path = save(tmp_path / "x.npz", images=(images / 255).astype(dtype))
    assert torch.equal(read_npz(path, "train").images, torch.from_numpy(images))


IMAGES = random_images(3, 8, 8)


@pytest.mark.parametrize(
    ("held", "message"),
    [
        ({"pictures": IMAGES}, "contains pictures; name its images x_train"),
        ({}, "contains nothing"),
        ({"images": IMAGES[:0]}, "contains no images"),
        ({"images": IMAGES[0]}, r"has shape \(8, 8\)"),
        ({"images": random_images(2, 8, 8, 4)}, r"C 1 or 3"),
        ({"images": IMAGES.astype(np.int64)}, "is int64; save it as uint8"),
        ({"images": IMAGES.astype(np.float32)}, r"outside \[0, 1\]"),
        ({"images": np.full((2, 4, 4), np.nan)}, r"outside \[0, 1\]"),
        ({"images": np.array([None, {}])}, "contains Python objects"),
        ({"images": IMAGES, "labels": np.arange(2)}, "3 class numbers"),
        ({"images": IMAGES, "labels": np.array([0.5, 1, 2])}, "3 class numbers"),
        ({"images": IMAGES, "labels": np.array([-1, 1, 2])}, "3 class numbers"),
        ({"images": IMAGES, "labels": np.array(["a", "b", "c"])}, "3 class numbers"),
    ],
)
def test_npz_bad_contents(held, message, tmp_path):
    path = save(tmp_path / "x.npz", **held)
    with pytest.raises(BadInput, match=message) as caught:
        npz_splits(path)
        read_npz(path, "train")
    assert "x.npz" in str(caught.value)
    assert str(caught.value).endswith(".")


def test_npz_bad_files(tmp_path):
    whole = save(tmp_path / "whole.npz", images=IMAGES).read_bytes()
    np.save(tmp_path / "array.npy", IMAGES)
    (tmp_path / "cut.npz").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "text.npz").write_text("hello")
    (tmp_path / "empty.npz").write_bytes(b"")
    (tmp_path / "flipped.npz").write_bytes(whole.replace(IMAGES.tobytes(), bytes(IMAGES.size)))
    for name, message in {
        "none.npz": "there is no file",
        ".": "there is no file",
        "array.npy": "not an npz file",
        "cut.npz": "not an npz file, or is damaged",
        "text.npz": "not an npz file",
        "empty.npz": "not an npz file",
        "flipped.npz": "the file is damaged",
    }.items():
        with pytest.raises(BadInput, match=message):
            read_npz(Path(tmp_path / name), "train")
    with pytest.raises(BadInput, match="has no test images"):
        read_npz(tmp_path / "whole.npz", "test")


@pytest.mark.parametrize(
    "header",
    [
        b"{'descr': '|u1', 'fortran_order': False, 'shape': (1000000, 1000000, 3), }",
        b"{'descr': '|u1', 'fortran_order': False, 'shape': (3, 8, 9), }",
        b"{'descr': '|u1', 'fortran_order': False, 'shape': (-3, -8, 8), }",
        b"{'descr': '|V9223372036854775807', 'fortran_order': False, 'shape': (), }",
        b"{'descr': '|u1', 'fortran_order': False, 'shape': (3.0, 8, 8), }",
        b"{'descr': '|u1', 'fortran_order': False, 'shape': [3, 8, 8], }",
        b"{'descr': [('a', 'u1'), ('a', 'u1')], 'fortran_order': False, 'shape': (3, 8, 8), }",
        b"{'descr': '|u1', 'fortran_order': False, 'shape': (3, 8, 8)",
        b"{" * 5000,
        b"\xff" * 40,
        b"",
    ],
    ids=lambda header: header[-30:].decode("latin1"),
)
def test_npz_odd_headers(header, tmp_path):
    data = b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header + IMAGES.tobytes()
    with zipfile.ZipFile(tmp_path / "x.npz", "w") as archive:
        archive.writestr("images.npy", data)
    with pytest.raises(BadInput, match=r"cannot read images in .*: the file is damaged"):
        read_npz(tmp_path / "x.npz", "train")


def test_npz_versions_methods_and_encryption_that_numpy_does_not_know(tmp_path):
    whole = save(tmp_path / "whole.npz", images=IMAGES).read_bytes()
    for at, value in ((6, 1), (8, 99)):  # in the zip's headers: encrypted, unknown compression
        data = bytearray(whole)
        data[at] = value
        data[data.rindex(b"PK\x01\x02") + at + 2] = value
        (tmp_path / "x.npz").write_bytes(data)
        with pytest.raises(BadInput):
            read_npz(tmp_path / "x.npz", "train")
    (tmp_path / "x.npz").write_bytes(whole.replace(b"NUMPY\x01", b"NUMPY\x09"))
    with pytest.raises(BadInput):
        read_npz(tmp_path / "x.npz", "train")


def test_npz_arrays_that_do_not_fit_into_memory(tmp_path, monkeypatch):
    path = save(tmp_path / "x.npz", images=np.zeros((64, 512, 512), np.uint8))
    monkeypatch.setattr(memory, "available", lambda: 20 << 20)
    with pytest.raises(BadInput, match=r"takes 32 MiB of memory, of which 20 MiB are free: use fewer"):
        read_npz(path, "train")


def test_npz_class_numbers_are_bounded(tmp_path):
    """They are a size: of a probe, and of the votes of neighbours."""
    for number in (1 << 31, (1 << 64) - 1):
        path = save(tmp_path / "x.npz", images=IMAGES, labels=np.array([0, 1, number], np.uint64))
        with pytest.raises(BadInput, match=f"has the class number {number}; number the classes from 0"):
            read_npz(path, "train")


def test_bombs_are_unpacked_up_to_a_limit(tmp_path, monkeypatch):
    monkeypatch.setattr(formats, "_MOST_FILE", 1 << 20)
    monkeypatch.setattr(formats, "_MOST_ARCHIVE", 1 << 21)
    names = IDX.files["train"]
    bomb = {name: bytes(1 << 22) for name in names}
    member = tarfile.TarInfo("a" * 300)  # a long name is read whole
    member.size = 1 << 22
    with tarfile.open(tmp_path / "long.tgz", "w:gz", format=tarfile.GNU_FORMAT) as archive:
        archive.addfile(member, io.BytesIO(bytes(member.size)))
    for path in (
        write_folder(tmp_path / "a", bomb),
        write_folder(tmp_path / "b", zipped(bomb)),
        write_archive(tmp_path / "c.tgz", bomb),
        write_archive(tmp_path / "d.tgz", zipped(bomb)),
        tmp_path / "long.tgz",
    ):
        with pytest.raises(BadInput, match="unpacks to more than"):
            read_layout(path, IDX, "train")


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.FIFOTYPE, tarfile.DIRTYPE])
@pytest.mark.parametrize("target", ["/etc/passwd", "nothing", "../../up", "train-images-idx3-ubyte"])
def test_links_in_an_archive_are_not_followed(kind, target, tmp_path):
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        for name in IDX.files["train"]:
            member = tarfile.TarInfo(name)
            member.type, member.linkname = kind, target
            archive.addfile(member)
    with pytest.raises(BadInput, match="the file train-images-idx3-ubyte is missing"):
        read_layout(tmp_path / "a.tar", IDX, "train")


def test_a_pickle_that_asks_for_memory(tmp_path):
    batch = b"\x80\x02" + b"N" + b"r" + struct.pack("<I", 1 << 31) + b"."  # stores None as object 2^31
    with pytest.raises(BadInput, match="asks for 2,147,483,648 objects"):
        read_layout(write_folder(tmp_path, {"test_batch": batch}), CIFAR_PICKLED, "test")


def test_a_png_of_too_many_rows(tmp_path):
    stream = io.BytesIO()
    Image.new("RGB", (1024, 10_001)).save(stream, "PNG")
    files = {"test_batch.png": stream.getvalue(), "test_lables.json": b"[1]"}
    with pytest.raises(BadInput, match="at most 10,000 rows"):
        read_layout(write_folder(tmp_path, files), CIFAR_PNG, "test")


def test_labels_in_json_may_be_anything(tmp_path):
    png = png_rows(random_images(1, 3, 32, 32))
    for labels in (b"[" * 100_000, b"9" * 5000, b"[1e999]", b"\xff", b"{}", b"[[1], 2]"):
        with pytest.raises(BadInput, match="replace or remove it"):
            read_layout(write_folder(tmp_path, {"test_batch.png": png, "test_lables.json": labels}), CIFAR_PNG, "test")


def test_layouts_name_both_splits():
    for layout in (IDX, CIFAR_BINARY, CIFAR_PICKLED, CIFAR_PNG):
        assert set(layout.files) == set(formats.SPLITS)
