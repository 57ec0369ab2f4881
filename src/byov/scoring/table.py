"""A folder of any size through a scorer to a table: a chunk at a time, in constant memory, and able to go on.

    FILE.parquet            path, oddness, uncertainty, a percentile of each, embedding: a row an image, sorted by path
    FILE.csv                the same without the embedding
    FILE.skipped.txt        the files that could not be used, a line each
    .FILE.parquet.partial/  while it works: settings.json, and a file for each chunk that is done

A chunk's file is written whole or not at all; a second call with the same settings goes on after the last of them. The
table comes into its place at the very end.
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
from byov._core.callbacks import Progress, Say, say_on_stderr
from byov._core.errors import BadInput
from byov._core.files import disk_space_checked, write_atomically, write_json, write_text
from byov.data.stream import Chunk, Stream
from byov.inference.inputs import in_channels
from byov.inference.load import Run
from byov.scoring.scorer import Scorer, Scores

CHUNK_IMAGES = 2048  # weights are drawn anew for each chunk: with many images that costs nothing
CHUNK_BYTES = 2**26  # of pixels, from 105 pixels on
NAMED = 3  # files that a warning names
KINDS = (".parquet", ".csv")
COLUMNS = ("oddness", "oddness_percentile", "uncertainty", "uncertainty_percentile")


class ScoresImages(Protocol):
    """Scores images chunk by chunk: what it says of an image does not hang on the others."""

    def scores(self, images: Tensor) -> Scores: ...


@dataclass(frozen=True)
class Scored:
    """All that is known of the images when the last chunk is done, in the order of the table."""

    names: list[str]
    positions: NDArray[np.int64]
    """Of the images, in their stream."""
    oddness: NDArray[np.float32]
    oddness_percentile: NDArray[np.float32] | None
    uncertainty: NDArray[np.float32]
    uncertainty_percentile: NDArray[np.float32] | None
    embedding: NDArray[np.float32]
    """(N, width), mapped from a file that lasts as long as the call of `score_images`."""
    skipped: list[tuple[str, str]]


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
    """Scores all images of a stream, writes the table `out`, and returns what it holds.

    `settings` is all that the numbers hang on: a table is gone on with only under the same. `page` is called before
    the table comes into its place, so that an interrupted page is made again.
    """
    partial = Partial(out, settings)
    with disk_space_checked(out):
        partial.begin()
        starts = range(0, len(stream), chunk_size(stream))
        waiting = [start for start in starts if not partial.path(start).exists()]
        what = f"scoring {stream.name}"
        if len(waiting) < len(starts):
            done = min(len(stream), (len(starts) - len(waiting)) * starts.step)
            say(f"going on with {partial.folder}: {done:,} of {len(stream):,} images are done.")
        for start in waiting:
            progress(what, start, len(stream))
            partial.write(start, stream, stream.chunk(start, start + starts.step), scorer)
        progress(what, len(stream), len(stream))
        scored = partial.collect(stream, starts)
        if not scored.names:
            partial.remove()
            raise BadInput(_none_usable(stream, scored))
        _tell_skipped(stream, scored, out, say)
        if page is not None:
            page(scored)
        write_atomically(out, lambda path: _write_table(path, out.suffix, partial.tables(starts), embedding, settings))
        partial.remove()
    return scored


def chunk_size(stream: Stream) -> int:
    """Images a chunk."""
    return max(64, min(CHUNK_IMAGES, CHUNK_BYTES // (stream.channels * stream.side**2)))


def check_place(out: Path, page: bool) -> None:
    """Bad input if the table, or a file beside it, cannot be written there."""
    if out.suffix not in KINDS:
        raise BadInput(f"--out is {out}, but a table ends in .parquet or .csv: give such a name.")
    beside = [] if _partial_folder(out).is_dir() else [skipped_path(out), *([page_path(out)] if page else [])]
    taken = next((path for path in (out, *beside) if path.exists()), None)
    if taken is not None:
        raise BadInput(f"{taken} exists already: remove it, or choose another --out.")


def check_images(run: Run, stream: Stream, say: Say = say_on_stderr) -> None:
    """Bad input if the run takes other images, before any is decoded; says what is done to their channels."""
    decoded = torch.empty((1, stream.channels, stream.side, stream.side))
    images, converted = in_channels(run, decoded if stream.memory is None else stream.memory.images[:1])
    run.check(images)
    if converted:
        say(f"{stream.name}: {converted}, as {run.folder} takes them.")


def identity(scorer: Scorer, stream: Stream) -> dict[str, Any]:
    """What the scores hang on: the run and its reference images as they are now, the score, the images, the program."""
    run = scorer.reference.run
    return {
        "run": str(run.folder.absolute()),
        "step": run.step,
        "run_digest": scorer.reference.folder.name,
        "uncertainty": scorer.uncertainty,
        "draws": scorer.draws,
        **({"fast": True} if scorer.fast else {}),
        "images": str(stream.root or stream.name),
        "images_digest": stream.digest,
        "image_size": stream.side,
        "byov": __version__,
    }


def page_path(out: Path) -> Path:
    return out.with_suffix(".html")


def skipped_path(out: Path) -> Path:
    return out.with_suffix(".skipped.txt")


# ------------------------------------------------------------------------------------------------------- what is done


def _partial_folder(out: Path) -> Path:
    return out.with_name(f".{out.name}.partial")


class Partial:
    """The chunks that are done, beside the table that they will be."""

    def __init__(self, out: Path, settings: dict[str, Any]) -> None:
        self.folder = _partial_folder(out)
        self.settings = settings

    def begin(self) -> None:
        """Makes the folder, or finds it with the same settings; other settings are bad input."""
        saved = self.folder / "settings.json"
        if not saved.exists():
            write_json(saved, self.settings)
            return
        try:
            before = json.loads(saved.read_text(encoding="utf-8"))
        except ValueError:
            before = {}
        keys = before.keys() | self.settings.keys()
        differs = sorted(key for key in keys if before.get(key) != self.settings.get(key))
        if differs:
            raise BadInput(
                f"{self.folder} holds the beginning of another table (it differs in {', '.join(differs)}): remove it "
                "to start anew, or choose another --out."
            )

    def path(self, start: int) -> Path:
        return self.folder / f"{start:09d}.parquet"

    def write(self, start: int, stream: Stream, chunk: Chunk, scorer: ScoresImages) -> None:
        """Scores a chunk and keeps its rows; the skipped files go into the file's metadata."""
        scores = scorer.scores(chunk.images) if chunk.positions else None
        columns = {"position": pa.array(chunk.positions, pa.int64())}
        columns["path"] = pa.array([stream.names[position] for position in chunk.positions], pa.string())
        if scores is not None:
            nothing = pa.nulls(len(chunk.positions), pa.float32())
            for name in COLUMNS:
                values: Tensor | None = getattr(scores, name)
                columns[name] = nothing if values is None else _floats(values)
            columns["embedding"] = _vectors(scores.embedding)
        table = pa.table(columns).replace_schema_metadata({"skipped": json.dumps(chunk.skipped)})
        write_atomically(self.path(start), lambda path: pq.write_table(table, path, compression="NONE"))

    def tables(self, starts: Sequence[int]) -> Iterator[pa.Table]:
        """The chunks in order, without those that have no rows."""
        for start in starts:
            table = pq.read_table(self.path(start))
            if len(table):
                yield table.drop_columns("position")

    def collect(self, stream: Stream, starts: Sequence[int]) -> Scored:
        """All chunks together. Only the embeddings are large: they go into a file that is mapped."""
        columns: dict[str, list[Any]] = {name: [] for name in ("position", "path", *COLUMNS)}
        skipped: list[tuple[str, str]] = []
        vectors, width = self.folder / "embedding.f32", 0
        with vectors.open("wb") as file:
            for start in starts:
                table = pq.read_table(self.path(start))
                lost = json.loads(table.schema.metadata[b"skipped"])
                skipped += [(stream.names[position], reason) for position, reason in lost]
                if len(table):
                    for name, column in columns.items():
                        column.extend(table[name].to_pylist())
                    width = table.schema.field("embedding").type.list_size
                    file.write(_matrix(table).tobytes())
        shape = (len(columns["path"]), width)
        known = bool(columns["path"]) and columns["oddness_percentile"][0] is not None
        numbers = {name: np.array(columns[name], np.float32) for name in COLUMNS if known or "percentile" not in name}
        return Scored(
            names=columns["path"],
            positions=np.array(columns["position"], np.int64),
            oddness=numbers["oddness"],
            oddness_percentile=numbers.get("oddness_percentile"),
            uncertainty=numbers["uncertainty"],
            uncertainty_percentile=numbers.get("uncertainty_percentile"),
            embedding=np.memmap(vectors, np.float32, "r", shape=shape) if shape[0] else np.empty(shape, np.float32),
            skipped=skipped + list(stream.unread),
        )

    def remove(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)


