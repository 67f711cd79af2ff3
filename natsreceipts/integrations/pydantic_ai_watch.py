"""Whether a tool of Pydantic AI's has returned: hooks that run after it may still reject what it returned."""

# The framework is an extra: its types are not there where it is not installed.
# pyright: reportMissingImports=false, reportUnknownVariableType=false, reportUnknownMemberType=false
# pyright: reportUnknownParameterType=false, reportUnknownArgumentType=false, reportUntypedBaseClass=false
from __future__ import annotations

from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from pydantic_ai.toolsets import WrapperToolset

if TYPE_CHECKING:
    from pydantic_ai.tools import RunContext
    from pydantic_ai.toolsets import ToolsetTool

__all__ = ["WatchedToolset", "watch"]

_returned: ContextVar[list[str] | None] = ContextVar("natsreceipts_returned", default=None)


def watch() -> list[str]:
    """Return a list that gets the name of every tool that has returned, in what is awaited from here on."""
    names: list[str] = []
    _returned.set(names)
    return names


class WatchedToolset(WrapperToolset[Any]):
    """A toolset that notes when a tool has returned."""

    async def call_tool(
        self, name: str, tool_args: dict[str, Any], ctx: RunContext[Any], tool: ToolsetTool[Any]
    ) -> Any:
        """Call the tool."""
        names = _returned.get()
        result = await super().call_tool(name, tool_args, ctx, tool)
        if names is not None:
            names.append(name)
        return result
