"""Score a folder of any size into a table: a chunk at a time, in constant memory, and resumable.

    odd.parquet              path, oddness, uncertainty, a percentile of each, embedding; one row per image, by path
    odd.html                 its page (`report.gallery`)
    odd.parquet.skipped.txt  the files that could not be used, one per line
    odd.csv                  the same without the embedding; its page is odd.csv.html, next to that of odd.parquet
    .odd.parquet.partial/    while it works: settings.json, and a cache entry for each finished chunk

A second call with the same settings resumes after the last finished chunk. The table is moved into place at the end.
"""

from __future__ import annotations

import csv
import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from numpy.typing import NDArray
from torch import Tensor

from byov import __version__
from byov._core.cache import Cache, Entry
from byov._core.callbacks import Progress, Say, say_on_stderr
from byov._core.errors import BadInput
from byov._core.files import (
    disk_space_checked,
    leftovers,
    read_json,
    remove_abandoned,
    write_atomically,
    write_json,
    write_text,
)
from byov._core.lock import Lock, beside
from byov.data.image_files import printable
from byov.data.sources import Chunk, Stream
from byov.inference.inputs import in_channels
from byov.inference.run import ReferenceSet, Run
from byov.runs.checkpoints import first_not_finite
from byov.scoring.scores import Scorer, Scores

CHUNK_IMAGES = 2048  # weights are drawn again for each chunk: with many images that costs nothing
CHUNK_BYTES = 2**26  # of pixels; fewer images per chunk from 105 pixels on
NAMED = 3  # files that a warning names
KINDS = (".parquet", ".csv")
FORMULA = tuple("=+-@\t\r\n\uff1d\uff0b\uff0d\uff20")  # how a formula begins (OWASP, CSV injection); wide forms too
COLUMNS = ("oddness", "oddness_percentile", "uncertainty", "uncertainty_percentile")


class ScoresImages(Protocol):
    """Scores images chunk by chunk; the score of an image does not depend on the others."""

    def scores(self, images: Tensor) -> Scores: ...


@dataclass(frozen=True)
class Scored:
    """The scores of all images, in the order of the table."""

    names: list[str]
    """Paths as one line of text each, to be shown; the table has the paths as they are."""
    positions: NDArray[np.int64]
    """Of the images, in their stream."""
    oddness: NDArray[np.float32]
    oddness_percentile: NDArray[np.float32] | None
    uncertainty: NDArray[np.float32]
    uncertainty_percentile: NDArray[np.float32] | None
    embedding: NDArray[np.float32]
    """(N, width), mapped from a file that exists only during `score_images`."""
    skipped: list[tuple[str, str]]
    """Name and reason."""


# ------------------------------------------------------------------------------------------------------------ the whole


def score_images(
    scorer: ScoresImages,
    stream: Stream,
    out: Path,
    settings: dict[str, Any],
    embedding: bool = True,
    page: Callable[[Scored], None] | None = None,
    progress: Progress = lambda what, done, total: None,
    say: Say = say_on_stderr,
) -> Scored:
    """Score all images of a stream, write the table `out`, and return the scores.

    `settings` is all that the scores depend on: scoring resumes only with identical settings. `page` is called before
    the table is moved into place, so that an interrupted page is made again.
    """
    partial = Partial(out, settings)
    with disk_space_checked(out):
        partial.begin()
        starts = range(0, len(stream), chunk_size(stream))
        waiting = [start for start in starts if partial.read(start) is None]
        what = f"scoring {stream.name}"
        if len(waiting) < len(starts):
            done = min(len(stream), (len(starts) - len(waiting)) * starts.step)
            say(f"resuming from {partial.folder}: {done:,} of {len(stream):,} images are done.")
        for start in waiting:
            progress(what, start, len(stream))
            partial.write(start, stream, stream.chunk(start, start + starts.step), scorer)
        progress(what, len(stream), len(stream))
        scored = partial.collect(stream, starts)
        if not scored.names:
            partial.remove()
            raise BadInput(
                f"none of the images in {stream.name} can be used: {_named(scored.skipped)}; "
                "give a folder with undamaged images."
            )
        _report_skipped(stream, scored, out, say)
        if page is not None:
            page(scored)
        write_atomically(out, lambda path: _write_table(path, out.suffix, partial.tables(starts), embedding, settings))
        partial.remove()
    return scored


