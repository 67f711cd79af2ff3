"""A turn of a Pydantic AI agent in a session: killed anywhere, it is woken and goes on.

session = toolkit.sessions.open("acme", "chat-7", dialect="pydantic-ai")
async with toolkit.run("acme", "job-17"):
    result = await run_turn(agent, "Tell Ann …", session=session, turn="job-17")
"""

# The framework is an extra: its types are not there where it is not installed.
# pyright: reportMissingImports=false, reportUnknownVariableType=false, reportUnknownMemberType=false
# pyright: reportUnknownParameterType=false, reportUnknownArgumentType=false, reportUntypedBaseClass=false
from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, cast

from pydantic_ai.messages import ModelResponse
from pydantic_ai.tools import DeferredToolRequests

from natsreceipts.decision import Effect
from natsreceipts.errors import InvalidSetting
from natsreceipts.integrations.pydantic_ai import GuardedTools
from natsreceipts.integrations.pydantic_ai_messages import dumped, loaded
from natsreceipts.numbering import NumberedCalls

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pydantic_ai.agent import Agent, AgentRunResult
    from pydantic_ai.messages import ModelMessage, ToolCallPart
    from pydantic_ai.models import ModelRequestContext
    from pydantic_ai.tools import DeferredToolResults, RunContext

    from natsreceipts.entries import SessionEntry
    from natsreceipts.integrations.outcomes import OnUnknown
    from natsreceipts.run import Run
    from natsreceipts.sessions import SessionLog

__all__ = ["run_turn"]


async def run_turn(
    agent: Agent[Any, Any],
    prompt: Any = None,
    *,
    session: SessionLog,
    turn: str,
    run: Run | None = None,
    effects: Mapping[str, Effect | str] | None = None,
    on_unknown: OnUnknown = "tell",
    deferred_tool_results: DeferredToolResults | None = None,
    **settings: Any,
) -> AgentRunResult[Any]:
    """Run ``agent`` on ``prompt`` in a session: its messages are the history, and every new one is put into its log.

    ``turn``: a name of the turn's own, that of the job that asks for it, say. Under that name the prompt stands in the
    log once. A turn that was begun before goes on without the prompt, and one that has ended gives its output again.
    ``run``, ``effects`` and ``on_unknown`` as of `GuardedTools`, which is added to the agent's capabilities for this
    run. ``settings`` go to ``agent.run``.

    The session is woken first. Calls that wait for an approval, or for a result from elsewhere, are suspended in it
    (the output is ``DeferredToolRequests``); with ``deferred_tool_results`` they go on, under the same ``turn`` or one
    of their own.

    Raises SessionBusy while another worker is at it, SessionConflict, InvalidSetting for a session of another dialect
    or an agent that rewrites its history, what has to end the turn (`natsreceipts.integrations.outcomes`), and what
    ``agent.run`` raises.
    """
    guarded = _InSession(run, effects=effects, on_unknown=on_unknown)
    tools = {call.name for each in (await session.load()).messages for call in session.calls_in(each)}
    found = {name: guarded.guard.effect_of(name) for name in tools}
    keyed = {name: NumberedCalls() for name, effect in found.items() if effect is not Effect.READ}
    await session.wake(guarded=keyed, effects=found)
    loaded_session = await session.load()
    if session.dialect != "pydantic-ai":
        raise InvalidSetting(f"{session!r} is in the dialect {session.dialect}: open it with dialect='pydantic-ai'")
    begun = turn in {entry.id for entry in loaded_session.all_entries}
    if deferred_tool_results is not None:
        decided = {*deferred_tool_results.approvals, *deferred_tool_results.calls}
        if not decided & loaded_session.suspended:
            deferred_tool_results = None  # they are in the log already
    asked = None if begun else prompt
    waiting = loaded_session.suspended if deferred_tool_results is not None or begun else frozenset[str]()
    history = loaded(_without_results((await session.context()).messages, waiting))
    if begun and waiting and deferred_tool_results is None:
        # It waits still. Its calls that were made are replayed, and it comes to the same output.
        last = max(index for index, message in enumerate(history) if isinstance(message, ModelResponse))
        history = history[: last + 1]
    fresh = asked is not None or deferred_tool_results is not None
    guarded.log = _Log(session, guarded.guard.run, None if begun else turn, fresh=fresh)
    guarded.log.note(loaded_session.entries)
    result = await agent.run(
        asked,
        message_history=history or None,
        deferred_tool_results=deferred_tool_results,
        capabilities=[*settings.pop("capabilities", ()), guarded],
        **settings,
    )
    if begun and waiting and deferred_tool_results is None:
        return result
    await guarded.log.keep(result.all_messages())
    if isinstance(result.output, DeferredToolRequests):
        ids = [call.tool_call_id for call in (*result.output.approvals, *result.output.calls)]
        if ids := [each for each in ids if each not in loaded_session.suspended]:
            await session.suspend(ids)
    return result


class _InSession(GuardedTools):
    """Guarded tools whose calls are in the log before they are made."""

    log: _Log

    async def before_model_request(self, ctx: RunContext[Any], request_context: ModelRequestContext) -> Any:
        """Put what the model is about to read into the log."""
        await self.log.keep(ctx.messages)
        return request_context

    async def entry_of(self, ctx: RunContext[Any], call: ToolCallPart) -> SessionEntry | None:
        """Put the call into the log, and return its entry."""
        await self.log.keep(ctx.messages, fresh=False)
        return self.log.entries.get(call.tool_call_id)


class _Log:
    """The session's log of one run: how many of the run's messages are in it, and the entry of each call."""

    def __init__(self, session: SessionLog, run: Run, turn: str | None, *, fresh: bool) -> None:
        self._session = session
        self._run = run
        self._turn = turn
        self._fresh = fresh
        self._kept: int | None = None
        self._one_at_a_time = asyncio.Lock()
        self.entries: dict[str, SessionEntry] = {}

    def note(self, entries: Sequence[SessionEntry]) -> None:
        """Take down which calls these entries make."""
        for entry in entries:
            if entry.message is not None:
                self.entries.update(dict.fromkeys([call.id for call in self._session.calls_in(entry.message)], entry))

    async def keep(self, messages: Sequence[ModelMessage], *, fresh: bool = True) -> None:
        """Append what the log does not have yet. At first that is one message, where the run brings one (``fresh``)."""
        async with self._one_at_a_time:
            if self._kept is None:
                self._kept = len(messages) - (fresh and self._fresh)
            if len(messages) < self._kept:
                raise InvalidSetting(
                    f"{self._session!r}: the agent has taken messages out of its history, so that it is not known any "
                    f"more which of them are in the log. Let a history processor work on the request alone, and sum "
                    f"up with session.compact()"
                )
            for message in dumped(messages[self._kept :]):
                turn = self._turn if message["kind"] == "request" else None
                entry = await self._session.append(message, run=self._run, entry_id=turn)
                self._turn = None
                self._kept += 1
                self.note([entry])


def _without_results(messages: list[dict[str, Any]], waiting: frozenset[str]) -> list[dict[str, Any]]:
    """The messages without the words that these calls wait: the agent is to go on with them."""
    out: list[dict[str, Any]] = []
    for message in messages:
        parts = cast("list[dict[str, Any]]", message["parts"])
        if message["kind"] == "request":
            parts = [part for part in parts if part.get("tool_call_id") not in waiting]
        if parts:
            out.append({**message, "parts": parts})
    return out
