"""``pydantic-ai``: what ``ModelMessagesTypeAdapter.dump_python(messages, mode="json")`` gives.

Calls are ``tool-call`` parts of a response; results are ``tool-return`` parts of a request, and ``retry-prompt`` parts
that name a tool (one without is feedback on the response as a whole). Its own repair closes what has no result, drops
what has no call, and puts a turn's results at the head of the next request, by ``tool_call_id``; which API the request
goes to is not known, so an id is used once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic_core import from_json, to_json

from natsreceipts.dialects.base import (
    OTHER,
    OWN_FIELD,
    Answer,
    BlockDialect,
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

__all__ = ["PydanticAI"]


class PydanticAI(BlockDialect):
    """The dialect of pydantic-ai; a close has the outcome ``interrupted``, a failed result ``failed``."""

    name = "pydantic-ai"
    blocks_field = "parts"

    def view(self, message: Message) -> MessageView:
        """Read a message."""
        kind = a_dict(message, "it").get("kind")
        if kind not in ("request", "response"):
            raise Malformed(f"it has the kind {kind!r}")
        calls: list[ToolCall] = []
        results: list[Result] = []
        for item in a_list(message.get("parts"), "parts"):
            part = a_dict(item, "a part")
            if part.get("part_kind") == "tool-call":
                name = an_id(part.get("tool_name"), "the tool_name of a call")
                call_id = an_id(part.get("tool_call_id"), "the tool_call_id of a call")
                calls.append(ToolCall(call_id, name, part.get("args")))
            elif self.is_result(part):
                name = an_id(part.get("tool_name"), "the tool_name of a result")
                call_id = an_id(part.get("tool_call_id"), "the tool_call_id of a result")
                failed = part["part_kind"] != "tool-return" or part.get("outcome", "success") != "success"
                results.append(Result(call_id, name, own_error_kind(part.get("metadata")), failed))
        if calls and kind != "response":
            raise Malformed("a tool-call in a request")
        if results and kind != "request":
            raise Malformed("a result in a response")
        return MessageView(tuple(calls), tuple(results)) if calls or results else OTHER

    def mint(self, call: ToolCall, value: object, *, is_error: bool, error_kind: ErrorKind | None = None) -> Message:
        """Make a request with the result of a call; a value stays a value there, as far as JSON holds it."""
        part: Message = {
            "part_kind": "tool-return",
            "tool_name": call.name,
            "tool_call_id": call.id,
            "content": _plain(value),
        }
        if error_kind is not None:
            part |= {"outcome": "interrupted", "metadata": {OWN_FIELD: {"errorKind": error_kind.value}}}
        elif is_error:
            part["outcome"] = "failed"
        return {**self.empty_carrier(), "parts": [part]}

    def user_message(self, text: str) -> Message:
        """Make a request in which the user says ``text``."""
        return {**self.empty_carrier(), "parts": [{"part_kind": "user-prompt", "content": text}]}

    def begins_turn(self, message: Message, before: Message | None) -> bool:
        """Whether a message is a request with what the user says, and not with what a tool adds to its result.

        Requests that follow each other are merged there: what is said behind results stands with them.
        """
        if message.get("kind") != "request" or self.view(message).results:
            return False
        said = any(part.get("part_kind") == "user-prompt" for part in self.blocks(message))
        return said and (before is None or not self.view(before).results)

    def placed(self, answer: Answer, caller: Message) -> Message:
        """Return the part under its id in the request, our own field taken out."""
        del caller
        part = answer.piece
        metadata = part.get("metadata")
        if isinstance(metadata, dict) and OWN_FIELD in metadata:
            kept: Message = without(metadata, OWN_FIELD)  # pyright: ignore[reportUnknownArgumentType]
            part = {**part, "metadata": kept} if kept else without(part, "metadata")
        return part if part["tool_call_id"] == answer.wire_id else {**part, "tool_call_id": answer.wire_id}

    def renamed(self, message: Message, ids: Sequence[str]) -> Message:
        """Return a copy of a response with its calls' ids replaced, in order."""
        new = iter(ids)
        parts = [
            {**part, "tool_call_id": next(new)} if part.get("part_kind") == "tool-call" else part
            for part in self.blocks(message)
        ]
        return {**message, "parts": parts}

    def is_result(self, block: Message) -> bool:
        """Whether a part is a result."""
        kind = block.get("part_kind")
        return kind == "tool-return" or (kind == "retry-prompt" and block.get("tool_name") is not None)

    def carries(self, message: Message) -> bool:
        """Whether a message is a request."""
        return message.get("kind") == "request"

    def empty_carrier(self) -> Message:
        """A new request."""
        return {"kind": "request"}


def _plain(value: object) -> Any:
    if isinstance(value, str):
        return text_of(value)
    try:
        text = to_json(value, bytes_mode="base64", inf_nan_mode="strings", serialize_unknown=True)
    except ValueError:
        return text_of(value)
    return from_json(text)
