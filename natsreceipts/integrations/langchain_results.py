"""What LangChain's tools answer, as a receipt keeps it, and back from it for another id of the call.

A message that is only its content is kept as that content. Any other (with an artifact, say), a `Command` and a list of
both are kept as LangGraph's checkpoints keep them.
"""

# The framework is an extra: its types are not there where it is not installed.
# pyright: reportMissingImports=false, reportUnknownVariableType=false, reportUnknownMemberType=false
# pyright: reportUnknownParameterType=false, reportUnknownArgumentType=false
from __future__ import annotations

import json
from dataclasses import replace
from typing import Any, cast

from langchain_core.messages import ToolMessage
from langgraph.checkpoint.serde.jsonplus import JsonPlusSerializer
from langgraph.types import Command, Send

__all__ = ["plain_result", "text_of", "tool_result"]


def text_of(message: ToolMessage) -> str:
    """Return what a model reads of a message."""
    return message.content if isinstance(message.content, str) else json.dumps(message.content, ensure_ascii=False)


def plain_result(answer: Any, call_id: str | None) -> Any:
    """Return the answer to a call as a receipt keeps it. Raises what LangGraph's serializer raises."""
    if isinstance(answer, ToolMessage):
        bare = ToolMessage(answer.content, name=answer.name, tool_call_id=answer.tool_call_id)
        if answer.model_copy(update={"id": None}) == bare:
            return answer.content
    kind, data = JsonPlusSerializer().dumps_typed(answer)
    return {"answer": type(answer).__name__, "callId": call_id, "type": kind, "data": data}


def tool_result(kept: Any, name: str, call_id: str | None) -> Any:
    """Return the answer that a receipt keeps, for the call of this id."""
    if not isinstance(kept, dict):
        return ToolMessage(kept, name=name, tool_call_id=call_id)
    found = cast("dict[str, Any]", kept)
    answer = JsonPlusSerializer().loads_typed((found["type"], found["data"]))
    return _renamed(answer, found["callId"], call_id)


def _renamed(value: Any, old: str | None, new: str | None) -> Any:
    """The same with the id of a call replaced, wherever a message answers that call."""
    if isinstance(value, ToolMessage):
        return value.model_copy(update={"tool_call_id": new}) if value.tool_call_id == old else value
    if isinstance(value, Command):
        return replace(value, update=_renamed(value.update, old, new), goto=_renamed(value.goto, old, new))
    if isinstance(value, Send):
        return Send(value.node, _renamed(value.arg, old, new))
    if isinstance(value, list | tuple):
        parts = [_renamed(each, old, new) for each in cast("list[Any]", value)]
        return parts if isinstance(value, list) else tuple(parts)
    if isinstance(value, dict):
        fields = {key: _renamed(each, old, new) for key, each in cast("dict[Any, Any]", value).items()}
        return {**fields, "tool_call_id": new} if fields.get("tool_call_id", _NONE) == old else fields
    return value


_NONE = object()
