"""``langchain``: what ``messages_to_dict`` gives, ``{"type": …, "data": {…}}``; also ``message.model_dump()``.

Calls are ``tool_calls`` and, of text that was not JSON, ``invalid_tool_calls``: both are sent to the model's API, so
both need their ``ToolMessage``. LangGraph asks that every call has one ("Every tool call […] in the message history
MUST have a corresponding ToolMessage"); the API behind it asks that they follow directly, and under ids of their own.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any, cast

from natsreceipts.dialects.base import (
    OTHER,
    OWN_FIELD,
    Answer,
    Dialect,
    ErrorKind,
    Malformed,
    Message,
    MessageView,
    Result,
    ToolCall,
    a_dict,
    a_list,
    an_id,
    own_error_kind,
    text_of,
    without,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["LangChain"]

_AI = frozenset({"ai", "assistant", "AIMessageChunk"})
_TOOL = frozenset({"tool", "ToolMessageChunk"})
_OTHER = frozenset({
    "human", "user", "system", "developer", "function", "chat", "remove",
    "HumanMessageChunk", "SystemMessageChunk", "FunctionMessageChunk", "ChatMessageChunk",
})  # fmt: skip
_USERS = frozenset({"human", "user", "HumanMessageChunk"})
_CALL_BLOCKS = frozenset({"tool_use", "tool_call", "invalid_tool_call"})


class LangChain(Dialect):
    """The dialect of LangChain; a failed result and a close have the status ``error``."""

    name = "langchain"

    def view(self, message: Message) -> MessageView:
        """Read a message."""
        kind = a_dict(message, "it").get("type", message.get("role"))
        if not isinstance(kind, str):
            raise Malformed("it has no type")
        if kind in _AI:
            calls = tuple(map(_call, _calls(_data(message))))
            return MessageView(calls, ()) if calls else OTHER
        if kind in _TOOL:
            data = _data(message)
            name = data.get("name")
            call_id = an_id(data.get("tool_call_id"), "tool_call_id")
            kind_of_error, failed = own_error_kind(data.get("artifact")), data.get("status") == "error"
            result = Result(call_id, name if type(name) is str else "", kind_of_error, failed)
            return MessageView((), (result,))
        if kind not in _OTHER:
            raise Malformed(f"it has the type {kind!r}")
        return OTHER

    def mint(self, call: ToolCall, value: object, *, is_error: bool, error_kind: ErrorKind | None = None) -> Message:
        """Make the message with the result of a call."""
        data: Message = {
            "content": text_of(value),
            "type": "tool",
            "name": call.name,
            "tool_call_id": call.id,
            "status": "error" if is_error else "success",
        }
        if error_kind is not None:
            # What is in the artifact is never sent to a model.
            data["artifact"] = {OWN_FIELD: {"errorKind": error_kind.value}}
        return {"type": "tool", "data": data}

    def user_message(self, text: str) -> Message:
        """Make a message in which the user says ``text``."""
        return {"type": "human", "data": {"content": text, "type": "human"}}

    def begins_turn(self, message: Message, before: Message | None) -> bool:
        """Whether a message is the user's own."""
        del before
        return message.get("type", message.get("role")) in _USERS

    def placed(self, answer: Answer, caller: Message) -> Message:
        """Return the result under its id in the request, in the form of its caller, our own field taken out."""
        piece = answer.piece
        data = _data(piece)
        artifact = data.get("artifact")
        if isinstance(artifact, dict) and OWN_FIELD in artifact:
            kept: Message = without(artifact, OWN_FIELD)  # pyright: ignore[reportUnknownArgumentType]
            data = {**data, "artifact": kept} if kept else without(data, "artifact")
        if data["tool_call_id"] != answer.wire_id:
            data = {**data, "tool_call_id": answer.wire_id}
        if "data" not in caller:
            return {**data, "type": "tool"} if "data" in piece else data
        if "data" in piece:
            return piece if data is piece["data"] else {**piece, "data": data}
        return {"type": "tool", "data": without(data, "role")}

    def renamed(self, message: Message, ids: Sequence[str]) -> Message:
        """Return a copy of a message with its calls' ids replaced, in order, wherever it repeats them."""
        data = dict(_data(message))
        olds = [_call(call).id for call in _calls(data)]

        def renamer() -> Callable[[object], object]:
            new: defaultdict[object, list[str]] = defaultdict(list)
            for old, wire_id in zip(olds, ids, strict=True):
                new[old].append(wire_id)

            def rename(old: object) -> object:
                if type(old) is not str or old not in new:
                    return old
                # In order; what mentions an id more often than it is called means its last call.
                return new[old].pop(0) if len(new[old]) > 1 else new[old][0]

            return rename

        listed = renamer()
        for field in ("tool_calls", "invalid_tool_calls"):
            if data.get(field):
                data[field] = [{**call, "id": listed(call["id"])} for call in data[field]]
        extra = data.get("additional_kwargs")
        if isinstance(extra, dict) and isinstance(raw := cast("Message", extra).get("tool_calls"), list):
            again = renamer()
            data["additional_kwargs"] = {
                **extra,
                "tool_calls": [_with(call, "id", again) for call in cast("list[Any]", raw)],
            }
        if isinstance(data.get("content"), list):
            in_text = renamer()
            data["content"] = [_block(block, in_text) for block in data["content"]]
        return {**message, "data": data} if "data" in message else data


def _data(message: Message) -> Message:
    return a_dict(message["data"], "data") if "data" in message else message


def _calls(data: Message) -> list[Any]:
    calls = a_list(data.get("tool_calls") or [], "tool_calls")
    calls = calls + a_list(data.get("invalid_tool_calls") or [], "invalid_tool_calls")
    if calls:
        return calls
    # A message from before there were tool_calls: its constructor reads them from here.
    extra = data.get("additional_kwargs")
    return a_list(a_dict(extra, "additional_kwargs").get("tool_calls") or [], "additional_kwargs") if extra else []


def _call(item: object) -> ToolCall:
    call = a_dict(item, "a tool call")
    name, arguments = call.get("name"), call.get("args")
    if name is None and "function" in call:
        function = a_dict(call["function"], "the function of a tool call")
        name, arguments = function.get("name"), function.get("arguments")
    # The text of an invalid call may not even have had a name.
    return ToolCall(an_id(call.get("id"), "the id of a tool call"), name if type(name) is str else "", arguments)


def _with(item: object, field: str, rename: Callable[[object], object]) -> object:
    fields = _fields(item)
    return {**fields, field: rename(fields[field])} if field in fields else item


def _block(block: object, rename: Callable[[object], object]) -> object:
    kind = _fields(block).get("type")
    if kind == "function_call":
        return _with(block, "call_id", rename)
    return _with(block, "id", rename) if type(kind) is str and kind in _CALL_BLOCKS else block


def _fields(value: object) -> Message:
    return cast("Message", value) if isinstance(value, dict) else {}
