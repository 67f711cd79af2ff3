"""Guarded tools for Pydantic AI: a capability that puts a receipt around every call of an agent's tools.

agent = Agent(model, capabilities=[GuardedTools(effects={"search": "read"})])
async with toolkit.run("acme", "order-42"):
    result = await agent.run("Tell Ann that order 42 is on its way.")
"""

# The framework is an extra: its types are not there where it is not installed.
# pyright: reportMissingImports=false, reportUnknownVariableType=false, reportUnknownMemberType=false
# pyright: reportUnknownParameterType=false, reportUnknownArgumentType=false, reportUntypedBaseClass=false
from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic import ValidationError
from pydantic_ai.capabilities import AbstractCapability
from pydantic_ai.exceptions import (
    ApprovalRequired,
    CallDeferred,
    ModelRetry,
    RunCancelled,
    SkipToolExecution,
    ToolFailed,
    ToolFailedError,
    ToolRetryError,
    UnexpectedModelBehavior,
)

from natsreceipts.decision import Effect
from natsreceipts.integrations.outcomes import CallFailed, CallRaised, NotCarriedOut, ToolGuard
from natsreceipts.integrations.pydantic_ai_messages import plain_result, tool_result, turn_with
from natsreceipts.integrations.pydantic_ai_watch import WatchedToolset, watch
from natsreceipts.numbering import call_number, distinct_of

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from pydantic_ai.messages import ToolCallPart
    from pydantic_ai.tools import RunContext, ToolDefinition
    from pydantic_ai.toolsets import AbstractToolset

    from natsreceipts.entries import SessionEntry
    from natsreceipts.integrations.outcomes import OnUnknown
    from natsreceipts.run import Run

__all__ = ["EFFECT", "GuardedTools"]

EFFECT = "effect"
"""Where a tool declares its effect: ``@agent.tool_plain(metadata={"effect": "read"})``."""

_CONTROL_FLOW = (ApprovalRequired, CallDeferred, ModelRetry, SkipToolExecution, ToolRetryError)


class GuardedTools(AbstractCapability[Any]):
    """Puts a receipt around every call of an agent's tools, as ``Agent(…, capabilities=[GuardedTools()])``.

    ``run``: the run that the calls are made in, by default the ambient one (``async with toolkit.run(…):``).
    ``effects``: effects by tool name, which count before the metadata of a tool; other tools are ``opaque``.
    ``on_unknown``: whether the model is told that nobody knows what became of a call, or the error is raised (see
    `natsreceipts.integrations.outcomes`).

    A call is known by its tool and its arguments as the model gave them (where an approval changed them: as it did).
    Equal calls of one turn are numbered (`natsreceipts.numbering`). A tool that raises ModelRetry, ApprovalRequired or
    CallDeferred says that it has not done anything yet. One that raises ToolFailed has come to that result.
    """

    def __init__(
        self,
        run: Run | None = None,
        *,
        effects: Mapping[str, Effect | str] | None = None,
        on_unknown: OnUnknown = "tell",
    ) -> None:
        super().__init__()
        self.guard = ToolGuard(run, effects=effects, on_unknown=on_unknown, control_flow=_CONTROL_FLOW)

    def get_wrapper_toolset(self, toolset: AbstractToolset[Any]) -> AbstractToolset[Any]:
        """See when a tool returns."""
        return WatchedToolset(toolset)

    async def entry_of(self, ctx: RunContext[Any], call: ToolCallPart) -> SessionEntry | None:
        """The entry of a session that a claim of this call names; None: the ambient one."""
        return None

    async def wrap_tool_execute(
        self,
        ctx: RunContext[Any],
        *,
        call: ToolCallPart,
        tool_def: ToolDefinition,
        args: dict[str, Any],
        handler: Callable[[dict[str, Any]], Awaitable[Any]],
    ) -> Any:
        """Execute the tool once for this call. Raises ToolFailed where the model is to be told something else."""
        name = call.tool_name
        declared = (tool_def.metadata or {}).get(EFFECT)
        effect = self.guard.effect_of(name, declared)
        opaque, read = effect is Effect.OPAQUE, effect is Effect.READ

        async def body() -> Any:
            seen = watch()
            try:
                return plain_result(await handler(args))
            except _CONTROL_FLOW as signal:
                if name in seen.returned:  # a hook has rejected the result, and the tool had its effect
                    raise CallFailed(str(signal) or f"the result was rejected: {type(signal).__name__}") from signal
                if not read and name in seen.in_doubt:
                    raise seen.in_doubt[name] from signal
                raise
            except (ToolFailed, ToolFailedError) as failed:
                raise CallFailed(str(failed)) from failed
            except UnexpectedModelBehavior as error:
                if isinstance(error.__cause__, ModelRetry):  # it has asked for one retry too many
                    if not read and name in seen.in_doubt:
                        raise seen.in_doubt[name] from error
                    raise NotCarriedOut(error) from error
                raise
            except (RunCancelled, ValidationError) as error:
                # Its own: that of an agent that it ran, or of what it read, since the arguments were validated before.
                # The model would be told that the call failed, or be asked to try again.
                if opaque:
                    raise CallRaised(str(error), error) from error
                raise

        turn, made = turn_with(ctx.messages, call)
        distinct = distinct_of(call_number(turn, name, made, call.tool_call_id))
        entry = await self.entry_of(ctx, call)
        outcome = await self.guard.call(
            name, call.args_as_dict(), body, distinct=distinct, declared=declared, entry=entry
        )
        if outcome.text is not None:
            raise ToolFailed(outcome.text)
        return tool_result(outcome.value)
