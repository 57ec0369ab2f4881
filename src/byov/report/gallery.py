"""The page next to a table of scores: the oddest and the most usual images, histograms, and near-duplicates.

The page is one self-contained file: thumbnails are inside, and its policy forbids it to fetch anything. Its size is
bounded, however many images there are. Near-duplicates are groups of images whose embeddings have almost the same
direction, found block by block.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components
from torch import Tensor
from torch.nn.functional import normalize

from byov._core.callbacks import Progress
from byov._core.files import write_text
from byov.data.image_files import Pixels
from byov.data.sources import Stream
from byov.report.elements import fill
from byov.scoring.table import Scored

EACH = 60  # images from either end of the ranking, and as many from between them
GROUPS, MEMBERS = 24, 6  # of near-duplicates, at most
SIDE = 224  # of a thumbnail: 8 KB of JPEG
LOSSLESS_SIDE = 64  # up to here an image is a small PNG, shown with sharp pixels
BINS = 40
ODDNESS = "How unlike the reference images an image is; a group of similar odd images is odd too."
UNCERTAINTY = (
    "How unreliable an image's features are: how much weight draws disagree on its nearest reference images, and how "
    "far away these are."
)
SEARCHED = 100_000  # images that are searched for near-duplicates: the time grows with the square


@dataclass(frozen=True)
class Item:
    """An image on the page."""

    name: str
    rank: int
    """1 is the oddest."""
    oddness: float
    oddness_percentile: float | None
    uncertainty: float
    uncertainty_percentile: float | None
    kind: str
    """odd, middle or usual; empty for an image that is only shown among near-duplicates."""
    source: str
    """The picture as a data URI; empty if its file is gone."""
    hard: bool
    """Whether it is so small that its pixels should be visible."""


@dataclass(frozen=True)
class Alike:
    """A group of near-duplicates, of which the first few are shown."""

    items: list[Item]
    count: int
    cosine: float


@dataclass(frozen=True)
class Bar:
    """A bar of a histogram; its height is relative to the highest."""

    low: float
    high: float
    count: int
    height: float


@dataclass(frozen=True)
class Histogram:
    """Bars of equal width, and how many values are beyond them on either side; the end bars count these too."""

    bars: list[Bar]
    below: int = 0
    above: int = 0

    @property
    def note(self) -> str:
        """What the end bars hide, as a sentence; empty if nothing."""
        ends = [(self.below, "first", "below"), (self.above, "last", "above")]
        texts = [f"the {bar} bar includes {count:,} {where} the scale" for count, bar, where in ends if count]
        return " and ".join(texts).capitalize() + "." * bool(texts)


def write_gallery(
    scored: Scored,
    stream: Stream,
    path: Path,
    facts: Sequence[tuple[str, str]],
    progress: Progress = lambda what, done, total: None,
    calibration: int | None = None,
) -> None:
    """Write the page about these scores.

    `facts` are names and values that describe how the scores were made. `calibration` is the number of images behind
    the percentiles, if known.
    """
    groups = near_duplicates(scored.embedding[:SEARCHED], progress=progress)
    write_text(path, render(scored, stream, groups, facts, progress, calibration))


def render(
    scored: Scored,
    stream: Stream,
    groups: Sequence[Group],
    facts: Sequence[tuple[str, str]] = (),
    progress: Progress = lambda what, done, total: None,
    calibration: int | None = None,
) -> str:
    """Return the page as HTML."""
    rank = ranks(scored.oddness)
    chosen = selection(rank)
    twins = [group.rows[:MEMBERS] for group in groups[:GROUPS]]
    items: dict[int, Item] = {}
    rows = dict.fromkeys([*chosen, *(row for some in twins for row in some)])
    for row in rows:
        items[row] = _item(scored, stream, row, int(rank[row]), chosen.get(row, ""))
        progress("drawing thumbnails", len(items), len(rows))
    alike = [
        Alike([items[row] for row in some], len(group.rows), group.cosine)
        for some, group in zip(twins, groups, strict=False)
    ]
    aside = "images" if calibration is None else f"{calibration:,} image{'s' * (calibration != 1)}"
    calibrated = f"Percentile against {aside} set aside from training: flat if the images here are like those."
    histograms = [
        (name, f"{meaning} {calibrated if percentiles is not None else ''}", _histogram(values, percentiles))
        for name, meaning, values, percentiles in (
            ("Oddness", ODDNESS, scored.oddness, scored.oddness_percentile),
            ("Uncertainty", UNCERTAINTY, scored.uncertainty, scored.uncertainty_percentile),
        )
    ]
    return fill(
        "gallery.html.j2",
        title=stream.name,
        facts=facts,
        count=len(scored.names),
        skipped=len(scored.skipped),
        items=[items[row] for row in chosen],
        alike=alike,
        groups=len(groups),
        threshold=THRESHOLD,
        searched=min(SEARCHED, len(scored.names)),
        histograms=histograms,
    )


def _histogram(values: NDArray[np.float32], percentiles: NDArray[np.float32] | None) -> Histogram:
    """The histogram of a score, or of its percentiles if they are known."""
    return histogram(values) if percentiles is None else histogram(percentiles, (0.0, 100.0))


def ranks(oddness: NDArray[np.float32]) -> NDArray[np.int64]:
    """Rank images by oddness: 1 is the oddest; of equals, the first comes first."""
    order = np.argsort(-oddness, kind="stable")
    rank = np.empty(len(order), np.int64)
    rank[order] = np.arange(1, len(order) + 1)
    return rank


def selection(rank: NDArray[np.int64], each: int = EACH) -> dict[int, str]:
    """Choose the rows to show, oddest first, with their kind: both ends of the ranking, and some in between."""
    order = np.argsort(rank)
    third = min(each, -(-len(order) // 3))  # few images: a third is odd, a third usual
    odd, between, usual = np.split(order, [third, max(third, len(order) - third)])
    spread = np.unique(np.linspace(0, len(between) - 1, min(each, len(between))).round().astype(int))
    kinds = (("odd", odd), ("middle", between[spread]), ("usual", usual))
    return {int(row): kind for kind, rows in kinds for row in rows}


def histogram(values: NDArray[np.float32], limits: tuple[float, float] | None = None, bins: int = BINS) -> Histogram:
    """Count values in bars. Without limits, 0.1% of the values at either end are counted in the end bars."""
    known = values[np.isfinite(values)]
    if not len(known):
        return Histogram([])
    low, high = limits or np.quantile(known, [0.001, 0.999]).tolist()
    counts, edges = np.histogram(known.clip(low, high), bins if high > low else 1, (low, high) if high > low else None)
    highest = counts.max()
    bars = [
        Bar(float(a), float(b), int(count), float(count / highest))
        for a, b, count in zip(edges[:-1], edges[1:], counts, strict=True)
    ]
    return Histogram(bars, int((known < low).sum()), int((known > high).sum()))


def _item(scored: Scored, stream: Stream, row: int, rank: int, kind: str) -> Item:
    pixels = stream.picture(int(scored.positions[row]), SIDE)
    oddness_percentile, uncertainty_percentile = (
        None if values is None else float(values[row])
        for values in (scored.oddness_percentile, scored.uncertainty_percentile)
    )
    source, hard = ("", False) if pixels is None else (data_uri(pixels), pixels.shape[-1] <= LOSSLESS_SIDE)
    return Item(
        scored.names[row],
        rank,
        float(scored.oddness[row]),
        oddness_percentile,
        float(scored.uncertainty[row]),
        uncertainty_percentile,
        kind,
        source,
        hard,
    )


def data_uri(pixels: Pixels) -> str:
    """Encode an image, uint8 (C, H, W), as text for a page: JPEG, or PNG if it is small."""
    picture = Image.fromarray(pixels[0] if len(pixels) == 1 else pixels.transpose(1, 2, 0))
    kind = "PNG" if picture.width <= LOSSLESS_SIDE else "JPEG"
    out = io.BytesIO()
    picture.save(out, kind, optimize=True, **({"quality": 80} if kind == "JPEG" else {}))
    return f"data:image/{kind.lower()};base64,{base64.b64encode(out.getvalue()).decode()}"


BLOCK = 4096  # images: a block of similarities takes 64 MiB
# Measured on photographs with a poor encoder (85% of its variance in one direction), whitened with this ridge. Half of
# the copies cropped by 4% or made 10% brighter had a cosine of .971 or more with their original; all copies saved again
# as JPEG or made smaller had .998. The nearest other photograph had at most .966; if only standardised, 1.000.
THRESHOLD, RIDGE = 0.97, 0.01


class Group(NamedTuple):
    """Rows of near-duplicate images, and the largest cosine among them."""

    rows: list[int]
    cosine: float


def near_duplicates(
    embeddings: NDArray[np.float32],
    threshold: float = THRESHOLD,
    progress: Progress = lambda what, done, total: None,
    block: int = BLOCK,
) -> list[Group]:
    """Group rows (N, width) that are linked by their nearest other row, the most similar groups first.

    Embeddings are whitened over all rows first, because what all images have in common would make any two similar.
    Each row is linked only with its nearest, so that a thousand copies make a thousand links and not half a million.
    Memory is that of two blocks; `embeddings` may be memory-mapped. 100,000 rows of 192 numbers took three minutes on
    two shared cores.
    """
    count = len(embeddings)
    if count < 2:
        return []
    mean, whitening = _whitening(embeddings, block)
    if not whitening.any():  # all rows are the same
        return [Group(list(range(count)), 1.0)]

    def directions(start: int) -> Tensor:
        return normalize((_rows(embeddings, start, block) - mean) @ whitening).float()

    best = torch.full((count,), -2.0)
    nearest = torch.zeros(count, dtype=torch.int64)
    starts = range(0, count, block)
    pairs, done = len(starts) * (len(starts) + 1) // 2, 0
    for i in starts:
        rows = directions(i)
        for j in range(i, count, block):
            columns = rows if j == i else directions(j)
            cosines = rows @ columns.T
            if j == i:
                cosines.fill_diagonal_(-2.0)
            _keep_best(best, nearest, i, j, cosines)
            if j > i:
                _keep_best(best, nearest, j, i, cosines.T)
            done += 1
            progress("looking for near-duplicates", done, pairs)
    return _groups(best.numpy(), nearest.numpy(), threshold)


def _whitening(embeddings: NDArray[np.float32], block: int) -> tuple[Tensor, Tensor]:
    """The mean, and a matrix (width, width) that whitens the centred rows; in float64, block by block.

    A constant column has weight 0.
    """
    starts = range(0, len(embeddings), block)
    mean = torch.stack([_rows(embeddings, start, block).sum(0) for start in starts]).sum(0) / len(embeddings)
    covariance = torch.zeros((len(mean), len(mean)), dtype=torch.float64)
    for start in starts:
        centred = _rows(embeddings, start, block) - mean
        covariance.addmm_(centred.T, centred, alpha=1 / len(embeddings))
    std = covariance.diagonal().sqrt()
    scale = torch.where(std > 1e-6 * mean.abs(), 1 / std, 0.0)
    values, vectors = torch.linalg.eigh(scale[:, None] * covariance * scale)
    return mean, scale[:, None] * vectors / (values.clamp(min=0) + RIDGE).sqrt()


def _rows(embeddings: NDArray[np.float32], start: int, block: int) -> Tensor:
    return torch.from_numpy(embeddings[start : start + block].astype(np.float64))


def _keep_best(best: Tensor, nearest: Tensor, start: int, others: int, cosines: Tensor) -> None:
    """Update the nearest rows so far; at a tie the first stays, so that all copies link to one row."""
    values, columns = cosines.max(1)
    part = slice(start, start + len(values))
    nearer = values > best[part]
    best[part] = torch.where(nearer, values, best[part])
    nearest[part] = torch.where(nearer, columns + others, nearest[part])


def _groups(best: NDArray[np.float32], nearest: NDArray[np.int64], threshold: float) -> list[Group]:
    linked = np.flatnonzero(best >= threshold)
    links = coo_array((np.ones(len(linked)), (linked, nearest[linked])), shape=(len(best), len(best)))
    label = connected_components(links, directed=False)[1]
    members: dict[int, list[int]] = {}
    for row in linked.tolist():
        for each in (row, int(nearest[row])):
            members.setdefault(int(label[row]), []).append(each)
    groups = [Group(sorted(set(rows)), float(best[rows].max().clip(-1, 1))) for rows in members.values()]
    return sorted(groups, key=lambda group: (-group.cosine, group.rows))
