"""``openai-responses``: input and output items of OpenAI's Responses, one item a message.

Items pair by ``call_id``, wherever in the input the later one is, and both directions are checked: "No tool output
found for function call …", "No tool call found for function call output with call_id …". So an id is used once. "Item
… of type 'reasoning' was provided without its required following item": a reasoning item stays in front of what the
model said next, and one that the model was cut off after cannot be sent at all.

Calls are ``function_call`` and ``custom_tool_call``, whose outputs are texts. Hosted tools answer themselves, and calls
whose output is something else (a screenshot, a shell's streams) are passed on as they are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

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
    Turns,
    a_dict,
    an_id,
    own_error_kind,
    text_of,
    without,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["OpenAIResponses"]

_CALLS = frozenset({"function_call", "custom_tool_call"})
_OUTPUTS = frozenset({"function_call_output", "custom_tool_call_output"})
_ROLES = frozenset({"user", "system", "developer", "assistant"})


class OpenAIResponses(Dialect):
    """The dialect of Responses. A close has the status ``incomplete``."""

    name = "openai-responses"
    marks_errors = False

    def view(self, message: Message) -> MessageView:
        """Read an item."""
        kind = a_dict(message, "it").get("type")
        if kind is None:
            role = message.get("role")
            if isinstance(role, str) and role in _ROLES:
                return OTHER
            raise Malformed(f"it has neither a type nor a role of {', '.join(sorted(_ROLES))}")
        if not isinstance(kind, str):
            raise Malformed(f"its type is a {type(kind).__name__}, not a string")
        if kind in _CALLS:
            # A custom tool's input is free text: in a tuple it is no object, even where it reads as one.
            raw = message.get("arguments") if kind == "function_call" else (message.get("input"),)
            name = an_id(message.get("name"), "the name of the call")
            return MessageView((ToolCall(an_id(message.get("call_id"), "call_id"), name, raw),), ())
        if kind in _OUTPUTS:
            return MessageView((), (Result(an_id(message.get("call_id"), "call_id"), "", own_error_kind(message)),))
        return OTHER

    def mint(self, call: ToolCall, value: object, *, is_error: bool, error_kind: ErrorKind | None = None) -> Message:
        """Make the item with the result of a call."""
        del is_error
        item: Message = {"type": "function_call_output", "call_id": call.id, "output": text_of(value)}
        if error_kind is not None:
            item["status"] = "incomplete"
            item[OWN_FIELD] = {"errorKind": error_kind.value}
        return item

    def placed(self, answer: Answer, caller: Message) -> Message:
        """Return the output under its id in the request, as the output of the kind of call that it answers."""
        piece = without(answer.piece, OWN_FIELD)
        kind = f"{caller['type']}_output"
        if piece["type"] != kind:
            # Only a function call's output has a status.
            piece = {**without(piece, "status"), "type": kind}
        return piece if piece["call_id"] == answer.wire_id else {**piece, "call_id": answer.wire_id}

    def renamed(self, message: Message, ids: Sequence[str]) -> Message:
        """Return a copy of a call under another id."""
        return {**message, "call_id": ids[0]}

    def layout(self, turns: Turns) -> tuple[list[Message], list[int]]:
        """Return the items of a request, and the indices of reasoning items that nothing follows.

        Calls that stand together are one turn's: their outputs come after the last of them, so that calls that the
        model made in parallel stay parallel.
        """
        out: list[tuple[int, Message]] = []
        outputs: list[tuple[int, Message]] = []
        after = 0

        def close_turn() -> None:
            out[after:after] = outputs
            outputs.clear()

        for index, item in enumerate(turns.messages):
            if turns.views[index].calls:
                caller = self.caller(turns, index)
                out.append((index, caller))
                outputs.extend((-1, self.placed(answer, caller)) for answer in turns.answers[index])
                after = len(out)
            elif turns.views[index].results:
                close_turn()
            elif item.get("type") == "reasoning":
                # It may stand between two calls of one turn, or begin the next: where the outputs go is not it.
                out.append((index, item))
            else:
                close_turn()
                out.append((index, item))
        close_turn()
        return _without_loose_reasoning(out)


def _without_loose_reasoning(items: list[tuple[int, Message]]) -> tuple[list[Message], list[int]]:
    kept: list[Message] = []
    loose: list[int] = []
    said_next = False
    for index, item in reversed(items):
        if item.get("type") != "reasoning":
            said_next = _by_the_model(item)
        elif not said_next:
            loose.append(index)
            continue
        kept.append(item)
    return kept[::-1], loose[::-1]


def _by_the_model(item: Message) -> bool:
    kind = item.get("type")
    if kind is None or kind == "message":
        return item.get("role") == "assistant"
    return not kind.endswith(("_output", "_response"))
