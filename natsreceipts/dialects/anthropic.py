"""``anthropic``: messages of Anthropic's Messages API.

"`tool_use` ids were found without `tool_result` blocks immediately after […]. Each `tool_use` block must have a
corresponding `tool_result` block in the next message": all of them in one user message, before any text in it. "Each
`tool_result` block must have a corresponding `tool_use` block in the previous message", "each tool_use must have a
single result", and "`tool_use` ids must be unique" in the whole request.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

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

__all__ = ["Anthropic"]


class Anthropic(BlockDialect):
    """The dialect of the Messages API; ``is_error`` marks a failed result, and a close."""

    name = "anthropic"
    blocks_field = "content"

    def view(self, message: Message) -> MessageView:
        """Read a message."""
        role = a_dict(message, "it").get("role")
        if role not in ("user", "assistant", "system"):
            raise Malformed(f"it has the role {role!r}")
        content = message.get("content")
        if isinstance(content, str):
            return OTHER
        calls: list[ToolCall] = []
        results: list[Result] = []
        for item in a_list(content, "content"):
            block = a_dict(item, "a block of its content")
            kind = block.get("type")
            if kind == "tool_use":
                name = an_id(block.get("name"), "the name of a tool_use")
                calls.append(ToolCall(an_id(block.get("id"), "the id of a tool_use"), name, block.get("input")))
            elif kind == "tool_result":
                call_id = an_id(block.get("tool_use_id"), "the tool_use_id of a tool_result")
                results.append(Result(call_id, "", own_error_kind(block), block.get("is_error") is True))
        if calls and role != "assistant":
            raise Malformed(f"a tool_use in a message of the {role}")
        if results and role != "user":
            raise Malformed(f"a tool_result in a message of the {role}")
        return MessageView(tuple(calls), tuple(results)) if calls or results else OTHER

    def mint(self, call: ToolCall, value: object, *, is_error: bool, error_kind: ErrorKind | None = None) -> Message:
        """Make a message with the result of a call."""
        block: Message = {"type": "tool_result", "tool_use_id": call.id, "content": text_of(value)}
        if is_error:
            block["is_error"] = True
        if error_kind is not None:
            block[OWN_FIELD] = {"errorKind": error_kind.value}
        return {"role": "user", "content": [block]}

    def placed(self, answer: Answer, caller: Message) -> Message:
        """Return the block under its id in the request, our own field taken out."""
        del caller
        block = without(answer.piece, OWN_FIELD)
        return block if block["tool_use_id"] == answer.wire_id else {**block, "tool_use_id": answer.wire_id}

    def renamed(self, message: Message, ids: Sequence[str]) -> Message:
        """Return a copy of a message with its calls' ids replaced, in order."""
        new = iter(ids)
        blocks = [
            {**block, "id": next(new)} if block.get("type") == "tool_use" else block for block in self.blocks(message)
        ]
        return {**message, "content": blocks}

    def blocks(self, message: Message) -> list[Message]:
        """Return the blocks of a message; a text is one block, and an empty one is none (the API refuses those)."""
        content = message["content"]
        if isinstance(content, str):
            return [{"type": "text", "text": content}] if content else []
        return cast("list[Message]", content)

    def is_result(self, block: Message) -> bool:
        """Whether a block is a result."""
        return block.get("type") == "tool_result"

    def carries(self, message: Message) -> bool:
        """Whether a message is the user's."""
        return message.get("role") == "user"

    def empty_carrier(self) -> Message:
        """A new message of the user's."""
        return {"role": "user"}
