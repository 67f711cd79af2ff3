"""The promises on a cluster of three real servers, while workers and servers are killed, frozen and cut off.

``pytest -m cluster tests/cluster`` is the whole campaign. ``CLUSTER_SECONDS`` makes it shorter or longer, but every
kind of fault comes at least once; ``CLUSTER_SEED`` repeats the choices of a run.
"""

from __future__ import annotations

import os
import secrets
import shutil

import pytest
from campaign import Campaign

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

WHOLE = 900.0
SECONDS = float(os.environ.get("CLUSTER_SECONDS", WHOLE))


@pytest.mark.timeout(SECONDS * 2 + 1500)
async def test_the_promises_hold_on_a_cluster_of_three(capsys: pytest.CaptureFixture[str]) -> None:
    seed = int(os.environ.get("CLUSTER_SEED", secrets.randbits(32)))
    whole = SECONDS >= WHOLE
    campaign = Campaign(seed, SECONDS, calls=5000 if whole else 1, faults=20)
    with capsys.disabled():
        print(f"\nCLUSTER_SEED={seed} CLUSTER_SECONDS={SECONDS:g}, all of it in {campaign.folder}", flush=True)
    figures = await campaign.run()
    with capsys.disabled():
        print(f"\n{figures.table()}", flush=True)
    assert not figures.violations
    assert not figures.problems
    assert figures.calls["completed"]
    if not os.environ.get("CLUSTER_KEEP"):
        shutil.rmtree(campaign.folder, ignore_errors=True)
