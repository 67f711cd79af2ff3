"""``neutral``: calls are blocks of an assistant message, a result is a message of the role ``toolResult``.

Which API it will go to is not known, so a request in it is one that the strictest can be made from.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from natsreceipts.dialects.base import (
    OTHER,
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
    error_kind_in,
    text_of,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Neutral"]

_OTHER_ROLES = frozenset({"user", "system", "developer"})


class Neutral(Dialect):
    """The neutral dialect; ``details.errorKind`` marks a close."""

    name = "neutral"

    def view(self, message: Message) -> MessageView:
        """Read a message."""
        role = a_dict(message, "it").get("role")
        if role == "toolResult":
            tool = message.get("toolName")
            name = tool if type(tool) is str else ""
            call_id = an_id(message.get("toolCallId"), "toolCallId")
            is_error = message.get("isError") is True
            return MessageView((), (Result(call_id, name, error_kind_in(message.get("details")), is_error),))
        if role != "assistant":
            if isinstance(role, str) and role in _OTHER_ROLES:
                _refuse_foreign_blocks(message.get("content"))
                return OTHER
            raise Malformed(f"it has the role {role!r}")
        # What is of another dialect must not pass here: its calls would not be seen.
        for field in ("tool_calls", "function_call"):
            if message.get(field):
                raise Malformed(f"it has {field}, as messages of openai-chat or langchain have")
        content = message.get("content")
        if content is None or isinstance(content, str):
            return OTHER
        _refuse_foreign_blocks(content)
        calls = tuple(
            ToolCall(
                an_id(block.get("id"), "the id of a toolCall"),
                an_id(block.get("name"), "the name of a toolCall"),
                block.get("arguments"),
            )
            for item in a_list(content, "content")
            if (block := a_dict(item, "a block of its content")).get("type") == "toolCall"
        )
        return MessageView(calls, ()) if calls else OTHER

    def error_kinds(self, message: Message) -> list[ErrorKind | None]:
        """Return the error kind of a result: all that it takes is in its details, which are a tool's own otherwise."""
        return [error_kind_in(a_dict(message, "it").get("details"))]

    def mint(self, call: ToolCall, value: object, *, is_error: bool, error_kind: ErrorKind | None = None) -> Message:
        """Make the message with the result of a call."""
        message: Message = {
            "role": "toolResult",
            "toolCallId": call.id,
            "toolName": call.name,
            "content": [{"type": "text", "text": text_of(value)}],
            "isError": is_error,
        }
        if error_kind is not None:
            message["details"] = {"errorKind": error_kind.value}
        return message

    def placed(self, answer: Answer, caller: Message) -> Message:
        """Return the result under its id in the request; a close without what marks it."""
        del caller
        piece = answer.piece
        if error_kind_in(piece.get("details")) is not None:
            details: Message = {name: value for name, value in piece["details"].items() if name != "errorKind"}
            piece = {name: value for name, value in piece.items() if name != "details"}
            if details:
                piece["details"] = details
        return piece if piece["toolCallId"] == answer.wire_id else {**piece, "toolCallId": answer.wire_id}

    def renamed(self, message: Message, ids: Sequence[str]) -> Message:
        """Return a copy of a message with its calls' ids replaced, in order."""
        new = iter(ids)
        blocks = [
            {**block, "id": next(new)} if block.get("type") == "toolCall" else block
            for block in cast("list[Message]", message["content"])
        ]
        return {**message, "content": blocks}


def _refuse_foreign_blocks(content: object) -> None:
    if isinstance(content, list):
        for block in cast("list[object]", content):
            if isinstance(block, dict) and cast("Message", block).get("type") in ("tool_use", "tool_result"):
                raise Malformed(f"it has a block {cast('Message', block)['type']}, as messages of anthropic have")