def _floats(values: Tensor) -> pa.Array:
    return pa.array(values.detach().cpu().float().numpy())


def _vectors(values: Tensor) -> pa.FixedSizeListArray:
    """(N, width) as a column of lists, all of one size."""
    matrix = values.detach().cpu().float().contiguous()
    return pa.FixedSizeListArray.from_arrays(pa.array(matrix.numpy().reshape(-1)), matrix.shape[1])


def _matrix(table: pa.Table) -> NDArray[np.float32]:
    column = table["embedding"].combine_chunks()
    flat: NDArray[np.float32] = column.flatten().to_numpy()
    return flat.reshape(len(table), -1)


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
    """Numbers as short as they can be and still be read back as the same float32."""
    with path.open("w", encoding="utf-8", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(("path", *COLUMNS))
        for table in tables:
            texts = [["" if v is None else str(np.float32(v)) for v in table[name].to_pylist()] for name in COLUMNS]
            rows.writerows(zip(table["path"].to_pylist(), *texts, strict=True))


# ------------------------------------------------------------------------------------------------------------ sentences


def _tell_skipped(stream: Stream, scored: Scored, out: Path, say: Say) -> None:
    """A warning that counts the files that were skipped and names the first; the file beside the table names all."""
    if not scored.skipped:
        return
    write_text(skipped_path(out), "".join(f"{name}: {reason}\n" for name, reason in scored.skipped))
    total = len(stream) + len(stream.unread)
    say(
        f"warning: {len(scored.skipped):,} of {total:,} files in {stream.root} are skipped: "
        f"{_named(scored.skipped)}; {skipped_path(out)} names all."
    )


def _none_usable(stream: Stream, scored: Scored) -> str:
    return (
        f"none of the images in {stream.name} can be used: {_named(scored.skipped)}; give a folder with whole images."
    )


def _named(skipped: Sequence[tuple[str, str]]) -> str:
    named = ", ".join(f"{name} ({reason})" for name, reason in skipped[:NAMED])
    return named + (f" and {len(skipped) - NAMED:,} more" if len(skipped) > NAMED else "")
