"""The product's own code above the seam, walked through schedules that no cluster test will hit.

``SIM_SEED`` in the environment chooses the first seed of the long run (which prints its own), ``SIM_SECONDS`` how long
it lasts, ``SIM_KIND`` (workers, mixed, session, notices, replaced) what it is about. A schedule that fails is printed,
and shrunk. ``python tests/simulation/sim_campaign.py`` walks through 50,000 in all cores.
"""

from __future__ import annotations

import itertools
import os
import secrets
import subprocess
import sys
from pathlib import Path

import pytest
import sim_campaign
from sim_driver import walk, walk_plans
from sim_steps import steps_of

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


@pytest.mark.parametrize(("kind", "seed"), [("workers", 1), ("session", 1), ("notices", 1)])
def test_no_step_is_a_bad_one_to_die_or_to_be_cancelled_at(kind: str, seed: int) -> None:
    found = walk_plans(steps_of(seed, kind, faults=("crash", "cancel")))
    print(f"{kind}: {found}")
    assert found.problem is None, str(found)
    assert found.schedules > 40


def test_the_campaign_prints_a_table_and_ends_well() -> None:
    found = sim_campaign.campaign(60, 1, processes=1)
    said = sim_campaign.table(found, 1.0)
    assert [line.split()[-1] for line in said.splitlines()[1:-1]] == ["0"] * (len(sim_campaign.KINDS) + 1)


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
