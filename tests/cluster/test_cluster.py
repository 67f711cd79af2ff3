"""The faults of the campaign are faults: what is cut off is cut off, and comes back."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

import pytest
from campaign import provisioned
from cluster import Cluster

from natsreceipts import NotClaimed, Unreachable, connect

if TYPE_CHECKING:
    from pathlib import Path

    from cluster import Node

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

STREAM = "KV_receipts"


async def _another_leader(cluster: Cluster, old: Node) -> Node:
    async with asyncio.timeout(60):
        while True:
            for node in cluster.nodes:
                if node is not old and await cluster.leads(node, STREAM):
                    return node
            await asyncio.sleep(0.1)


@pytest.mark.parametrize("how", ["cut", "stall"])
async def test_a_leader_without_routes_is_deposed_and_follows_when_they_heal(how: str, tmp_path: Path) -> None:
    async with Cluster(tmp_path) as cluster:
        await provisioned(cluster, "")
        old = await cluster.stream_leader(STREAM)
        assert old is not None
        for wire in cluster.around(old):
            if how == "cut":
                await wire.cut()
            else:
                wire.stall()
        new = await _another_leader(cluster, old)
        assert await _executed(new) == "landed"
        for wire in cluster.around(old):
            wire.heal()
        await cluster.healthy()
        async with asyncio.timeout(60):
            while await cluster.leads(old, STREAM):
                await asyncio.sleep(0.1)
        assert await _executed(old) == "landed"


async def test_nothing_is_written_while_the_majority_is_frozen(tmp_path: Path) -> None:
    entered: list[int] = []

    async def body() -> None:
        entered.append(1)

    async with Cluster(tmp_path) as cluster:
        await provisioned(cluster, "")
        alone = cluster.nodes[0]
        async with connect(cluster.proxied(alone)) as toolkit:
            for node in cluster.nodes[1:]:
                node.freeze()
            with pytest.raises(NotClaimed):
                await toolkit.run("acme", "r").execute("send", {}, body)
            for node in cluster.nodes[1:]:
                node.thaw()
            await cluster.healthy()
            await toolkit.run("acme", "r").execute("send", {}, body)
    assert entered == [1]


async def test_a_node_whose_disk_is_full_comes_back(tmp_path: Path) -> None:
    async with Cluster(tmp_path) as cluster:
        await provisioned(cluster, "")
        node = cluster.nodes[2]
        if not cluster.fill(node):
            pytest.skip("no tmpfs can be mounted here")
        async with connect([cluster.nodes[0].url, cluster.nodes[1].url]) as toolkit:
            run = toolkit.run("acme", "r")
            for n in range(20):
                await run.execute("send", {"n": n}, _effect)
            cluster.empty(node)
            await node.kill()
            node.start()
            await cluster.healthy()
            for n in range(20):
                await run.execute("send", {"n": n}, _wrong)


async def _executed(node: Node) -> str:
    """As soon as all streams have a leader on its side."""
    async with asyncio.timeout(60):
        while True:
            with contextlib.suppress(Unreachable, NotClaimed):
                async with connect(node.url) as toolkit:
                    return await toolkit.run("acme", "r").execute("send", {}, _effect)


async def _effect() -> str:
    return "landed"


async def _wrong() -> str:
    raise AssertionError("it was executed again")
