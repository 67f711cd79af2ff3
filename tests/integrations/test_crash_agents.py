"""The worker is killed in the middle of a tool call, and the turn is started again: the effect happens at most once."""

from __future__ import annotations

import asyncio

import pytest
from crash_nursery import POINTS, Nursery
from frameworks import framework

import natsreceipts

pytestmark = pytest.mark.timeout(300)


@pytest.fixture
async def where(server, namespace):
    async with natsreceipts.connect(server.url, namespace=namespace, provision=True):
        yield {"url": server.url, "namespace": namespace}


async def test_openai_agents(where, tmp_path):
    framework("agents")
    async with Nursery.of("openai_worker") as nursery, asyncio.TaskGroup() as group:
        for session in (False, True):
            for point in POINTS:
                folder = tmp_path / f"{point} {session}"
                group.create_task(nursery.trial(point, folder, session=session, **where))


async def test_mcp(where, tmp_path):
    framework("mcp.server.extension")
    async with Nursery.of("mcp_worker") as nursery, asyncio.TaskGroup() as group:
        for point in POINTS:
            group.create_task(nursery.trial(point, tmp_path / point, framework="mcp", **where))


async def test_fastmcp(where, tmp_path):
    framework("fastmcp")
    async with Nursery.of("mcp_worker") as nursery, asyncio.TaskGroup() as group:
        for point in POINTS:
            group.create_task(nursery.trial(point, tmp_path / point, framework="fastmcp", **where))
