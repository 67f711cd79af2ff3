"""The product's own code above the seam, walked through schedules that no cluster test will hit.

``SIM_SEED`` in the environment chooses the first seed of the long run (which prints its own), ``SIM_SECONDS`` how long
it lasts, ``SIM_KIND`` (workers, mixed, session, notices, replaced) what it is about. A schedule that fails is printed,
and shrunk.
"""

from __future__ import annotations

import itertools
import os
import secrets
import subprocess
import sys
from pathlib import Path

import pytest
from sim_driver import walk

KIND = os.environ.get("SIM_KIND", "")
SEED = int(os.environ.get("SIM_SEED") or secrets.randbelow(10**9))
SECONDS = float(os.environ.get("SIM_SECONDS") or 60.0)


@pytest.mark.parametrize("kind", ["workers", "mixed", "session", "notices", "replaced"])
def test_no_schedule_breaks_a_promise(kind: str) -> None:
    found = walk(range(150), kind=kind)
    print(f"{kind}: {found}")
    assert found.problem is None, str(found)
    assert found.entered or kind == "notices"
    assert found.faults


@pytest.mark.faults
@pytest.mark.timeout(1200)
def test_no_schedule_of_a_long_run_breaks_a_promise() -> None:
    print(f"SIM_SEED={SEED}")
    found = walk(itertools.count(SEED), seconds=SECONDS, kind=KIND)
    print(found)
    assert found.problem is None, str(found)


def test_a_seed_gives_the_same_schedule_in_every_process() -> None:
    """No hash order, no wall clock, no thread has a part in it."""
    code = (
        "import hashlib, logging; from sim_plan import plan_of; from sim_shrink import printed\n"
        "logging.getLogger('natsreceipts').setLevel(100)\n"
        "text = ''.join(printed(plan_of(seed)) for seed in range(40))\n"
        "print(len(text), hashlib.sha256(text.encode()).hexdigest())"
    )
    here = Path(__file__).parent
    path = os.pathsep.join([str(here), str(here.parent / "sessions_pure"), *sys.path])
    said = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": path},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(said) == 1
