"""The short form of `benchmarks/chaos.py`: training is killed twice."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

CHAOS = Path(__file__).resolve().parents[1] / "benchmarks" / "chaos.py"


def test_nothing_is_lost() -> None:
    given = ["--campaign", "kills", "--commands", "train", "--cases", "2", "--minutes", "5"]
    done = subprocess.run([sys.executable, "-W", "ignore", CHAOS, *given], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    row = next(line for line in done.stdout.splitlines() if line.startswith("| kills"))
    cases, survived, lost = (int(cell) for cell in row.split("|")[2:5])
    assert cases == survived >= 2 and lost == 0
