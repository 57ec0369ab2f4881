"""The time before anything happens: `byov --help`, and `import byov` compared with `import torch`.

`import byov` alone loads nothing; what is timed is the import with its first use, which loads torch.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from conductor import ratios, summary

COMMANDS = {
    "import torch": [sys.executable, "-c", "import torch"],
    "import byov": [sys.executable, "-c", "import byov; byov.Posterior"],
    "byov --help": [str(Path(sys.executable).with_name("byov")), "--help"],
    "python": [sys.executable, "-c", ""],
}


def measure(quick: bool) -> dict[str, Any]:
    rounds = 3 if quick else 12
    times: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for k in range(rounds + 1):
        for name, command in COMMANDS.items():
            begun = time.perf_counter()
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
            if k:  # the first round reads the files into the cache
                times[name].append(time.perf_counter() - begun)
    return {
        "rounds": rounds,
        "seconds": {name: summary(t) for name, t in times.items()},
        "import_ratio": ratios(times, "import byov", "import torch"),
    }
