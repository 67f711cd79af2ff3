"""A lease of 30 s, the default, is not lost to a single failover."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import TYPE_CHECKING

import pytest
from campaign import provisioned
from cluster import Cluster

from natsreceipts import CallInFlight, NotClaimed, connect

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

CALLS = 40
BODY = 35.0
"""Seconds: longer than the lease, so that it is held by renewals alone."""
KINDS = ("opaque", "idempotent")


@pytest.mark.timeout(400)
@pytest.mark.parametrize("how", ["kill", "freeze"])
async def test_a_lease_of_thirty_seconds_outlives_a_failover(how: str, tmp_path: Path) -> None:
    entered: list[int] = []
    inside = asyncio.Event()

    async with Cluster(tmp_path) as cluster:
        await provisioned(cluster, "")
        # The worst place for a holder to be connected to, and a machine that is gone says nothing of that.
        first = await cluster.stream_leader("KV_receipts")
        urls = sorted(cluster.urls, key=lambda url: first is None or url != cluster.proxied(first))
        async with (
            connect(urls, worker="holder", dont_randomize=True) as holder,
            connect(cluster.urls, worker="rival") as rival,
        ):

            async def hold(n: int) -> int:
                async def body() -> int:
                    entered.append(n)
                    if len(entered) == CALLS:
                        inside.set()
                    await asyncio.sleep(BODY)
                    return n

                return await holder.run("acme", "r").execute(KINDS[n % 2], {"n": n}, body, effect=KINDS[n % 2])

            async def contend(n: int) -> int:
                """Want the same call, all the time: nobody may be let in, and nothing be called ambiguous."""

                async def body() -> int:
                    raise AssertionError(f"call {n} was executed by a rival")

                while True:
                    with contextlib.suppress(CallInFlight, NotClaimed):
                        return await rival.run("acme", "r").execute(KINDS[n % 2], {"n": n}, body, effect=KINDS[n % 2])

            async with asyncio.TaskGroup() as group:
                held = [group.create_task(hold(n)) for n in range(CALLS)]
                await asyncio.wait_for(inside.wait(), 60)
                wanted = [group.create_task(contend(n)) for n in range(CALLS)]
                leader = await cluster.stream_leader("KV_receipts")
                assert leader is not None
                began = time.monotonic()
                if how == "kill":
                    await leader.kill()
                else:
                    leader.freeze()
                while (successor := await cluster.stream_leader("KV_receipts")) in (None, leader):
                    await asyncio.sleep(0.1)
                assert successor is not leader
                print(f"{how}: another leader after {time.monotonic() - began:.1f} s")
            receipts = [receipt async for receipt in holder.receipts.list()]
        assert [task.result() for task in held] == [task.result() for task in wanted] == list(range(CALLS))
        assert sorted(entered) == list(range(CALLS))
        assert len(receipts) == CALLS
        assert {(receipt.status, receipt.attempts) for receipt in receipts} == {("completed", 1)}
