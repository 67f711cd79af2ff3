"""What a tool of Pydantic AI's did, seen where it is called: hooks and the framework make something else of it.

Hooks that run after a tool may still reject what it returned. And a toolset may raise ModelRetry in a tool's stead:
when the tool's time is over, or an MCP server could not be heard. That is not the tool's word that it has done nothing.
"""

# The framework is an extra: its types are not there where it is not installed.
# pyright: reportMissingImports=false, reportUnknownVariableType=false, reportUnknownMemberType=false
# pyright: reportUnknownParameterType=false, reportUnknownArgumentType=false, reportUntypedBaseClass=false
from __future__ import annotations

from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from pydantic_ai.exceptions import ModelRetry
from pydantic_ai.toolsets import WrapperToolset

from natsreceipts.integrations.outcomes import CallFailed, CallRaised

if TYPE_CHECKING:
    from pydantic_ai.tools import RunContext
    from pydantic_ai.toolsets import ToolsetTool

__all__ = ["Watch", "WatchedToolset", "watch"]


class Watch:
    """What the tools that were called in a context came to, by name."""

    def __init__(self) -> None:
        self.returned: set[str] = set()
        self.in_doubt: dict[str, CallFailed | CallRaised] = {}
        """Where a toolset asked for a retry in the tool's stead: what that is to be taken for."""


_watch: ContextVar[Watch | None] = ContextVar("natsreceipts_watch", default=None)


def watch() -> Watch:
    """Return a watch on the tools that are called in what is awaited from here on."""
    made = Watch()
    _watch.set(made)
    return made


class WatchedToolset(WrapperToolset[Any]):
    """A toolset that notes what its tools came to."""

    async def call_tool(
        self, name: str, tool_args: dict[str, Any], ctx: RunContext[Any], tool: ToolsetTool[Any]
    ) -> Any:
        """Call the tool."""
        seen = _watch.get()
        try:
            result = await super().call_tool(name, tool_args, ctx, tool)
        except ModelRetry as signal:
            if seen is not None and (doubt := _in_the_tools_stead(signal)) is not None:
                seen.in_doubt[name] = doubt
            raise
        if seen is not None:
            seen.returned.add(name)
        return result


def _in_the_tools_stead(signal: ModelRetry) -> CallFailed | CallRaised | None:
    """What a ModelRetry is where a toolset raised it; None where the tool itself did."""
    trace = signal.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    raised_in = trace.tb_frame.f_globals.get("__name__") if trace is not None else None
    cause = signal.__cause__
    if raised_in == "pydantic_ai.mcp":
        if cause is None or type(cause).__name__ == "ToolError":
            return CallFailed(str(signal))  # the server's answer: the tool failed
        return CallRaised(str(signal), cause)
    if raised_in == "pydantic_ai.toolsets.function":
        return CallRaised(str(signal), signal.__context__ or signal)
    return None
