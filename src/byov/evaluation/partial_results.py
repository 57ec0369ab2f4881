"""Finished sections of a long evaluation: kept in RUN/results/partial, so that one that was stopped goes on."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from byov._core.files import write_atomically
from byov.evaluation.named_metrics import Measures, strict


class Section(NamedTuple):
    """What one section found."""

    measures: Measures
    images: dict[str, Tensor] = {}  # noqa: RUF012
    """A number an image, of the test images, by name."""


class Kept:
    """The sections of one evaluation. `identity` is all that they hang on: with another, nothing is taken over."""

    def __init__(self, folder: Path, identity: Any) -> None:
        self.folder, self.identity = folder, identity
        self._paths: list[Path] = []

    def __call__(self, name: str, settings: Any, make: Callable[[], Section]) -> Section:
        """The section of this name and these settings: read, or made and written."""
        path = self.place(name, settings).with_suffix(".safetensors")
        self._paths.append(path)
        found = read_section(path)
        if found is None:
            measures, images = make()
            found = Section(strict(measures), images)
            write_section(path, found)
        return found

    def place(self, name: str, settings: Any) -> Path:
        """A path that only this section with these settings has."""
        text = json.dumps([self.identity, name, settings], sort_keys=True)
        return self.folder / f"{name}-{hashlib.sha256(text.encode()).hexdigest()[:16]}"

    def clear(self) -> None:
        """Removes them: the evaluation is written."""
        for path in self._paths:
            path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # another evaluation may have something in it
            self.folder.rmdir()


def write_section(path: Path, section: Section) -> None:
    """Tensors, with the measures as JSON in the header."""
    tensors = {name: row.detach().cpu().double().contiguous() for name, row in section.images.items()}
    metadata = {"measures": json.dumps(section.measures, allow_nan=False)}
    write_atomically(path, lambda temporary: save_file(tensors, temporary, metadata=metadata))


def read_section(path: Path) -> Section | None:
    """What `write_section` wrote; None where there is no such file, or no whole one."""
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            return Section(json.loads(file.metadata()["measures"]), tensors)
    except (OSError, SafetensorError, KeyError, TypeError, ValueError):
        return None


def digest(*tensors: Tensor) -> str:
    """Tells whether these are the same tensors."""
    sha = hashlib.sha256()
    for tensor in tensors:
        sha.update(
            f"{tensor.dtype}{tuple(tensor.shape)}".encode() + tensor.detach().cpu().contiguous().numpy().tobytes()
        )
    return sha.hexdigest()[:16]
