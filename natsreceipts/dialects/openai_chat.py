"""``openai-chat``: messages of OpenAI's Chat Completions.

"An assistant message with 'tool_calls' must be followed by tool messages responding to each 'tool_call_id'", directly
and before any other role; "messages with role 'tool' must be a response to a preceding message with 'tool_calls'".
A pair is found next to each other, so a later message may use an id again: local models count from 0 in each turn.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

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
    from collections.abc import Sequence

__all__ = ["OpenAIChat"]

_OTHER_ROLES = frozenset({"system", "developer", "user", "function"})


class OpenAIChat(Dialect):
    """The dialect of Chat Completions. A result has no flag for an error there; the text says it."""

    name = "openai-chat"
    marks_errors = False
    ids_recur = True

    def view(self, message: Message) -> MessageView:
        """Read a message."""
        role = a_dict(message, "it").get("role")
        if role == "tool":
            call_id = an_id(message.get("tool_call_id"), "tool_call_id")
            return MessageView((), (Result(call_id, "", own_error_kind(message)),))
        if role != "assistant":
            if isinstance(role, str) and role in _OTHER_ROLES:
                return OTHER
            raise Malformed(f"it has the role {role!r}")
        tool_calls = message.get("tool_calls")
        if not tool_calls:
            return OTHER
        return MessageView(tuple(map(_call, a_list(tool_calls, "tool_calls"))), ())

    def mint(self, call: ToolCall, value: object, *, is_error: bool, error_kind: ErrorKind | None = None) -> Message:
        """Make the message with the result of a call."""
        del is_error
        message: Message = {"role": "tool", "tool_call_id": call.id, "content": text_of(value)}
        if error_kind is not None:
            message[OWN_FIELD] = {"errorKind": error_kind.value}
        return message

    def placed(self, answer: Answer, caller: Message) -> Message:
        """Return the result under its id in the request, our own field taken out."""
        del caller
        piece = without(answer.piece, OWN_FIELD)
        return piece if piece["tool_call_id"] == answer.wire_id else {**piece, "tool_call_id": answer.wire_id}

    def renamed(self, message: Message, ids: Sequence[str]) -> Message:
        """Return a copy of a message with its calls' ids replaced, in order."""
        calls = cast("list[Message]", message["tool_calls"])
        return {**message, "tool_calls": [{**call, "id": new} for call, new in zip(calls, ids, strict=True)]}


def _call(item: object) -> ToolCall:
    call = a_dict(item, "a tool call")
    # Beside {"type": "function", "function": {"name", "arguments"}} there is {"type": "custom", "custom": {"name",
    # "input"}}, whose input is free text: in a tuple it is no object, even where it reads as one.
    custom = call.get("type") == "custom"
    called = a_dict(call.get("custom" if custom else "function"), "the function of a tool call")
    return ToolCall(
        an_id(call.get("id"), "the id of a tool call"),
        an_id(called.get("name"), "the name of a tool call"),
        (called.get("input"),) if custom else called.get("arguments"),
    )
