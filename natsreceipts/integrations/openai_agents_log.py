"""What a session log says of turns of the OpenAI Agents SDK. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, cast

from natsreceipts.dialects.base import OWN_FIELD
from natsreceipts.numbering import Came, Made, Step
from natsreceipts.transcript import tool_calls_of, view_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from natsreceipts.entries import SessionEntry

__all__ = ["DIALECT", "GUARDED", "OWN", "Item", "answer_in", "calls_in", "same", "turn_of"]

DIALECT: Final = "openai-responses"

OWN: Final = "own"
"""In our own field of a result: it is the tool's own, and not what the model was told in its stead."""

GUARDED: Final = "guarded_by_natsreceipts"
"""An attribute of a tool whose calls leave receipts: the effect that was named for it, or None."""

Item = dict[str, Any]


def calls_in(item: Item) -> list[Made]:
    """The calls of an item, by the arguments that identify them."""
    return [
        Made(call.id, call.name, call.raw if call.arguments is None else call.arguments)
        for call in tool_calls_of(item, dialect=DIALECT)
    ]


def answer_in(item: Item) -> str | None:
    """The text of an answer of the model's; None for any other item."""
    if item.get("role") != "assistant" or item.get("type", "message") != "message":
        return None
    content = item.get("content")
    if isinstance(content, str):
        return content
    parts = cast("list[Item]", content if isinstance(content, list) else [])
    return "".join(str(part.get("text") or part.get("refusal") or "") for part in parts)


def turn_of(entries: Iterable[SessionEntry], call_id: str) -> list[Step]:
    """What stands in the log of the turn with the latest call of this id, as far as it was read."""
    found: list[Step] = []
    turn: list[Step] = []
    answer: list[Made] | None = None
    for entry in entries:
        message = entry.message
        if message is None:
            continue
        if message.get("role") == "user":
            turn, answer = [], None
        calls, results = calls_in(message), view_of(message, dialect=DIALECT).results
        if calls:
            if answer is None:
                answer = []
                turn.append(answer)
            answer += calls
            found = turn if any(call.call_id == call_id for call in calls) else found
        for result in results:
            answer = None
            if _is_own(entry):
                turn.append(Came(result.id))
    return found


def _is_own(entry: SessionEntry) -> bool:
    """Whether a result is the tool's own: its worker said so, or it is what a receipt has."""
    mark: object = entry.body.get(OWN_FIELD)
    if isinstance(mark, dict) and cast("Item", mark).get(OWN) is True:
        return True
    return entry.close is None and entry.receipt is not None and entry.receipt.status == "completed"


def same(one: Item, other: Item) -> bool:
    """Whether two are one item: the SDK adds and takes ids and states."""
    if one.get("type") == "function_call" == other.get("type"):
        return one.get("call_id") == other.get("call_id")
    plain = [{name: part for name, part in item.items() if name not in ("id", "status")} for item in (one, other)]
    return plain[0] == plain[1]
