"""MCP servers: a client's retry of a call is one effect. For the official SDK's servers; needs the extra ``mcp``.

`ReceiptsExtension` guards the tool calls of an ``MCPServer``, or of a low-level ``Server`` whose handler went through
``mcp.server.extension.compose_tool_call_handler``. FastMCP has `natsreceipts.integrations.fastmcp`. How a call is
keyed, and what annotations mean, is in `natsreceipts.integrations.mcp_calls`; what reaches the client is the same as in
all frameworks (`natsreceipts.integrations.outcomes`), as a result with ``isError``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

from mcp.server.extension import Extension
from mcp.shared.exceptions import MCPError
from mcp_types import INVALID_PARAMS, CallToolResult, ErrorData

from natsreceipts.errors import NotApplied
from natsreceipts.integrations.mcp_calls import (
    IDEMPOTENCY_KEYS,
    REPLAYED,
    McpCalls,
    Unfinished,
    effect_hinted,
    run_from,
    text_of,
    told,
)
from natsreceipts.integrations.outcomes import CallRaised

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence

    from mcp.server.context import CallNext, HandlerResult, ServerRequestContext
    from mcp_types import CallToolRequestParams, Tool

    from natsreceipts.decision import Effect
    from natsreceipts.integrations.outcomes import OnUnknown
    from natsreceipts.run import Run

__all__ = ["IDEMPOTENCY_KEYS", "REPLAYED", "NotAppliedError", "ReceiptsExtension"]

RunOf: TypeAlias = "Callable[[ServerRequestContext[Any, Any]], Run | Awaitable[Run]]"
"""Which run a request is made in: by its session, its authentication, or whatever the host knows of it."""


class NotAppliedError(MCPError, NotApplied):
    """Raised by a tool of an ``MCPServer``, through which a plain `NotApplied` does not get: it had no effect.

    The client reads the message as the result of the call, and may try again.
    """

    def __init__(self, message: str = "the call was not carried out, and may be tried again") -> None:
        Exception.__init__(self, message)
        self.error = ErrorData(code=INVALID_PARAMS, message=message)


class ReceiptsExtension(Extension):
    """Guards the tool calls of an ``MCPServer``: ``MCPServer(…, extensions=[ReceiptsExtension(run_of, …)])``.

    ``run_of``: a function of the request's context that gives its run. ``tools``: an async function that lists the
    server's tools (``lambda: server.list_tools()``), whose annotations are hints then. ``effects``, ``on_unknown``: as
    in `ToolGuard`. ``require_key``: refuse calls without an idempotency key, except for reads. ``meta_keys``: where in
    ``_meta`` it is looked for. The extension tells clients of the last two.

    An error that the tool foresaw (``ToolError``, a result with ``isError``) is what an opaque call came to, and is
    replayed; one that it did not leaves the call ambiguous, and the client reads that beside the server's words;
    `NotAppliedError` lets it be tried again.

    Raises InvalidSetting.
    """

    identifier = "natsreceipts/idempotency"

    def __init__(
        self,
        run_of: RunOf,
        *,
        tools: Callable[[], Awaitable[Sequence[Tool]]] | None = None,
        effects: Mapping[str, Effect | str] | None = None,
        on_unknown: OnUnknown = "tell",
        require_key: bool = False,
        meta_keys: Sequence[str] = IDEMPOTENCY_KEYS,
    ) -> None:
        self._run_of = run_of
        self._tools = tools
        self._calls = McpCalls(effects=effects, on_unknown=on_unknown, require_key=require_key, meta_keys=meta_keys)

    def settings(self) -> dict[str, Any]:
        """What clients are told."""
        return {"metaKeys": list(self._calls.meta_keys), "required": self._calls.require_key}

    async def intercept_tool_call(
        self, params: CallToolRequestParams, ctx: ServerRequestContext[Any, Any], call_next: CallNext
    ) -> HandlerResult:
        """Execute the call once in its run. Raises what has to end the turn, which the client gets as an error."""
        hinted = None
        if self._tools is not None and params.name not in self._calls.named:
            hinted = effect_hinted(next((t.annotations for t in await self._tools() if t.name == params.name), None))

        async def body() -> Any:
            result = await call_next(ctx)
            if isinstance(result, CallToolResult) and result.is_error:
                text, failed = text_of(result), f"Error executing tool {params.name}"
                if text == f"Unknown tool: {params.name}":
                    raise Unfinished(result)
                if text == failed or text.startswith(f"{failed}: Error executing tool"):
                    raise CallRaised(
                        text, Exception("an exception that the tool had not foreseen: see the server's log")
                    )
            return result

        meta = (ctx.params or {}).get("_meta")
        try:
            return await self._calls.execute(await run_from(self._run_of, ctx), params, meta, body, hinted=hinted)
        except Unfinished as unfinished:
            if isinstance(unfinished.answer, BaseException):
                raise unfinished.answer from None
            return unfinished.answer
        except NotAppliedError as said:
            return told(str(said))
