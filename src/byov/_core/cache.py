"""The cache for work that can be stopped and resumed: one safetensors file per entry, with a JSON header.

Files are written atomically and carry a digest of their content and name. A file that is missing, damaged, or a copy
under another name counts as no entry, so the work is simply done again.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from byov._core.files import write_atomically

HEADER = "header"  # in a file's metadata: the digest, and the header as JSON; one key, since their order is not fixed
DIGITS = 64


class Entry(NamedTuple):
    """What one file holds."""

    tensors: Mapping[str, Tensor]
    header: Any = None
    """Anything that JSON can express."""


def write_entry(path: Path, entry: Entry) -> None:
    """Write an entry to a file, atomically."""
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in entry.tensors.items()}
    header = json.dumps(entry.header, allow_nan=False)
    metadata = {HEADER: digest_of(tensors, path.name, header) + header}
    write_atomically(path, lambda temporary: save_file(tensors, temporary, metadata=metadata))


def read_entry(path: Path) -> Entry | None:
    """Read what `write_entry` wrote; None if the file is missing or damaged."""
    try:
        with safe_open(path, framework="pt") as file:
            text = file.metadata()[HEADER]
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        intact = text[:DIGITS] == digest_of(tensors, path.name, text[DIGITS:])
        return Entry(tensors, json.loads(text[DIGITS:])) if intact else None
    except (OSError, SafetensorError, KeyError, TypeError, ValueError):
        return None


class Cache:
    """A folder of entries. A file's name carries a digest of everything that its entry depends on.

    Args:
        folder: Where the files are; created with the first of them.
        settings: What all entries depend on, as JSON can express it. With other settings, no entry is found.
    """

    def __init__(self, folder: Path, settings: Any = None) -> None:
        self.folder, self.settings = folder, settings
        self._used: set[Path] = set()

    def path(self, name: str, settings: Any = None) -> Path:
        """Return the path of an entry, which may not exist; `settings` are those of this entry alone."""
        text = json.dumps([self.settings, name, settings], sort_keys=True)
        return self.folder / f"{name}-{hashlib.sha256(text.encode()).hexdigest()[:16]}.safetensors"

    def read(self, name: str, settings: Any = None) -> Entry | None:
        """Read an entry; None if there is none, or a damaged one."""
        self._used.add(path := self.path(name, settings))
        return read_entry(path)

    def write(self, name: str, entry: Entry, settings: Any = None) -> None:
        """Write an entry, atomically."""
        self._used.add(path := self.path(name, settings))
        write_entry(path, entry)

    def get(self, name: str, make: Callable[[], Entry], settings: Any = None) -> Entry:
        """Read an entry, or make and write it."""
        entry = self.read(name, settings)
        if entry is None:
            entry = make()
            self.write(name, entry, settings)
        return entry

    def clear(self, names: str | None = None) -> None:
        """Remove the entries that were read or written here, or those whose names match a pattern.

        The folder is removed as well if it is then empty.
        """
        for path in self._used if names is None else self.folder.glob(f"{names}-*.safetensors"):
            path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # it may hold entries of other work
            self.folder.rmdir()


def digest(*tensors: Tensor) -> str:
    """Return 16 hex digits that identify the values, shapes and types of some tensors."""
    return digest_of({str(place): tensor for place, tensor in enumerate(tensors)})[:16]


def digest_of(tensors: Mapping[str, Tensor], *texts: str) -> str:
    """Return the SHA-256 of some texts and named tensors: names, values, shapes and types."""
    sha = hashlib.sha256(json.dumps(texts).encode())
    for name, tensor in sorted(tensors.items()):
        sha.update(json.dumps([name, str(tensor.dtype), list(tensor.shape)]).encode())
        sha.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return sha.hexdigest()
