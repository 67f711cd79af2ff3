"""What a dialect has to say about a message, and what it has to do to one. Pure, and no vendor's package.

A transcript is a list of messages as a vendor's API or a framework writes them, as plain dicts. A dialect reads a
message as a `MessageView` (its calls, its results), mints results in its own shape, and lays out a request in the
order that its API demands. Which result answers which call is the same in all of them: `natsreceipts.transcript`.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from enum import StrEnum
from typing import TYPE_CHECKING, Any, ClassVar, Final, NamedTuple, TypeAlias, cast

from pydantic_core import to_json

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

__all__ = [
    "OTHER",
    "OWN_FIELD",
    "Answer",
    "BlockDialect",
    "Dialect",
    "ErrorKind",
    "Malformed",
    "Message",
    "MessageView",
    "Result",
    "ToolCall",
    "Turns",
    "a_dict",
    "a_list",
    "an_id",
    "error_kind_in",
    "own_error_kind",
    "text_of",
    "without",
]

Message: TypeAlias = dict[str, Any]

OWN_FIELD: Final = "natsreceipts"
"""Where a minted result keeps what only we read (``{"errorKind": …}``); no request ever carries it."""


class ErrorKind(StrEnum):
    """In which of two honest states a close leaves its call; the only two values there are."""

    INTERRUPTED_NEVER_STARTED = "interrupted_never_started"
    INTERRUPTED_OUTCOME_UNKNOWN = "interrupted_outcome_unknown"


class Malformed(ValueError):
    """A message is not what the dialect says, and why; the index is added by whoever walks the list."""


class ToolCall(NamedTuple):
    """A tool call in a message."""

    id: str
    name: str
    raw: object = None
    """The arguments as the message has them: a text of JSON in some dialects, an object in others."""

    @property
    def arguments(self) -> dict[str, Any] | None:
        """The arguments by name. None where they are not that: text that is no JSON object, or free text."""
        value = self.raw
        if value is None or value == "":
            return {}
        if isinstance(value, str):
            try:
                value = json.loads(value)
            except (ValueError, RecursionError):
                return None
        return cast("dict[str, Any]", value) if isinstance(value, dict) else None


class Result(NamedTuple):
    """A tool result in a message. ``name`` is empty where the dialect does not repeat it."""

    id: str
    name: str
    error_kind: ErrorKind | None
    """Set on a close, a result that stands in for one that was never recorded; None on a tool's own."""
    is_error: bool = False
    """Whether it is marked as the result of a call that failed, in a dialect that has a mark for it."""


class MessageView(NamedTuple):
    """The neutral view of one message: what it calls, and what it answers, in order."""

    calls: tuple[ToolCall, ...]
    results: tuple[Result, ...]


OTHER: Final = MessageView((), ())
"""The view of a message that neither calls nor answers."""


class Answer(NamedTuple):
    """What stands after a call in a request: the id that the pair has there, and the piece that answers."""

    wire_id: str
    piece: Message


class Turns(NamedTuple):
    """A transcript with its answers, ready to be laid out."""

    messages: Sequence[Message]
    views: Sequence[MessageView]
    answers: Mapping[int, Sequence[Answer]]
    """By index of the message with the calls: one answer for each of its calls, in their order."""
    renamed: Mapping[int, Sequence[str]]
    """By index of the message with the calls, where ids change: the ids of all its calls, in their order."""


class Dialect(ABC):
    """One shape of messages, in which a result is a message of its own (`BlockDialect`: a piece of one)."""

    name: ClassVar[str]

    marks_errors: ClassVar[bool] = True
    """Whether a result says that its call failed otherwise than in its text."""

    ids_recur: ClassVar[bool] = False
    """Whether a later message may use the id of an earlier call again.

    An API that looks for the call of a result anywhere in the request cannot allow that, nor can a shape that does not
    know which API it will go to.
    """

    @abstractmethod
    def view(self, message: Message) -> MessageView:
        """Read a message. Raises `Malformed`, or whatever a hostile value raises."""

    @abstractmethod
    def mint(self, call: ToolCall, value: object, *, is_error: bool, error_kind: ErrorKind | None = None) -> Message:
        """Make the message with the result of a call: any value, or a text. ``error_kind`` makes it a close."""

    def user_message(self, text: str) -> Message:
        """Make a message in which the user says ``text``."""
        return {"role": "user", "content": text}

    def begins_turn(self, message: Message, before: Message | None) -> bool:
        """Whether a message, which follows ``before``, is the user's own, after which a turn of the model begins."""
        del before
        return message.get("role") == "user" and not self.view(message).results

    def error_kinds(self, message: Message) -> Iterable[ErrorKind | None]:
        """Return the error kind of each result in a message (`Result.error_kind`)."""
        return [result.error_kind for result in self.view(message).results]

    def pieces(self, message: Message) -> list[Message]:
        """Return the results of a message that has any, in order: here, the message."""
        return [message]

    @abstractmethod
    def placed(self, answer: Answer, caller: Message) -> Message:
        """Return the piece as the API takes it after the message ``caller``: its id set, our own field taken out."""

    @abstractmethod
    def renamed(self, message: Message, ids: Sequence[str]) -> Message:
        """Return a copy of a message with its calls' ids replaced, in order."""

    def layout(self, turns: Turns) -> tuple[list[Message], list[int]]:
        """Return the messages of a request, and the indices of messages left out for reasons of the API's own."""
        out: list[Message] = []
        for index, message in enumerate(turns.messages):
            view = turns.views[index]
            if view.calls:
                caller = self.caller(turns, index)
                out.append(caller)
                out.extend(self.placed(answer, caller) for answer in turns.answers[index])
            elif not view.results:
                out.append(message)
        return out, []

    def caller(self, turns: Turns, index: int) -> Message:
        """Return the message with calls at ``index``, under the ids of the request."""
        message = turns.messages[index]
        ids = turns.renamed.get(index)
        return message if ids is None else self.renamed(message, ids)


