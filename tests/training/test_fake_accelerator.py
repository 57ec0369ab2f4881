"""The whole step on a device that has no numbers: no tensor is on the wrong device, and the step waits for it once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]


def test_a_step_waits_once_for_the_device_whatever_the_method() -> None:
    path = os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, TESTS / "fake_accelerator.py"],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": path},
        check=True,
    )
    found = json.loads(done.stdout.splitlines()[-1])
    assert len(found) == 8
    for name, waits in found.items():
        assert len(waits) == 1 and "training/step.py" in waits[0], f"{name}: {waits}"
