"""What a run writes while it trains: metrics.jsonl, posterior.jsonl, TensorBoard events."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from byov._core.files import disk_space_checked, write_text


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The rows of a JSON-lines file; a last line cut short (kill -9) is left out."""
    if not path.is_file():
        return []
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return rows


class Journal:
    """Appends rows; after a resumption, first drops those of steps that will be made again."""

    def __init__(self, folder: Path, after_step: int, tensorboard: bool) -> None:
        self.folder = folder
        for name in ("metrics", "posterior"):
            path = folder / f"{name}.jsonl"
            # At step 0 all is told anew, also the layers before the first step.
            kept = [row for row in read_lines(path) if row["step"] <= after_step] if after_step else []
            write_text(path, "".join(json.dumps(row) + "\n" for row in kept))
        self._files = {n: (folder / f"{n}.jsonl").open("a", encoding="utf-8") for n in ("metrics", "posterior")}
        self._tensorboard: Any = None
        if tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self._tensorboard = SummaryWriter(str(folder / "tensorboard"), purge_step=after_step + 1)

    def _write(self, name: str, rows: list[dict[str, Any]]) -> None:
        with disk_space_checked(self.folder / f"{name}.jsonl"):
            self._files[name].writelines(json.dumps(row) + "\n" for row in rows)
            self._files[name].flush()

    def metrics(self, row: dict[str, Any]) -> None:
        """A row of metrics; None is left out."""
        row = {key: value for key, value in row.items() if value is not None}
        self._write("metrics", [row])
        if self._tensorboard is not None:
            for key, value in row.items():
                if key not in ("step", "epoch"):
                    self._tensorboard.add_scalar(key, value, row["step"])

    def layers(self, rows: list[dict[str, Any]], epoch: int, step: int) -> None:
        """Sigma and SNR of every layer after an epoch."""
        self._write("posterior", [{"epoch": epoch, "step": step, **row} for row in rows])
        if self._tensorboard is not None:
            for row in rows:
                for key in ("sigma_mean", "snr_mean"):
                    self._tensorboard.add_scalar(f"{key}/{row['layer']}", row[key], step)

    def close(self) -> None:
        for file in self._files.values():
            file.close()
        if self._tensorboard is not None:
            self._tensorboard.close()
