"""Fuzz what byov reads: images, settings, checkpoints, weights, caches, logs and tables, in this process.

    python tests/fuzz.py --cases 10000 --seed 0        # `make chaos`; test_fuzz.py runs a short form

A case damages a valid file: bytes are changed, cut, repeated or inserted, numbers become extreme, and JSON headers get
other values. The reader must return something or refuse it with the exception that becomes one sentence. Everything
else is lost: another exception, more than SECONDS of processor time, more than 2 GiB of memory. Case i of a
campaign depends on (seed, campaign, i) alone, so a lost one can be repeated: --only images --first 17 --cases 1.
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import io
import json
import pickle
import random
import resource
import signal
import struct
import sys
import tarfile
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch
from PIL import Image

from byov._core.cache import Entry, read_entry, write_entry
from byov._core.errors import BadInput
from byov.config import check_ranges, read_recipe, recipe_folder
from byov.data.formats import CIFAR_BINARY, CIFAR_PICKLED, CIFAR_PNG, IDX, npz_splits, read_layout, read_npz
from byov.data.image_files import Unusable, decode, pillow_unlimited
from byov.data.sources import open_source
from byov.inference.run import ReferenceSet, load
from byov.report.run_data import load_run
from byov.runs.folder import RunFolder
from byov.training.initial_weights import initialiser
from byov.training.resolve import resolve
from commands import SMALL, run

SECONDS = 20  # of processor time for a case: a busy machine is not a hang
WAITING = 300  # seconds for a case that only waits
MEMORY = 2 << 30
REFUSED = (BadInput, Unusable)

Make = Callable[[random.Random], bytes]
Read = Callable[[bytes], object]


# ------------------------------------------------------------------------------------------------------------- damaging

EXTREMES = (0, 1, 2, 255, 32767, 65535, 1 << 24, (1 << 31) - 1, 1 << 31, (1 << 32) - 1)
WORDS = (
    "nan",
    "-1",
    "1e999",
    "9" * 30,
    "null",
    "[]",
    "{}",
    '""',
    "true",
    "!!int x",
    "*a",
    "2024-99-99",
    "0x" + "f" * 40,
)


def damaged(data: bytes, rng: random.Random) -> bytes:
    """Damage some places of a file."""
    found = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 4, 16))):
        if not found:
            break
        at = rng.randrange(min(len(found), rng.choice((64, 1024, 1 << 30))))  # headers more often than the rest
        kind = rng.randrange(8)
        if kind == 0:
            found[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            found[at] = rng.randrange(256)
        elif kind == 2:
            del found[at:]
        elif kind == 3:
            found[at:at] = rng.randbytes(rng.randrange(1, 16))
        elif kind == 4:
            del found[at : at + rng.randrange(1, 64)]
        elif kind == 5:
            found[at:at] = found[at : at + rng.randrange(1, 256)] * rng.randrange(1, 20)
        elif kind == 6:
            value, order = rng.choice(EXTREMES), rng.choice("<>")
            packed = struct.pack(f"{order}I", value) if rng.random() < 0.5 else struct.pack(f"{order}H", value & 0xFFFF)
            found[at : at + len(packed)] = packed
        else:
            found[at : at + rng.randrange(4)] = rng.choice(WORDS).encode()
    return bytes(found)


STRANGE: tuple[Any, ...] = (
    *(None, True, -1, 0, 1, 2**31, 2**63, 2**70, 0.5, 1e308, "", "x", "1e999", "nan", "/dev/zero", "../.."),
    *([], [1], {}, {"a": {}}, [[[]]], "x" * 1000, [0] * 1000, float("nan"), float("inf")),
)


def other_values(tree: Any, rng: random.Random) -> Any:
    """Replace, remove or add some values of a JSON tree."""
    if isinstance(tree, dict) and tree and rng.random() < 0.9:
        found = dict(tree)
        key = rng.choice(list(found))
        if rng.random() < 0.15:
            del found[key]
        elif rng.random() < 0.1:
            found[rng.choice(("x", "", "__class__", key + key))] = rng.choice(STRANGE)
        else:
            found[key] = other_values(found[key], rng)
        return found
    if isinstance(tree, list) and tree and rng.random() < 0.7:
        place = rng.randrange(len(tree))
        return [*tree[:place], other_values(tree[place], rng), *tree[place + 1 :]]
    return rng.choice(STRANGE)


def with_other_header(data: bytes, rng: random.Random) -> bytes:
    """Change the JSON header of a safetensors file, or the state in its metadata, and drop its digest."""
    length = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + length])
    metadata = header.get("__metadata__", {})
    metadata.pop("digest", None)
    if rng.random() < 0.7 and "state" in metadata:
        metadata["state"] = json.dumps(other_values(json.loads(metadata["state"]), rng))
    else:
        header = other_values(header, rng)
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data[8 + length :]


# ------------------------------------------------------------------------------------------------------------ campaigns


@dataclass
class Campaign:
    """Files to damage, and the reader."""

    name: str
    make: Make
    read: Read
    share: int = 1
    """Of the cases, relative to the others."""


@dataclass
class Result:
    """How the cases of a campaign ended."""

    name: str
    cases: int = 0
    read: int = 0
    refused: int = 0
    lost: list[str] = field(default_factory=list)
    slowest: float = 0.0


def pictures() -> list[bytes]:
    """Small images of every format and mode."""
    found = []
    x, y = np.meshgrid(np.linspace(0, 1, 40), np.linspace(0, 1, 30))
    colour = Image.fromarray(np.uint8(255 * np.stack([x, y, x * y], 2)))
    wide = Image.fromarray(np.uint16(65535 * x))
    made: list[tuple[Image.Image, str, dict[str, Any]]] = [(colour, kind, {}) for kind in ("JPEG", "PNG", "BMP", "GIF")]
    made += [(colour, kind, {}) for kind in ("WEBP", "TIFF", "PPM")] + [(colour, "JPEG", {"progressive": True})]
    made += [(colour, "TIFF", {"compression": c}) for c in ("tiff_lzw", "tiff_adobe_deflate", "jpeg", "packbits")]
    made += [(colour.convert(mode), "PNG", {}) for mode in ("1", "L", "LA", "P", "RGBA")]
    made += [(wide, kind, {}) for kind in ("PNG", "TIFF", "PPM")] + [(colour.convert("CMYK"), "JPEG", {})]
    made += [(colour.convert("P"), "GIF", {"save_all": True, "append_images": [colour.convert("L")]})]
    made += [(colour, "WEBP", {"lossless": True, "save_all": True, "append_images": [colour.rotate(9)]})]
    notes = Image.Exif()
    notes[0x0112], notes[0x010E] = 6, "x" * 200
    made += [(colour, kind, {"exif": notes}) for kind in ("JPEG", "PNG", "TIFF", "WEBP")]
    for image, kind, options in made:
        stream = io.BytesIO()
        image.save(stream, kind, **options)
        found.append(stream.getvalue())
    return found


def tables(folder: Path) -> dict[str, bytes]:
    """Data sets in every format, by a name that says how to read them."""
    images, labels = np.random.default_rng(0).integers(0, 256, (10, 3, 32, 32), np.uint8), np.arange(10)
    found: dict[str, bytes] = {}
    for name, held in (
        ("a.npz", {"images": images, "labels": labels}),
        ("b.npz", {"x_train": images / 255, "y_train": labels[:, None], "x_test": images[:, 0]}),
    ):
        np.savez(folder / name, **held)
        found[name] = (folder / name).read_bytes()
    np.savez_compressed(folder / "c.npz", images=images)
    found["c.npz"] = (folder / "c.npz").read_bytes()
    header = b"\0\0\x08\3" + struct.pack(">3I", 10, 32, 32)
    idx = {
        IDX.files["test"][0]: header + images[:, 0].tobytes(),
        IDX.files["test"][1]: b"\0\0\x08\1\0\0\0\x0a" + bytes(10),
    }
    rows = {"test_batch.bin": np.concatenate([labels[:, None], images.reshape(10, -1)], 1).astype(np.uint8).tobytes()}
    batch = pickle.dumps({b"data": images.reshape(10, -1), b"labels": labels.tolist()}, protocol=2)
    stream = io.BytesIO()
    Image.fromarray(images.reshape(10, 3, 1024).transpose(0, 2, 1)).save(stream, "PNG")
    png = {"test_batch.png": stream.getvalue(), "test_lables.json": json.dumps(labels.tolist()).encode()}
    layouts = {"idx": idx, "binary": rows, "pickled": {"test_batch": batch}, "png": png}
    for name, files in layouts.items():
        for kind, mode in (("tar", "w"), ("tgz", "w:gz")):
            archive = io.BytesIO()
            with tarfile.open(fileobj=archive, mode=mode) as out:  # type: ignore[call-overload]
                for file, data in files.items():
                    member = tarfile.TarInfo(f"a/{file}")
                    member.size = len(data)
                    out.addfile(member, io.BytesIO(data))
            found[f"{name}.{kind}"] = archive.getvalue()
        first = next(iter(files))
        found[f"{name}/{first}"] = gzip.compress(files[first]) if name == "idx" else files[first]
    return found


LAYOUTS = {"idx": IDX, "binary": CIFAR_BINARY, "pickled": CIFAR_PICKLED, "png": CIFAR_PNG}


def campaigns(folder: Path) -> list[Campaign]:
    """All campaigns, on a small run that is trained in `folder`."""
    trained = folder / "run"
    if not trained.exists() and run("train", "digits", "--out", trained, *SMALL):
        raise RuntimeError("the run to damage could not be trained")
    ReferenceSet(load(trained)).means  # noqa: B018 (writes the cache)
    files = {path: path.read_bytes() for path in sorted(trained.rglob("*")) if path.is_file()}
    last = RunFolder(trained).checkpoint
    work = folder / "case"

    def put(path: Path, data: bytes) -> Path:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        return path

    images = pictures()

    def read_image(data: bytes) -> object:
        with pillow_unlimited():
            return decode(put(work, data), 32)

    recipes = [path.read_bytes() for path in sorted(recipe_folder().glob("*.yaml"))]
    recipes.append(files[RunFolder(trained).config])

    def read_settings(data: bytes) -> object:
        config = read_recipe(str(put(folder / "case.yaml", data)))
        check_ranges(config)
        return resolve(config, (3, 32, 32), 1000, flips=True)

    @contextlib.contextmanager
    def in_place(path: Path, data: bytes) -> Iterator[None]:
        put(path, data)
        try:
            yield
        finally:
            put(path, files[path])

    def checkpoint(rng: random.Random) -> bytes:
        return (with_other_header if rng.random() < 0.6 else damaged)(files[last], rng)

    def read_checkpoint(data: bytes) -> object:
        with in_place(last, data):
            return load(trained).features(torch.zeros(2, 1, 8, 8))

    network = load(trained).learner.posterior.unwrapped()
    state = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    weights: dict[str, bytes] = {".safetensors": files[last]}
    for suffix, options in ((".pt", {}), (".pth", {"_use_new_zipfile_serialization": False})):
        stream = io.BytesIO()
        torch.save({"state_dict": state}, stream, **options)
        weights[suffix] = stream.getvalue()

    def weights_file(rng: random.Random) -> bytes:
        suffix = rng.choice(list(weights))
        data = weights[suffix]
        changed = with_other_header if suffix == ".safetensors" and rng.random() < 0.5 else damaged
        return suffix.encode() + b"\0" + changed(data, rng)

    def read_weights(data: bytes) -> object:
        suffix, _, content = data.partition(b"\0")
        put(path := folder / f"case{suffix.decode()}", content)
        return initialiser(str(path))(network)

    write_entry(
        folder / "entry.safetensors", Entry({"a": torch.arange(9.0), "b": torch.zeros(0)}, {"names": ["x"] * 9})
    )
    entry = (folder / "entry.safetensors").read_bytes()

    def read_cache(data: bytes) -> object:
        found = read_entry(put(folder / "entry.safetensors", data))
        if found is not None and (
            found.tensors["a"].tolist() != list(range(9)) or found.header != {"names": ["x"] * 9}
        ):
            raise AssertionError("a damaged entry was accepted")
        return found

    kept = [path for path in files if "reference" in path.parts]
    logs = [path for path in files if path.suffix in (".jsonl", ".json", ".yaml")]

    def one_of(paths: list[Path]) -> Make:
        def make(rng: random.Random) -> bytes:
            path = rng.choice(paths)
            data = files[path]
            if path.suffix == ".json" and rng.random() < 0.5:
                data = json.dumps(other_values(json.loads(data), rng)).encode()
            elif path.suffix == ".jsonl" and rng.random() < 0.5:
                lines = data.splitlines()
                place = rng.randrange(len(lines))
                lines[place] = json.dumps(other_values(json.loads(lines[place]), rng)).encode()
                data = b"\n".join(lines)
            else:
                data = damaged(data, rng)
            return str(path).encode() + b"\0" + data

        return make

    def read_reference(data: bytes) -> object:
        path, _, content = data.partition(b"\0")
        with in_place(Path(path.decode()), content):
            reference = ReferenceSet(load(trained))
            found = reference.means.features.sum() + reference.calibration_images().sum()
        for path in trained.rglob("reference/*/*"):
            if path.read_bytes() != files.get(path):  # made again, or the damaged one's
                path.unlink()
        return found

    def read_logs(data: bytes) -> object:
        from byov.report.page import write_report

        path, _, content = data.partition(b"\0")
        with in_place(Path(path.decode()), content):
            load_run(trained)
            return write_report([trained], folder / "page.html")

    data_sets = tables(folder)

    def data_set(rng: random.Random) -> bytes:
        name = rng.choice(list(data_sets))
        data = data_sets[name]
        if name.endswith("tgz") and rng.random() < 0.5:  # damage what is packed, not the packing
            return f"{name}\0".encode() + gzip.compress(damaged(gzip.decompress(data), rng), 1)
        return f"{name}\0".encode() + damaged(data, rng)

    def read_data_set(data: bytes) -> object:
        name, _, content = data.partition(b"\0")
        path = put(folder / "tables" / name.decode(), content)
        kind = name.decode().split(".")[0].split("/")[0]
        if name.endswith(b".npz"):
            open_source(f"npz:{path}")
            return [read_npz(path, split) for split in npz_splits(path)]
        return read_layout(path.parent if b"/" in name else path, LAYOUTS[kind], "test")

    return [
        Campaign("images", lambda rng: damaged(rng.choice(images), rng), read_image, 40),
        Campaign("settings", lambda rng: damaged(rng.choice(recipes), rng), read_settings, 15),
        Campaign("checkpoints", checkpoint, read_checkpoint, 12),
        Campaign("weights", weights_file, read_weights, 12),
        Campaign("caches", lambda rng: damaged(entry, rng), read_cache, 6),
        Campaign("reference", one_of(kept), read_reference, 3),
        Campaign("logs", one_of(logs), read_logs, 2),
        Campaign("tables", data_set, read_data_set, 10),
    ]


# -------------------------------------------------------------------------------------------------------------- running


class TooSlow(BaseException):
    """Not an Exception: no reader catches it."""


def too_slow(number: int, frame: FrameType | None) -> None:
    raise TooSlow


def campaign_run(campaign: Campaign, cases: range, seed: int) -> Result:
    """Run cases of a campaign; exceptions, hangs and memory are its findings."""
    result = Result(campaign.name)
    before = {number: signal.signal(number, too_slow) for number in (signal.SIGPROF, signal.SIGALRM)}
    try:
        for case in cases:
            data = campaign.make(random.Random(f"{seed} {campaign.name} {case}"))
            begun = time.process_time()
            signal.setitimer(signal.ITIMER_PROF, SECONDS)
            signal.alarm(WAITING)
            try:
                campaign.read(data)
                result.read += 1
            except REFUSED as error:
                result.refused += 1
                if "\n" in str(error) or len(str(error)) > 2000:
                    result.lost.append(f"case {case}: its sentence is {len(str(error))} characters")
            except TooSlow:
                result.lost.append(f"case {case}: more than {SECONDS} s")
            except Exception:
                result.lost.append(f"case {case}: {traceback.format_exc(limit=-4)}")
            finally:
                signal.setitimer(signal.ITIMER_PROF, 0)
                signal.alarm(0)
            result.slowest = max(result.slowest, time.process_time() - begun)
            result.cases += 1
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return result


def fuzz(folder: Path, cases: int, seed: int, only: str | None = None, first: int = 0) -> list[Result]:
    """Run all campaigns, `cases` in all."""
    found = [campaign for campaign in campaigns(folder) if only in (None, campaign.name)]
    shares = sum(campaign.share for campaign in found)
    return [campaign_run(c, range(first, first + -(-cases * c.share // shares)), seed) for c in found]


def peak() -> int:
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--only")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        pages = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (pages + 3 * MEMORY // 2, resource.RLIM_INFINITY))
        results = fuzz(Path(folder), options.cases, options.seed, options.only, options.first)
    for result in results:
        for lost in result.lost:
            print(f"{result.name}, seed {options.seed}, {lost}")
    print(f"| campaign | cases | read | refused | lost | slowest case |\n|{'---|' * 6}")
    for r in results:
        print(f"| {r.name} | {r.cases:,} | {r.read:,} | {r.refused:,} | {len(r.lost)} | {r.slowest:.1f} s |")
    print(f"seed {options.seed}, peak memory {peak() / 2**20:,.0f} MiB")
    return int(any(result.lost for result in results) or peak() > MEMORY)


if __name__ == "__main__":
    sys.exit(main())
