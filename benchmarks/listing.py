"""The time to index a folder: all paths below it and their digest, as `folder:PATH` does before decoding."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path
from typing import Any

from conductor import summary

PATHS, FEW = 1_000_000, 50_000
IN_A_FOLDER = 1000


def measure(quick: bool) -> dict[str, Any]:
    from byov.data.image_files import list_images

    count, rounds = (FEW, 1) if quick else (PATHS, 3)
    with tempfile.TemporaryDirectory() as place:
        for k in range(count):
            folder = f"{place}/{k // IN_A_FOLDER:04d}"
            if k % IN_A_FOLDER == 0:
                Path(folder).mkdir()
            os.close(os.open(f"{folder}/{k:07d}.jpg", os.O_CREAT))  # half the time of `touch`
        seconds = []
        for _ in range(rounds):
            begun = time.perf_counter()
            listing = list_images(Path(place))
            listing.digest()
            seconds.append(time.perf_counter() - begun)
            assert len(listing.files) == count
    return {"paths": count, "rounds": rounds, "seconds": summary(seconds)}