def chunk_size(stream: Stream) -> int:
    """Return the number of images per chunk."""
    return max(64, min(CHUNK_IMAGES, CHUNK_BYTES // (stream.channels * stream.side**2)))


def check_place(out: Path, page: bool) -> None:
    """Raise BadInput if the table, or a file next to it, cannot be written there."""
    if out.suffix not in KINDS:
        raise BadInput(f"--out is {out}, but a table ends in .parquet or .csv: give such a name.")
    others = [] if _partial_folder(out).is_dir() else [skipped_path(out), *([page_path(out)] if page else [])]
    taken = next((path for path in (out, *others) if path.exists()), None)
    if taken is not None:
        raise BadInput(f"{taken} exists already: remove it, or choose another --out.")


def locked(out: Path) -> Lock:
    """Lock a table, and remove what a killed process left next to it."""
    lock = Lock(beside(out), out)
    for path in (out, page_path(out), skipped_path(out)):
        remove_abandoned(leftovers(path))
    return lock


def check_images(run: Run, stream: Stream, say: Say = say_on_stderr) -> None:
    """Raise BadInput if the run takes other images, before any is decoded; report a conversion of their channels."""
    decoded = torch.empty((1, stream.channels, stream.side, stream.side))
    images, converted = in_channels(run, decoded if stream.memory is None else stream.memory.images[:1])
    run.check(images)
    if converted:
        say(f"{stream.name}: {converted}, as {run.folder} takes them.")


def identity(scorer: Scorer, stream: Stream) -> dict[str, Any]:
    """Return what the scores depend on: the run and its reference set as they are now, the score, the images, byov."""
    run = scorer.reference.run
    return {
        "run": str(run.folder.absolute()),
        "step": run.step,
        "run_digest": scorer.reference.folder.name,
        "uncertainty": scorer.uncertainty,
        "draws": scorer.draws,
        **({"fast": True} if scorer.fast else {}),
        **({"ensemble": [_named_run(other) for other in scorer.others]} if scorer.others else {}),
        "images": str(stream.root or stream.name),
        "images_digest": stream.digest,
        "image_size": stream.side,
        "byov": __version__,
    }


def _named_run(reference: ReferenceSet) -> str:
    return f"{reference.run.folder.absolute()} (step {reference.run.step}, {reference.folder.name})"


def page_path(out: Path) -> Path:
    """Return the path of a table's page. Tables odd.parquet and odd.csv have one each."""
    return out.with_suffix(".html") if out.suffix == ".parquet" else out.with_name(f"{out.name}.html")


def skipped_path(out: Path) -> Path:
    """Return the path of the list of files that could not be used."""
    return out.with_name(f"{out.name}.skipped.txt")


# ----------------------------------------------------------------------------------------------------- finished chunks


def _partial_folder(out: Path) -> Path:
    return out.with_name(f".{out.name}.partial")


class Partial:
    """The finished chunks of a table, in a folder next to it."""

    def __init__(self, out: Path, settings: dict[str, Any]) -> None:
        self.folder = _partial_folder(out)
        self.settings = settings
        self._cache = Cache(self.folder)

    def begin(self) -> None:
        """Make the folder, or check that it was made with the same settings."""
        saved = self.folder / "settings.json"
        if not saved.exists():
            write_json(saved, self.settings)
            return
        try:
            before = read_json(saved)
        except ValueError:
            before = {}
        keys = before.keys() | self.settings.keys()
        differs = sorted(key for key in keys if before.get(key) != self.settings.get(key))
        if differs:
            raise BadInput(
                f"{self.folder} holds the beginning of another table (it differs in {', '.join(differs)}): remove it "
                "to start again, or choose another --out."
            )

    def read(self, start: int) -> Entry | None:
        """Read a chunk; None if it is not finished."""
        return self._cache.read(_chunk_name(start))

    def write(self, start: int, stream: Stream, chunk: Chunk, scorer: ScoresImages) -> None:
        """Score a chunk and write its rows; paths and skipped files go into the header."""
        tensors = {"position": torch.tensor(chunk.positions, dtype=torch.int64)}
        if chunk.positions:
            scores = scorer.scores(chunk.images)
            found = {name: getattr(scores, name) for name in (*COLUMNS, "embedding")}
            tensors |= {name: values.detach().cpu().float() for name, values in found.items() if values is not None}
            if (bad := first_not_finite(tensors)) is not None:
                raise BadInput(f"the {bad} of some images is not finite: the run has diverged; score with another run.")
        header = {"paths": [stream.names[position] for position in chunk.positions], "skipped": chunk.skipped}
        self._cache.write(_chunk_name(start), Entry(tensors, header))

    def chunks(self, starts: Sequence[int]) -> Iterator[Entry]:
        for start in starts:
            entry = self.read(start)
            assert entry is not None
            yield entry

    def tables(self, starts: Sequence[int]) -> Iterator[pa.Table]:
        """The rows of each chunk, in order; chunks without rows are left out."""
        for tensors, header in self.chunks(starts):
            if header["paths"]:
                nothing = pa.nulls(len(header["paths"]), pa.float32())
                columns = {"path": pa.array(header["paths"], pa.string())}
                columns |= {name: pa.array(tensors[name].numpy()) if name in tensors else nothing for name in COLUMNS}
                yield pa.table(columns | {"embedding": _lists(tensors["embedding"])})

    def collect(self, stream: Stream, starts: Sequence[int]) -> Scored:
        """All chunks together. Only the embeddings are large: they go into a file that is memory-mapped."""
        parts: dict[str, list[Tensor]] = {name: [] for name in ("position", *COLUMNS)}
        names: list[str] = []
        skipped: list[tuple[str, str]] = []
        vectors, width = self.folder / "embedding.f32", 0
        with vectors.open("wb") as file:
            for tensors, header in self.chunks(starts):
                names += map(printable, header["paths"])
                skipped += [(printable(stream.names[position]), reason) for position, reason in header["skipped"]]
                if header["paths"]:
                    for name, values in parts.items():
                        values += [tensors[name]] if name in tensors else []
                    width = tensors["embedding"].shape[1]
                    file.write(tensors["embedding"].numpy().tobytes())
        columns = {name: torch.cat(values).numpy() for name, values in parts.items() if values}
        nothing, shape = np.empty(0, np.float32), (len(names), width)
        return Scored(
            names=names,
            positions=columns.get("position", np.empty(0, np.int64)),
            oddness=columns.get("oddness", nothing),
            oddness_percentile=columns.get("oddness_percentile"),
            uncertainty=columns.get("uncertainty", nothing),
            uncertainty_percentile=columns.get("uncertainty_percentile"),
            embedding=np.memmap(vectors, np.float32, "r", shape=shape) if shape[0] else np.empty(shape, np.float32),
            skipped=skipped + list(stream.unread),
        )

    def remove(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)


def _chunk_name(start: int) -> str:
    return f"chunk-{start:09d}"


def _lists(matrix: Tensor) -> pa.FixedSizeListArray:
    """(N, width) as a column of lists of one size."""
    return pa.FixedSizeListArray.from_arrays(pa.array(matrix.numpy().reshape(-1)), matrix.shape[1])


# ------------------------------------------------------------------------------------------------------------ the table


def _write_table(
    path: Path, suffix: str, tables: Iterator[pa.Table], embedding: bool, settings: dict[str, Any]
) -> None:
    if suffix == ".csv":
        _write_csv(path, tables)
        return
    writer = None
    try:
        for table in tables:
            table = table if embedding else table.drop_columns("embedding")
            table = table.replace_schema_metadata({"byov": json.dumps(settings)})
            writer = writer or pq.ParquetWriter(path, table.schema)
            writer.write_table(table)
    finally:
        if writer is not None:
            writer.close()


def _write_csv(path: Path, tables: Iterator[pa.Table]) -> None:
    """Numbers are as short as possible and still read back as the same float32.

    A path that a spreadsheet would run as a formula gets `./` in front: below the folder, it names the same file.
    """
    with path.open("w", encoding="utf-8", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(("path", *COLUMNS))
        for table in tables:
            texts = [["" if v is None else str(np.float32(v)) for v in table[name].to_pylist()] for name in COLUMNS]
            paths = [f"./{path}" if path.startswith(FORMULA) else path for path in table["path"].to_pylist()]
            rows.writerows(zip(paths, *texts, strict=True))


# ------------------------------------------------------------------------------------------------------------- warnings


def _report_skipped(stream: Stream, scored: Scored, out: Path, say: Say) -> None:
    """Warn with the number of skipped files and the first of them; list all in the file next to the table."""
    if not scored.skipped:
        return
    write_text(skipped_path(out), "".join(f"{name}: {reason}\n" for name, reason in scored.skipped))
    total = len(stream) + len(stream.unread)
    say(
        f"warning: {len(scored.skipped):,} of {total:,} files in {stream.root} are skipped: "
        f"{_named(scored.skipped)}; {skipped_path(out)} names all."
    )


def _named(skipped: Sequence[tuple[str, str]]) -> str:
    named = ", ".join(f"{name} ({reason})" for name, reason in skipped[:NAMED])
    return named + (f" and {len(skipped) - NAMED:,} more" if len(skipped) > NAMED else "")
