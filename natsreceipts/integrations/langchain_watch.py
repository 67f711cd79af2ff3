"""Whether a tool of LangChain's was entered, and what it raised: a ToolNode gives the model a text in its place."""

# The framework is an extra: its types are not there where it is not installed.
# pyright: reportMissingImports=false, reportUnknownVariableType=false, reportUnknownMemberType=false
# pyright: reportUnknownParameterType=false, reportUnknownArgumentType=false
from __future__ import annotations

import functools
import inspect
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from langchain_core.tools import BaseTool, StructuredTool
from langchain_core.tools.simple import Tool
from pydantic import ValidationError
from pydantic.v1 import ValidationError as ValidationErrorV1

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from langgraph.prebuilt.tool_node import ToolCallRequest

__all__ = ["Watch"]

_VALIDATION = (ValidationError, ValidationErrorV1)

_INVOKED = ("ainvoke", "invoke", "arun", "run")


class Watch:
    """Looks on while a tool is executed in place of another: through a copy of the tool."""

    def __init__(self, tool: BaseTool | None) -> None:
        self._tool = tool
        self._invoked = False
        self._entered = False
        self._error: BaseException | None = None

    def watched(self, request: ToolCallRequest) -> ToolCallRequest:
        """Return the request with the watched copy of its tool."""
        if self._tool is None:
            return request
        tool = self._tool.model_copy()
        for name in ("_run", "_arun"):
            object.__setattr__(tool, name, self._entering(getattr(tool, name)))
        invoke = tool.ainvoke

        @functools.wraps(invoke)
        async def ainvoke(*args: Any, **kwargs: Any) -> Any:
            self._invoked, self._error = True, None
            try:
                return await invoke(*args, **kwargs)
            except BaseException as error:
                self._error = error
                raise

        object.__setattr__(tool, "ainvoke", ainvoke)
        return request.override(tool=tool)

    def _entering(self, run: Callable[..., Any]) -> Callable[..., Any]:
        if inspect.iscoroutinefunction(run):

            @functools.wraps(run)
            async def aenter(*args: Any, **kwargs: Any) -> Any:
                self._entered = True
                with self._noting():
                    return await run(*args, **kwargs)

            return aenter

        @functools.wraps(run)
        def enter(*args: Any, **kwargs: Any) -> Any:
            self._entered = True
            with self._noting():
                return run(*args, **kwargs)

        return enter

    @contextmanager
    def _noting(self) -> Generator[None, None, None]:
        """A ValidationError of the tool's own is turned into a text as if the arguments had been refused."""
        try:
            yield
        except _VALIDATION as error:
            self._error = error
            raise

    @property
    def invoked(self) -> bool:
        """Whether the copy was invoked at all, and not another tool, or none."""
        return self._invoked

    @property
    def error(self) -> BaseException | None:
        """What the tool raised when it was invoked last, or what was raised in it and taken for a refusal."""
        return self._error

    @property
    def refused(self) -> bool:
        """Whether its arguments were refused, so that the tool's own code was never reached.

        Known of tools that are invoked as LangChain invokes them.
        """
        kind = type(self._tool)
        usual = any(
            all(getattr(kind, name) is getattr(base, name) for name in _INVOKED)
            for base in (BaseTool, StructuredTool, Tool)
        )
        return usual and self._invoked and not self._entered