class BlockDialect(Dialect):
    """A dialect whose results are blocks of the user's next message: all of a turn's in it, and before the rest."""

    blocks_field: ClassVar[str]

    @abstractmethod
    def is_result(self, block: Message) -> bool:
        """Whether a block of a carrier is a result."""

    @abstractmethod
    def carries(self, message: Message) -> bool:
        """Whether a message is of the kind that carries results."""

    @abstractmethod
    def empty_carrier(self) -> Message:
        """A new message of that kind, without blocks."""

    def blocks(self, message: Message) -> list[Message]:
        """Return the blocks of a message."""
        return cast("list[Message]", message[self.blocks_field])

    def pieces(self, message: Message) -> list[Message]:
        """Return the results of a message, in order."""
        return [block for block in self.blocks(message) if self.is_result(block)]

    def layout(self, turns: Turns) -> tuple[list[Message], list[int]]:
        """Return the messages of a request, and nothing left out."""
        out: list[Message] = []
        joined = -1
        last = len(turns.messages) - 1
        for index, message in enumerate(turns.messages):
            view = turns.views[index]
            if view.calls:
                caller = self.caller(turns, index)
                placed = [self.placed(answer, caller) for answer in turns.answers[index]]
                # The message that follows is the one that the API takes the results from. Where it is the user's, they
                # go into it, so that no second message of the user's comes to stand behind the first.
                follows = turns.messages[index + 1] if index < last else None
                if follows is not None and self.carries(follows):
                    joined = index + 1
                else:
                    follows = None
                out += (caller, self._carrier(placed, follows))
            elif index != joined:
                if not view.results:
                    out.append(message)
                elif rest := self._rest(message):
                    out.append({**message, self.blocks_field: rest})
        return out, []

    def _rest(self, message: Message) -> list[Message]:
        return [block for block in self.blocks(message) if not self.is_result(block)]

    def _carrier(self, placed: list[Message], follows: Message | None) -> Message:
        if follows is None:
            return {**self.empty_carrier(), self.blocks_field: placed}
        blocks = placed + self._rest(follows)
        before = self.blocks(follows)
        if len(blocks) == len(before) and all(new is old for new, old in zip(blocks, before, strict=True)):
            return follows
        return {**follows, self.blocks_field: blocks}


# ---------------------------------------------------------------- reading values that may be anything


def a_dict(value: object, what: str) -> Message:
    """Return ``value``, which is a dict. Raises `Malformed` for anything else."""
    if isinstance(value, dict):
        return cast("Message", value)
    raise Malformed(f"{what} is a {type(value).__name__}, not a dict")


def a_list(value: object, what: str) -> list[Any]:
    """Return ``value``, which is a list. Raises `Malformed` for anything else."""
    if isinstance(value, list):
        return cast("list[Any]", value)
    raise Malformed(f"{what} is a {type(value).__name__}, not a list")


def an_id(value: object, what: str) -> str:
    """Return ``value``, which is exactly a str (ids are compared and hashed). Raises `Malformed` for anything else."""
    if type(value) is str:
        return value
    raise Malformed(f"{what} is a {type(value).__name__}, not a string")


def error_kind_in(holder: object) -> ErrorKind | None:
    """Return the error kind in the field ``errorKind`` of ``holder``, or None where there is none."""
    if not isinstance(holder, dict):
        return None
    kind = cast("Message", holder).get("errorKind")
    return _ERROR_KINDS.get(kind) if type(kind) is str else None


_ERROR_KINDS: Final[dict[str, ErrorKind]] = {kind.value: kind for kind in ErrorKind}


def own_error_kind(holder: object) -> ErrorKind | None:
    """Return the error kind in our own field of ``holder``, or None where there is none."""
    return error_kind_in(cast("Message", holder).get(OWN_FIELD)) if isinstance(holder, dict) else None


def without(message: Message, *names: str) -> Message:
    """Return the message, or a copy of it without the fields ``names`` where it has any."""
    if any(name in message for name in names):
        return {name: value for name, value in message.items() if name not in names}
    return message


def text_of(value: object) -> str:
    """Return a result as the text that a model reads: a str as it is, everything else as JSON.

    Bytes become base64, a datetime its ISO form, a non-finite float a string; what has no JSON at all, its repr. A lone
    surrogate, which no request could carry, becomes its escape.
    """
    if isinstance(value, str):
        return value.encode(errors="backslashreplace").decode()
    try:
        return to_json(value, bytes_mode="base64", inf_nan_mode="strings", serialize_unknown=True).decode()
    except ValueError:
        return repr(value)
