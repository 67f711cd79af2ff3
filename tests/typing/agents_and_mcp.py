# pyright: strict, reportUnnecessaryTypeIgnoreComment=true
"""What the types of the integrations of the OpenAI Agents SDK and of MCP promise. Nothing runs it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, assert_type

from agents import Agent, FunctionTool, Runner
from agents.items import TResponseInputItem
from fastmcp import FastMCP
from mcp.server.mcpserver import MCPServer

from natsreceipts import Effect, Run, SessionLog, Toolkit
from natsreceipts.integrations.fastmcp import ReceiptsMiddleware
from natsreceipts.integrations.mcp import IDEMPOTENCY_KEYS, NotAppliedError, ReceiptsExtension
from natsreceipts.integrations.openai_agents import NatsSession, Turn, guarded

if TYPE_CHECKING:
    from agents.memory import Session
    from fastmcp.server.middleware import MiddlewareContext
    from mcp.server.context import ServerRequestContext
    from mcp_types import CallToolRequestParams


async def openai_agents(toolkit: Toolkit, tool: FunctionTool, run: Run) -> None:
    """Tools, turns and sessions."""
    assert_type(guarded(tool), FunctionTool)
    assert_type(guarded(tool, run=run, effect="idempotent", on_unknown="raise"), FunctionTool)
    guarded(tool, effect=Effect.OPAQUE)
    guarded(tool, on_unknown="guess")  # pyright: ignore[reportArgumentType]
    guarded(len)  # pyright: ignore[reportArgumentType]
    session = NatsSession(toolkit.sessions.open("acme", "chat", dialect="openai-responses"), [tool, "other"])
    as_theirs: Session = session
    assert_type(session.log, SessionLog)
    assert_type(await session.get_items(3), list[TResponseInputItem])
    assert_type(await session.pop_item(), TResponseInputItem | None)
    agent = Agent[Any](name="a", tools=[guarded(tool)])
    async with Turn(run, session) as hooks:
        assert_type(hooks, Turn)
        assert_type(await hooks.begin("hi", turn="job-17"), str | None)
        await Runner.run(agent, "hi", session=as_theirs, hooks=hooks)


def mcp(toolkit: Toolkit) -> None:
    """Servers, and the run of a request."""

    def run_of(ctx: ServerRequestContext[Any, Any]) -> Run:
        return toolkit.run("acme", str(ctx.request_id))

    async def slowly(context: MiddlewareContext[CallToolRequestParams]) -> Run:
        return toolkit.run("acme", context.message.name)

    server = MCPServer("mail", extensions=[ReceiptsExtension(run_of, tools=lambda: server.list_tools())])
    ReceiptsExtension(run_of, effects={"send": Effect.OPAQUE}, require_key=True, meta_keys=IDEMPOTENCY_KEYS)
    ReceiptsExtension(slowly)  # pyright: ignore[reportArgumentType]
    ReceiptsExtension(run_of, effects={"send": 3})  # pyright: ignore[reportArgumentType]
    FastMCP("mail", middleware=[ReceiptsMiddleware(slowly, hints=False)])
    ReceiptsMiddleware(run_of)  # pyright: ignore[reportArgumentType]
    assert_type(NotAppliedError("no").code, int)
