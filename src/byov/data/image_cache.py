"""Images of a folder, decoded once in parallel and kept in one file in the data folder, mapped into memory for use.

Training never decodes, and a set larger than the memory is read page by page. A kept set is one folder, whose name
hangs on the path, the side and a digest of all files' names, sizes and times: what has changed is decoded anew.

    images.u8     the pixels, uint8 (N, 3, side, side), in the order of the files' names
    kept.json     where they come from, how many they are, and which files are not among them
    skipped.txt   the same files for the user, a line each
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import time
import warnings
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from byov._core.callbacks import Progress, Say
from byov._core.errors import BadInput
from byov._core.files import folder_written_whole, write_json, write_text
from byov._core.threads import in_order
from byov.data.decode import AT_ONCE, Unusable, decode_some, pillow_left_to_us
from byov.data.fetch import data_folder
from byov.data.listing import File, Listing

VERSION = 1  # of what `decode` makes of a file: raise it with a change there, and all is decoded anew
ABANDONED_SECONDS = 3600  # without a write: the process was killed


class Skipped(NamedTuple):
    """A file that could not be decoded."""

    path: str
    reason: str
    lasting: bool


class Decoded(NamedTuple):
    """The images of a folder, and what is not among them."""

    images: Tensor
    skipped: list[Skipped]
    folder: Path
    """Where they are kept."""


def decoded(root: Path, listing: Listing, side: int, progress: Progress, say: Say) -> Decoded:
    """The images of a listing, which is not empty: as they are kept, or else decoded now."""
    folder = _place(root, listing, side)
    skipped = _read_skipped(root, folder, side)
    if skipped is None:
        try:
            skipped = _decode_into(folder, root, listing, side, progress, say)
        except OSError as error:
            what = str(error.strerror or error).lower()
            advice = "mend that, or set BYOV_DATA to another folder"
            raise BadInput(f"cannot keep the images of {root} in {folder.parent}: {what}; {advice}.") from error
    return Decoded(_mapped(folder / "images.u8", len(listing.files) - len(skipped), side), skipped, folder)


def _place(root: Path, listing: Listing, side: int) -> Path:
    key = hashlib.sha256(os.fsencode(f"{side}\n{root}")).hexdigest()[:12]
    name = re.sub(r"[^\w.]+", "-", "-".join(root.parts[-2:])).strip("-.")[:60]
    return data_folder() / "folders" / f"{name}-{side}px-{key}-v{VERSION}.{listing.digest()[:16]}"


def _read_skipped(root: Path, folder: Path, side: int) -> list[Skipped] | None:
    """The files that are not in a kept set; None if there is none, or one that is broken or out of date."""
    try:
        kept = json.loads((folder / "kept.json").read_text(encoding="utf-8"))
        skipped = [Skipped(*skip) for skip in kept["skipped"]]
        if (folder / "images.u8").stat().st_size != kept["images"] * 3 * side**2:
            return None
    except (OSError, ValueError, KeyError, TypeError):
        return None
    # The digest does not tell that we may read a file by now.
    results = decode_some(root, side, [skip.path for skip in skipped if not skip.lasting])
    return skipped if all(isinstance(result, Unusable) and not result.lasting for result in results) else None


def _mapped(path: Path, count: int, side: int) -> Tensor:
    """A file as images, read only: Linux refuses a private mapping that is larger than the memory."""
    pixels = np.memmap(path, np.uint8, "r", shape=(count, 3, side, side))
    with warnings.catch_warnings(action="ignore"):  # torch's, that one should not write there: nobody does
        return torch.from_numpy(pixels)


# ------------------------------------------------------------------------------------------------------------ decoding


def _decode_into(folder: Path, root: Path, listing: Listing, side: int, progress: Progress, say: Say) -> list[Skipped]:
    """Makes a kept set, in the place of those that the same root had before; returns the files that are not in it."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    stem = folder.name.rpartition("-")[0]
    older = list(folder.parent.glob(f"{stem}-*"))
    if older:
        say(f"{root} has changed since its images were decoded: decoding them anew.")
    _remove_abandoned(folder.parent.glob(f".{stem}-*.tmp"))
    _check_space(folder.parent, root, len(listing.files) * 3 * side**2)
    with folder_written_whole(folder, keep_existing=True) as temporary:
        skipped = _write_images(temporary / "images.u8", root, listing.files, side, progress)
        count = len(listing.files) - len(skipped)
        if not count:
            first = f"{shown(skipped[0].path)}: {skipped[0].reason}"
            raise BadInput(
                f"none of the {len(listing.files):,} image files in {root} can be used (the first is {first}); "
                "give a folder with whole images."
            )
        write_json(temporary / "kept.json", {"folder": str(root), "images": count, "skipped": skipped})
        reasons = [skip[:2] for skip in skipped] + listing.unread
        lines = [f"{shown(path)}: {reason}\n" for path, reason in reasons]
        write_text(temporary / "skipped.txt", "".join(lines))
        for old in older:
            shutil.rmtree(old, ignore_errors=True)
    return skipped


def _write_images(path: Path, root: Path, files: Sequence[File], side: int, progress: Progress) -> list[Skipped]:
    """Writes the images one after another, in the files' order; returns the files that were skipped.

    Threads, not processes: Pillow lets others run while it decodes and resizes. From 224 to 96 pixels two threads
    decoded 970 JPEGs a second on two busy cores, where one decoded 770 and two processes 590.
    """
    what, skipped = f"decoding {root}", []
    starts = range(0, len(files), AT_ONCE)
    parts = [[file.path for file in files[start : start + AT_ONCE]] for start in starts]
    with path.open("wb") as out, pillow_left_to_us():
        for start, part, results in zip(starts, parts, in_order(partial(decode_some, root, side), parts), strict=True):
            progress(what, start, len(files))
            for name, result in zip(part, results, strict=True):
                if isinstance(result, Unusable):
                    skipped.append(Skipped(name, str(result), result.lasting))
                else:
                    out.write(result.data)
        progress(what, len(files), len(files))
        out.flush()
        os.fsync(out.fileno())
    return skipped


def shown(path: str) -> str:
    """A path as one line of text, whatever bytes are in it."""
    return path if path.isprintable() else ascii(path)


# -------------------------------------------------------------------------------------------------------------- folders


def _remove_abandoned(folders: Iterable[Path]) -> None:
    """Removes what killed processes have left; the age tells, for a process number may be another machine's."""
    for folder in folders:
        try:
            last = max(path.stat().st_mtime for path in (folder, *folder.iterdir()))
        except OSError:  # just moved to its place
            continue
        if time.time() - last > ABANDONED_SECONDS:
            shutil.rmtree(folder, ignore_errors=True)


def _check_space(folder: Path, root: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise BadInput(
            f"the images of {root} need {needed / 2**30:,.1f} GiB in {folder}, where {free / 2**30:,.1f} are free: "
            "free some space, set BYOV_DATA to a folder on another disk, or take a smaller image_size."
        )
