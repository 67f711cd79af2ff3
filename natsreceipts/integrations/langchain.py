"""Guarded tools for LangChain's agents and LangGraph's ToolNode: a receipt around every call of a tool.

agent = create_agent(model, tools, middleware=[GuardedTools(effects={"search": "read"})])
async with toolkit.run("acme", "order-42"):
    await agent.ainvoke({"messages": [HumanMessage("Tell Ann that order 42 is on its way.")]})
"""

# The framework is an extra: its types are not there where it is not installed.
# pyright: reportMissingImports=false, reportUnknownVariableType=false, reportUnknownMemberType=false
# pyright: reportUnknownParameterType=false, reportUnknownArgumentType=false, reportUntypedBaseClass=false
from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NoReturn, cast

from langchain.agents.middleware import AgentMiddleware
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langgraph.errors import GraphBubbleUp
from langgraph.prebuilt import ToolNode

from natsreceipts.errors import InvalidSetting, NatsReceiptsError
from natsreceipts.integrations.langchain_results import plain_result, text_of, tool_result
from natsreceipts.integrations.langchain_watch import Watch
from natsreceipts.integrations.outcomes import CallFailed, CallRaised, NotCarriedOut, ToolGuard
from natsreceipts.numbering import Came, Made, call_number, distinct_of

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from langgraph.prebuilt.tool_node import ToolCallRequest
    from langgraph.types import Command

    from natsreceipts.decision import Effect
    from natsreceipts.integrations.outcomes import OnUnknown
    from natsreceipts.numbering import Step
    from natsreceipts.run import Run

__all__ = ["EFFECT", "GuardedTools"]

EFFECT = "effect"
"""Where a tool declares its effect in its metadata: ``send.metadata = {"effect": "read"}``."""


class GuardedTools(AgentMiddleware[Any, Any]):
    """Puts a receipt around every call of a tool: a middleware of ``create_agent``, or `tool_node` for a graph.

    ``run``: the run that the calls are made in, by default the ambient one (``async with toolkit.run(…):``).
    ``effects``: effects by tool name, which count before the metadata of a tool; other tools are ``opaque``.
    ``on_unknown``: whether the model is told that nobody knows what became of a call, or the error is raised (see
    `natsreceipts.integrations.outcomes`). ``messages_key``: where in the graph's state the messages are.

    A call is known by its tool and its arguments as the model gave them, and equal calls of one turn are numbered
    (`natsreceipts.numbering`). A replay answers with this call's id. What interrupts the graph from within a tool says
    that the tool has not done anything yet: when the node runs again, so does that tool, and its siblings are replayed.
    Only ``ainvoke`` and ``astream`` are guarded: a synchronous call is refused with InvalidSetting.
    """

    def __init__(
        self,
        run: Run | None = None,
        *,
        effects: Mapping[str, Effect | str] | None = None,
        on_unknown: OnUnknown = "tell",
        messages_key: str = "messages",
    ) -> None:
        super().__init__()
        self.guard = ToolGuard(run, effects=effects, on_unknown=on_unknown, control_flow=(GraphBubbleUp,))
        self._messages_key = messages_key

    def tool_node(self, tools: Sequence[Any], *, handle_tool_errors: Any = None, **settings: Any) -> ToolNode:
        """Return a guarded ToolNode, made with these settings. What has to end the turn is no tool error to it."""
        if handle_tool_errors is not None:
            settings["handle_tool_errors"] = _told if handle_tool_errors is True else handle_tool_errors
        settings.setdefault("messages_key", self._messages_key)
        return ToolNode(tools, wrap_tool_call=self.wrap_tool_call, awrap_tool_call=self.awrap_tool_call, **settings)

    def wrap_tool_call(self, request: ToolCallRequest, handler: Callable[[ToolCallRequest], Any]) -> NoReturn:
        """Refuse a synchronous call. Nothing was executed."""
        del handler
        raise InvalidSetting(
            f"a call of {request.tool_call['name']} cannot be guarded without an event loop, and nothing was executed: "
            f"use ainvoke() or astream()"
        )

    async def awrap_tool_call(
        self, request: ToolCallRequest, handler: Callable[[ToolCallRequest], Awaitable[ToolMessage | Command[Any]]]
    ) -> ToolMessage | Command[Any]:
        """Execute the tool once for this call."""
        call, watch = request.tool_call, Watch(request.tool)
        name, args, call_id = call["name"], call["args"], call["id"]

        async def body() -> Any:
            try:
                answer = await handler(watch.watched(request))
            except GraphBubbleUp:
                raise
            except Exception as error:
                if watch.refused:
                    raise NotCarriedOut(error) from error
                raise
            if not isinstance(answer, ToolMessage) or answer.status != "error":
                return plain_result(answer, call_id)
            text = text_of(answer)
            if watch.invoked and watch.error is None:
                raise CallFailed(text)  # the tool's own word
            told = CallRaised(text, watch.error or RuntimeError(text))
            raise NotCarriedOut(told) if watch.refused else told

        distinct = distinct_of(call_number(self._turn(request.state), name, args, call_id))
        declared = (request.tool.metadata or {}).get(EFFECT) if request.tool is not None else None
        outcome = await self.guard.call(name, args, body, distinct=distinct, declared=declared)
        if outcome.text is not None:
            return ToolMessage(outcome.text, name=name, tool_call_id=call_id, status="error")
        return tool_result(outcome.value, name, call_id)

    def _turn(self, state: Any) -> list[Step]:
        if isinstance(state, Mapping):
            state = cast("Mapping[str, Any]", state).get(self._messages_key)
        messages = state if isinstance(state, list) else getattr(state, self._messages_key, None)
        steps: list[Step] = []
        for message in reversed(cast("list[Any]", messages or [])):
            if isinstance(message, HumanMessage):
                break
            if isinstance(message, AIMessage):
                steps.append([Made(call["id"], call["name"], call["args"]) for call in message.tool_calls])
            elif isinstance(message, ToolMessage) and message.status != "error":
                steps.append(Came(message.tool_call_id))
        return steps[::-1]


def _told(error: Exception) -> str:
    """What a model is told of a tool's error (as ``handle_tool_errors=True`` says it), which none of ours is."""
    if isinstance(error, NatsReceiptsError):
        raise error
    return f"Error: {error!r}\n Please fix your mistakes."
