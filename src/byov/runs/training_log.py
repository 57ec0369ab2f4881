"""The writer of a run's logs: metrics.jsonl, posterior.jsonl, TensorBoard events."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, TextIO

from byov._core.files import disk_space_checked, write_text
from byov.runs.folder import RunFolder, read_log


class TrainingLog:
    """Appends rows; when a run resumes, rows of steps that will be repeated are dropped first."""

    def __init__(self, folder: Path, after_step: int, tensorboard: bool) -> None:
        self._run = run = RunFolder(folder)
        self._files = {path: _reopened(path, after_step) for path in (run.metrics, run.posterior)}
        self._tensorboard: Any = None
        if tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self._tensorboard = SummaryWriter(str(run.tensorboard), purge_step=after_step + 1)

    def _write(self, path: Path, rows: list[dict[str, Any]]) -> None:
        with disk_space_checked(path):
            self._files[path].writelines(json.dumps(row) + "\n" for row in rows)
            self._files[path].flush()

    def metrics(self, row: dict[str, Any]) -> None:
        """Write a row of metrics, without values that are None."""
        row = {key: value for key, value in row.items() if value is not None}
        self._write(self._run.metrics, [row])
        if self._tensorboard is not None:
            for key, value in row.items():
                if key not in ("step", "epoch"):
                    self._tensorboard.add_scalar(key, value, row["step"])

    def layers(self, rows: list[dict[str, Any]], epoch: int, step: int) -> None:
        """Write sigma and SNR of every layer after an epoch."""
        self._write(self._run.posterior, [{"epoch": epoch, "step": step, **row} for row in rows])
        if self._tensorboard is not None:
            for row in rows:
                for key in ("sigma_mean", "snr_mean"):
                    self._tensorboard.add_scalar(f"{key}/{row['layer']}", row[key], step)

    def close(self) -> None:
        for file in self._files.values():
            file.close()
        if self._tensorboard is not None:
            self._tensorboard.close()


def _reopened(path: Path, after_step: int) -> TextIO:
    """Open a log to append to it, without the rows of steps that will be repeated; at step 0 it starts empty."""
    rows = [row for row in read_log(path).rows if row["step"] <= after_step] if after_step else []
    write_text(path, "".join(json.dumps(row) + "\n" for row in rows))
    return path.open("a", encoding="utf-8")
