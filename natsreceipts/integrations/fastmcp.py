"""FastMCP servers: a client's retry of a call is one effect. Needs the extra ``fastmcp``.

How a call is keyed, and what annotations mean, is in `natsreceipts.integrations.mcp_calls`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias, cast

from fastmcp.exceptions import NotFoundError, ToolError, ValidationError
from fastmcp.server.middleware import Middleware
from fastmcp.tools.base import InputRequiredToolResult, ToolResult
from mcp_types import CallToolResult

from natsreceipts.integrations.mcp_calls import IDEMPOTENCY_KEYS, McpCalls, Unfinished, effect_hinted, run_from, told
from natsreceipts.integrations.outcomes import CallRaised

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence

    from fastmcp.server.middleware import CallNext, MiddlewareContext
    from mcp_types import CallToolRequestParams

    from natsreceipts.decision import Effect
    from natsreceipts.integrations.outcomes import OnUnknown
    from natsreceipts.run import Run

__all__ = ["ReceiptsMiddleware"]

RunOf: TypeAlias = "Callable[[MiddlewareContext[CallToolRequestParams]], Run | Awaitable[Run]]"
"""Which run a request is made in."""


class ReceiptsMiddleware(Middleware):
    """Guards the tool calls of a FastMCP server: ``server.add_middleware(ReceiptsMiddleware(run_of, …))``.

    ``run_of``: a function of the middleware's context that gives the run. ``hints``: whether the tools' annotations
    are hints; not so for a proxy of a server that you do not trust. The other parameters are as in
    `natsreceipts.integrations.mcp.ReceiptsExtension`. Add it last, so that it is the innermost.

    A ``ToolError`` of the tool's own is what an opaque call came to, and is replayed; another exception leaves the call
    ambiguous, and the client reads that beside FastMCP's words; `NotApplied` lets it be tried again.
    """

    def __init__(
        self,
        run_of: RunOf,
        *,
        hints: bool = True,
        effects: Mapping[str, Effect | str] | None = None,
        on_unknown: OnUnknown = "tell",
        require_key: bool = False,
        meta_keys: Sequence[str] = IDEMPOTENCY_KEYS,
    ) -> None:
        self._run_of = run_of
        self._hints = hints
        self._calls = McpCalls(effects=effects, on_unknown=on_unknown, require_key=require_key, meta_keys=meta_keys)

    async def on_call_tool(
        self,
        context: MiddlewareContext[CallToolRequestParams],
        call_next: CallNext[CallToolRequestParams, ToolResult],
    ) -> ToolResult:
        """Execute the call once in its run. Raises what has to end the turn, which the client gets as an error."""
        params, within = context.message, context.fastmcp_context
        hinted = None
        if self._hints and within is not None and params.name not in self._calls.named:
            tool = await within.fastmcp.get_tool(params.name)
            hinted = effect_hinted(tool.annotations) if tool is not None else None
        request = within.request_context if within is not None else None
        meta = request.meta if request is not None else None

        async def body() -> Any:
            try:
                result = await call_next(context)
            except Exception as error:
                cause = error.__cause__
                if isinstance(error, NotFoundError) or (
                    isinstance(error, ValidationError) and _is_of_the_server(error)
                ):
                    raise Unfinished(error) from error
                if isinstance(error, ValidationError):
                    return told(str(error))
                if not isinstance(error, ToolError):
                    raise
                if isinstance(cause, Exception) and str(error).startswith(_WRAPPERS):
                    raise CallRaised(str(error), cause) from error
                return told(str(error))
            if isinstance(result, InputRequiredToolResult):
                raise Unfinished(result)
            return _on_the_wire(result) if isinstance(cast("object", result), ToolResult) else result

        try:
            run = await run_from(self._run_of, context)
            result = await self._calls.execute(run, params, meta, body, hinted=hinted)
        except Unfinished as unfinished:
            if isinstance(unfinished.answer, BaseException):
                raise unfinished.answer from unfinished.answer.__cause__
            return unfinished.answer
        if isinstance(result, CallToolResult):
            return ToolResult.from_mcp_result(result)
        return ToolResult(structured_content=result)


_WRAPPERS = ("Error calling tool ", "Rate limited by upstream API", "Upstream request timed out")
"""How FastMCP's words begin about what a tool did not foresee. A ``ToolError`` of the tool's own has its own words."""


def _is_of_the_server(error: ValidationError) -> bool:
    """Whether FastMCP refused the arguments, so that the tool was not entered, and not the tool itself."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and str(trace.tb_frame.f_globals.get("__name__", "")).startswith("fastmcp.")


def _on_the_wire(result: ToolResult) -> CallToolResult:
    return CallToolResult(
        content=result.content,
        structured_content=result.structured_content,
        is_error=result.is_error,
        _meta=result.meta,
    )
