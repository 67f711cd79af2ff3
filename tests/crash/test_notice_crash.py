"""Runs and agents that are killed with -9 between a notice's records and what they do next."""

from __future__ import annotations

import asyncio
import signal
import sys
from pathlib import Path

import pytest

from natsreceipts import AlreadyConsumed, connect, run_notice_id

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="kill -9")

AGENTS = ["local.planner-1", "local.builder-2"]


@pytest.fixture
async def toolkit(server, namespace):
    async with connect(server.url, namespace=namespace, provision=True) as connected:
        yield connected


async def started(server, namespace, out, what, **options):
    """Run a notifier to its end, and return its exit status and the lines that all of them have written."""
    given = {"url": server.url, "namespace": namespace, "out": out} | options
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        str(Path(__file__).with_name("notifier.py")),
        what,
        *(text for name, value in given.items() for text in (f"--{name.replace('_', '-')}", str(value))),
    )
    async with asyncio.timeout(60):
        status = await process.wait()
    return status, [line.split() for line in out.read_text().splitlines()] if out.exists() else []


async def test_a_run_that_is_killed_after_filing_and_repeated(server, namespace, toolkit, tmp_path):
    out = tmp_path / "out"
    status, _ = await started(server, namespace, out, "file", die_on=2)
    assert status == -signal.SIGKILL
    before = await toolkit.notices.list_run(run="run-1")
    assert len(before) == 6
    status, lines = await started(server, namespace, out, "file")
    assert status == 0
    again = lines[4:]  # of the first one, the lines of two steps
    ids = [run_notice_id(f"step-{n}", agent) for n in range(4) for agent in AGENTS]
    assert [notice_id for _, notice_id, _ in again] == ids
    assert [created for _, _, created in again] == ["False"] * 6 + ["True"] * 2
    after = await toolkit.notices.list_run(run="run-1")
    assert len(after) == 8
    assert [n for n in after if n.notice_id in {b.notice_id for b in before}] == before


async def test_an_agent_that_is_killed_after_consuming_and_before_acting(server, namespace, toolkit, tmp_path):
    """Its notice is on record as carried by that turn; nobody else carries it, and the turn that is repeated does."""
    out = tmp_path / "out"
    await started(server, namespace, tmp_path / "filed", "file", steps=3)
    status, lines = await started(server, namespace, out, "carry", turn="turn-1", die_on=1)
    assert status == -signal.SIGKILL
    assert [turn for turn, _ in lines] == ["turn-1"]
    told = await toolkit.notices.list(run="run-1", addressee=AGENTS[0])
    assert [n.consumed.by if n.consumed else None for n in told] == ["turn-1", "turn-1", None]
    status, lines = await started(server, namespace, out, "carry", turn="turn-2")
    assert status == 0
    assert lines == [["turn-1", told[0].notice_id], ["turn-2", told[2].notice_id]]
    consumption = {"run": "run-1", "addressee": AGENTS[0], "notice_id": told[1].notice_id}
    with pytest.raises(AlreadyConsumed, match="turn-1"):
        await toolkit.notices.consume(**consumption, by="turn-2")
    assert await toolkit.notices.consume(**consumption, by="turn-1") == told[1].consumed
    status, lines = await started(server, namespace, out, "carry", turn="turn-1")
    assert status == 0
    assert lines[2:] == [["turn-1", told[0].notice_id], ["turn-1", told[1].notice_id]]
