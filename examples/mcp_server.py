"""An MCP server that is killed in the middle of a call, and a client that makes the call again: one mail.

    pip install 'natsreceipts[mcp,server]'
    python examples/mcp_server.py                      # killed when the mail is sent and on record
    python examples/mcp_server.py --kill-at during     # … when it is sent, and not yet on record

It starts a nats-server of its own, and the MCP server as a subprocess that talks over its standard input and output.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mcp
from mcp.server.extension import Extension
from mcp.server.mcpserver import MCPServer
from mcp_types import CallToolResult, TextContent

import natsreceipts
from natsreceipts.integrations.mcp import IDEMPOTENCY_KEYS, REPLAYED, ReceiptsExtension

if TYPE_CHECKING:
    from mcp.server.context import CallNext, HandlerResult, ServerRequestContext


async def server(url: str, outbox: Path, kill_at: str) -> None:
    """A server with one guarded tool."""
    async with natsreceipts.connect(url, provision=True, lease=2) as toolkit:

        def run_of(ctx: ServerRequestContext[Any, Any]) -> natsreceipts.Run:
            """Whose call it is, and of which piece of work: by authentication, or as here by what the client says."""
            meta: dict[str, Any] = (ctx.params or {}).get("_meta") or {}
            return toolkit.run("acme", str(meta.get("example.com/order", "unknown")))

        mail = MCPServer("mail", extensions=[DiesAfterwards(kill_at), ReceiptsExtension(run_of)])

        @mail.tool()
        async def send_email(to: str, text: str) -> str:  # pyright: ignore[reportUnusedFunction]
            """Send a mail."""
            with outbox.open("a") as file:
                file.write(f"To: {to}\n{text}\n")
            die(kill_at == "during")
            return "accepted as <m-1@example.com>"

        await mail.run_stdio_async()


async def call(command: list[str]) -> CallToolResult | None:
    """Call the tool; None where the server went away, as a client sees it."""
    there = mcp.StdioServerParameters(command=command[0], args=command[1:], env=dict(os.environ))
    meta: Any = {IDEMPOTENCY_KEYS[0]: "order-42-told", "example.com/order": "order-42"}
    result = None
    try:
        async with mcp.Client(there) as client, asyncio.timeout(30):
            mail = {"to": "ann@example.com", "text": "Order 42 is on its way."}
            result = await client.call_tool("send_email", mail, meta=meta)
    except* (mcp.MCPError, OSError, TimeoutError):
        pass
    return result


# ------------------------------------------------------------------ the rest is for the show


def die(now: bool) -> None:
    if now:
        os.kill(os.getpid(), signal.SIGKILL)


class DiesAfterwards(Extension):
    """Lets the server die when the call is on record, and the client has not heard of it."""

    identifier = "example.com/dies"

    def __init__(self, kill_at: str) -> None:
        self.kill_at = kill_at

    async def intercept_tool_call(
        self, params: Any, ctx: ServerRequestContext[Any, Any], call_next: CallNext
    ) -> HandlerResult:
        result = await call_next(ctx)
        die(self.kill_at == "after")
        return result


async def show(kill_at: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        outbox = Path(folder) / "outbox"
        outbox.touch()
        async with natsreceipts.embedded() as nats_server:
            for number, point in enumerate((kill_at, "never"), 1):
                command = [sys.executable, __file__, "--server", nats_server.url, str(outbox), "--kill-at", point]
                result = await call(command)
                if result is None:
                    print(f"call {number}: the server was killed, so who knows whether the mail was sent?")
                    continue
                [text] = [block.text for block in result.content if isinstance(block, TextContent)]
                how = "replayed, nothing was executed" if (result.meta or {}).get(REPLAYED) else "executed"
                print(f"call {number}: {'told' if result.is_error else how}: {text}")
        print(f"mails sent: {outbox.read_text().count('To: ')}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--kill-at", choices=["during", "after", "never"], default="after")
    parser.add_argument("--server", nargs=2, metavar=("URL", "OUTBOX"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.server:
        logging.getLogger("natsreceipts").setLevel(logging.ERROR)  # the lease is short, for the show
        asyncio.run(server(options.server[0], Path(options.server[1]), options.kill_at))
    else:
        asyncio.run(show(options.kill_at))
