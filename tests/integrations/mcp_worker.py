"""An MCP server with one guarded tool, and a client of it that retries; the process may be killed in the middle."""

from __future__ import annotations

import contextlib

import mcp
from crash_nursery import LEASE, Here
from mcp.server.mcpserver import MCPServer

from natsreceipts import connect
from natsreceipts.integrations.mcp import IDEMPOTENCY_KEYS, ReceiptsExtension

with contextlib.suppress(ImportError):  # before the forks, which would do it each
    import fastmcp

    from natsreceipts.integrations.fastmcp import ReceiptsMiddleware


async def work(options):
    here = Here(options)

    async def send(to: str) -> str:
        return await here.send(to)

    async with connect(options["url"], namespace=options["namespace"], lease=LEASE) as toolkit:

        def run_of(_):
            here.point("before the claim")
            return toolkit.run("acme", options["run"])

        meta = {IDEMPOTENCY_KEYS[0]: "job-17"}
        if options["framework"] == "mcp":
            server = MCPServer("mail", extensions=[ReceiptsExtension(run_of)])
            server.tool()(send)
            async with mcp.Client(server) as client:
                result = await client.call_tool("send", {"to": "ann"}, meta=meta)
        else:
            server = fastmcp.FastMCP("mail", middleware=[ReceiptsMiddleware(run_of)])
            server.tool(send)
            async with fastmcp.Client(server) as client:
                result = await client.call_tool_mcp("send", {"to": "ann"}, meta=meta)
        here.point("after the settle")
        here.told("\n".join(block.text for block in result.content))
