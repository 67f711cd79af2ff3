"""examples/sync_charge.py as a script."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "sync_charge.py"


@pytest.mark.skipif(sys.platform == "win32", reason="kill -9")
def test_a_script_that_is_killed_and_run_again_charges_once():
    done = subprocess.run([sys.executable, str(EXAMPLE)], capture_output=True, text=True, timeout=110, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert lines[:2] == ["run 1:", "kill -9: booked, and not yet on record"]
    assert [line.partition(": ")[2] for line in lines if "attempt" in line] == [
        "replayed from its receipt, attempt 1"
    ] * 2
    assert lines[-1] == "the bank booked 1 charge"
