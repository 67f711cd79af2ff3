"""The tools of the OpenAI Agents SDK under a guard. Public as `natsreceipts.integrations.openai_agents`."""

from __future__ import annotations

import copy
import json
import logging
from typing import TYPE_CHECKING, Any

from agents import ModelBehaviorError
from agents.tool import (
    FunctionTool,
    ToolOriginType,
    get_function_tool_origin,
    maybe_invoke_function_tool_failure_error_function,
    set_function_tool_failure_error_function,
    with_function_tool_failure_error_handler,
)
from agents.tool_context import ToolContext  # noqa: TC002 - the SDK reads the annotation of an invoker
from agents.tracing import SpanError, get_current_span

from natsreceipts.decision import Effect
from natsreceipts.errors import InvalidSetting, NatsReceiptsError, NotApplied
from natsreceipts.integrations.openai_agents_log import GUARDED
from natsreceipts.integrations.openai_agents_results import recordable
from natsreceipts.integrations.openai_agents_turn import active_turn
from natsreceipts.integrations.outcomes import CallRaised, OnUnknown, ToolGuard

if TYPE_CHECKING:
    from collections.abc import Mapping

    from agents import RunContextWrapper

    from natsreceipts.run import Run

__all__ = ["guarded"]

_log = logging.getLogger("natsreceipts")


def guarded(
    tool: FunctionTool,
    *,
    run: Run | None = None,
    effect: Effect | str | None = None,
    on_unknown: OnUnknown = "tell",
) -> FunctionTool:
    """Return a copy of a tool whose calls are guarded: each is executed once in its run, by its raw JSON arguments.

    ``run``: by default the ambient one, of `Turn`. ``effect``: by default the run's. ``on_unknown``: as in `ToolGuard`.
    An exception of the tool's is recorded as what it is. The model reads what the tool's ``failure_error_function``
    makes of it, and of an opaque tool that nobody knows what became of the call. What has to end the turn leaves
    ``Runner.run`` as the cause of a ``UserError``, and `Turn` as itself.

    Raises InvalidSetting for an agent as a tool: guard the tools of that agent.
    """
    origin = get_function_tool_origin(tool)
    if origin is not None and origin.type is ToolOriginType.AGENT_AS_TOOL:
        raise InvalidSetting(f"{tool.name} is an agent: guard the tools of that agent, which have the effects")
    effects: Mapping[str, Effect | str] = {} if effect is None else {tool.name: effect}
    guard = ToolGuard(run, effects=effects, on_unknown=on_unknown, control_flow=(_Unreadable,))
    plain = set_function_tool_failure_error_function(copy.copy(tool), None)  # its exceptions come out as they are

    async def invoke(ctx: ToolContext[Any], arguments: str) -> Any:
        return await _invoke(guard, tool, plain, ctx, arguments)

    async def failed(ctx: RunContextWrapper[Any], error: Exception) -> Any:
        if isinstance(error, _EndsTurn):
            raise error.error
        return await _policy(tool, ctx, error)

    async def bare(ctx: ToolContext[Any], arguments: str) -> Any:
        try:
            return await invoke(ctx, arguments)
        except _EndsTurn as ends:
            raise ends.error from ends.error.__cause__

    made = copy.copy(tool)
    if hasattr(tool.on_invoke_tool, "__agents_bind_function_tool__"):  # the SDK makes texts of its exceptions
        invoke.__dict__["__agents_prepare_arguments__"] = getattr(tool.on_invoke_tool, "prepare_arguments", None)
        made.on_invoke_tool = with_function_tool_failure_error_handler(invoke, _told)
        set_function_tool_failure_error_function(made, failed)
    else:
        made.on_invoke_tool = bare
    made.__dict__[GUARDED] = Effect(effect) if effect is not None else None
    return copy.copy(made)  # which binds the invoker to it


class _EndsTurn(Exception):
    """An error of ours that no model may be told of in the tool's stead."""

    def __init__(self, error: NatsReceiptsError) -> None:
        self.error = error
        super().__init__(str(error))


class _Unreadable(Exception):
    """The arguments do not fit the tool, which was not entered."""

    def __init__(self, error: Exception) -> None:
        self.error = error
        super().__init__(str(error))


async def _invoke(guard: ToolGuard, tool: FunctionTool, plain: FunctionTool, ctx: ToolContext[Any], raw: str) -> Any:
    raised: list[BaseException] = []

    async def body() -> Any:
        try:
            return recordable(await plain.on_invoke_tool(ctx, raw), typed=tool.output_json_schema is not None)
        except Exception as error:
            raised.append(error)
            text = await _policy(tool, ctx, error)
            unread = _is_unread(error, ctx.tool_name)
            if text is None:
                raise (_Unreadable(error) if unread else error) from error.__cause__
            _report(tool, error)
            raise CallRaised(text, NotApplied(str(error)) if unread else error) from error

    try:
        args: object = json.loads(raw) if raw else {}
    except ValueError:
        args = raw
    turn = active_turn()
    try:
        site = turn.site_of(ctx.tool_call_id, tool.name, args, run=guard.run) if turn is not None else None
        distinct = await site if site is not None else None
        outcome = await guard.call(tool.name, args, body, distinct=distinct)
    except _Unreadable as unreadable:
        raise unreadable.error from None
    except NatsReceiptsError as error:
        if error in raised:  # the tool's own
            raise
        raise _EndsTurn(error) from error
    if outcome.is_error:
        return outcome.text
    if turn is not None:
        turn.came(ctx.tool_call_id)
    return outcome.value


def _is_unread(error: Exception, tool: str) -> bool:
    """Whether arguments did not fit, so that the tool was not entered."""
    return isinstance(error, ModelBehaviorError) and str(error).startswith(f"Invalid JSON input for tool {tool}")


async def _policy(tool: FunctionTool, ctx: RunContextWrapper[Any], error: Exception) -> str | None:
    """What the model is told of an exception by the tool's own policy; None where it is let through."""
    if not hasattr(tool.on_invoke_tool, "__agents_bind_function_tool__"):
        return None  # made by hand: the SDK asks no policy
    return await maybe_invoke_function_tool_failure_error_function(function_tool=tool, context=ctx, error=error)


def _report(tool: FunctionTool, error: Exception) -> None:
    """What the SDK does about an error that has become a text; its own words on it are not to be had."""
    if (span := get_current_span()) is not None:
        span.set_error(SpanError(message="Error running tool (non-fatal)", data={"tool_name": tool.name}))
    _log.info("tool %s failed, and the model is told so (%s)", tool.name, type(error).__name__)


def _told(tool: FunctionTool, error: Exception, arguments: str) -> None:
    """The SDK made a text of an error of ours. It is logged where it is told."""
    del tool, error, arguments
