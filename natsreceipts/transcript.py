"""Calls without results, results without calls: found, closed, and laid out for a chat API. Pure.

Matching is one ordered walk. Each call is a site of its id; a result answers its id's latest site before it, so that
a reused id opens anew. The first real result answers, whatever closes there are; without one, the first close does.

=============================  ==========================================================================
found                          what it is
=============================  ==========================================================================
a call without an answer       an orphan; an append can close it where it is the last site of its id
a result before any such call  an orphan of the kind ``result``; nothing that is appended can help it
a close beside a real result   void, whichever came first
a second real result or close  left out of a request; not an orphan
a suspended id's last site     not an orphan: it waits for a person
=============================  ==========================================================================

Messages are plain dicts in one of the `natsreceipts.dialects`. Nothing here changes a message that it was given.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal, cast

from natsreceipts.closes import CloseReason, InterruptedResult, interrupted_results
from natsreceipts.dialects import DIALECTS, dialect_named
from natsreceipts.dialects.base import (
    Answer,
    ErrorKind,
    Malformed,
    Message,
    MessageView,
    ToolCall,
    Turns,
)
from natsreceipts.errors import InvalidTranscript

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    from natsreceipts.dialects.base import Dialect

__all__ = [
    "INTERRUPTED_BY_USER_FOR_TOOL_USE_MARKER",
    "INTERRUPTED_BY_USER_MARKER",
    "CloseReason",
    "ErrorKind",
    "InterruptedResult",
    "LeftOut",
    "OrphanToolCall",
    "RenamedCall",
    "RequestView",
    "closable_by_append",
    "find_orphan_tool_calls",
    "interrupted_result_message",
    "interrupted_results",
    "interruption_marker_message",
    "is_interrupted_close",
    "request_view",
    "tool_calls_of",
    "tool_result_message",
    "view_of",
]

INTERRUPTED_BY_USER_MARKER: Final = "[Request interrupted by user]"
"""The text of the user message that says that a person stopped the run."""

INTERRUPTED_BY_USER_FOR_TOOL_USE_MARKER: Final = "[Request interrupted by user for tool use]"
"""The same, where tool calls were in flight."""

_LONGEST_ID: Final = 40
"""Characters of the longest id of a call that every API takes."""


@dataclass(frozen=True, slots=True)
class OrphanToolCall:
    """One half of a pair whose other half is missing.

    ``message_index`` counts from 0 in the list that was given. A result does not say which tool it is of in every
    dialect: ``tool_name`` is empty then.
    """

    tool_call_id: str
    tool_name: str
    kind: Literal["result"] | None
    """``result`` for a result of no call; None for a call without a result."""
    message_index: int


@dataclass(frozen=True, slots=True)
class LeftOut:
    """What a request does not carry, and why. Indices count from 0 in the list that was given."""

    reason: Literal["orphan_result", "duplicate_result", "void_close", "loose_reasoning"]
    tool_call_id: str | None
    """None for a reasoning item that nothing follows."""
    message_index: int


@dataclass(frozen=True, slots=True)
class RenamedCall:
    """A call whose id was used before in the request, and the id that the pair has there instead."""

    tool_call_id: str
    wire_id: str
    message_index: int


@dataclass(frozen=True, slots=True)
class RequestView:
    """What to send to a chat API, and how it differs from the transcript. Nothing of it is to be written back."""

    messages: list[Message]
    """In the dialect of the transcript. What did not change is the same object as there."""
    closed: tuple[InterruptedResult, ...]
    """Calls without a result, closed in this request only."""
    suspended: tuple[OrphanToolCall, ...]
    """Calls that wait for a person, with a word to that effect in this request only."""
    left_out: tuple[LeftOut, ...]
    renamed: tuple[RenamedCall, ...]


# ---------------------------------------------------------------- the walk


@dataclass(slots=True)
class _Site:
    """One place where an id is called, and where its results are: (message, position in it)."""

    message_index: int
    call: ToolCall
    real: tuple[int, int] | None = None
    close: tuple[int, int] | None = None

    @property
    def unanswered(self) -> bool:
        """Whether there is neither a result nor a close."""
        return self.real is None and self.close is None


@dataclass(slots=True)
class _Walk:
    """Everything that one walk through a transcript finds, in its order."""

    sites: list[_Site]
    last: dict[str, _Site]
    """The last site of each id."""
    orphans: list[OrphanToolCall]
    """The results of no call."""
    unused: list[LeftOut]
    """The results that are neither answers nor orphans."""

    def open_calls(self, suspended: frozenset[str]) -> Iterator[_Site]:
        """The calls without a result that are not suspended. Suspending holds the last site of an id."""
        for site in self.sites:
            if site.unanswered and not self.holds(site, suspended):
                yield site

    def holds(self, site: _Site, suspended: frozenset[str]) -> bool:
        """Whether a site is one that waits for a person."""
        return site.call.id in suspended and self.last[site.call.id] is site


def _view(message: object, index: int, dialect: Dialect) -> MessageView:
    if not isinstance(message, dict):
        raise InvalidTranscript(dialect.name, index, f"it is a {type(message).__name__}, not a dict")
    try:
        return dialect.view(cast("Message", message))
    except Malformed as error:
        raise InvalidTranscript(dialect.name, index, str(error)) from error
    except Exception as error:
        raise InvalidTranscript(dialect.name, index, f"reading it raised {type(error).__name__}") from error


def _walk(messages: Sequence[Message], dialect: Dialect, views: list[MessageView] | None = None) -> _Walk:
    """Walk through a transcript once. ``views`` takes the messages' views, for who needs them afterwards."""
    walk = _Walk([], {}, [], [])
    last = walk.last
    for index, message in enumerate(messages):
        view = _view(message, index, dialect)
        if views is not None:
            views.append(view)
        for call in view.calls:
            site = last[call.id] = _Site(index, call)
            walk.sites.append(site)
        for position, result in enumerate(view.results):
            site = last.get(result.id)
            if site is None:
                walk.orphans.append(OrphanToolCall(result.id, result.name, "result", index))
            elif result.error_kind is not None:
                if site.unanswered:
                    site.close = (index, position)
                else:
                    walk.unused.append(LeftOut("void_close", result.id, index))
            elif site.real is None:
                if site.close is not None:
                    walk.unused.append(LeftOut("void_close", result.id, site.close[0]))
                site.real = (index, position)
            else:
                walk.unused.append(LeftOut("duplicate_result", result.id, index))
    return walk


def _orphan(site: _Site) -> OrphanToolCall:
    return OrphanToolCall(site.call.id, site.call.name, None, site.message_index)


def _by_index(found: OrphanToolCall | LeftOut) -> int:
    return found.message_index


# ---------------------------------------------------------------- what is missing, and what stands in for it


def tool_calls_of(message: Message, *, dialect: str = "neutral") -> list[ToolCall]:
    """Return the calls of one message, each with ``.id``, ``.name`` and ``.arguments``.

    Arguments are None where they cannot be read as an object; nothing that follows from them is known then.

    Raises InvalidSetting for an unknown dialect and InvalidTranscript, with the index 0, for a message that is not of
    that dialect: the way to check a message before it is kept.
    """
    return list(_view(message, 0, dialect_named(dialect)).calls)


def view_of(message: Message, *, dialect: str = "neutral") -> MessageView:
    """Return what one message calls and answers. Raises as `tool_calls_of` does."""
    return _view(message, 0, dialect_named(dialect))


def find_orphan_tool_calls(
    messages: Sequence[Message], suspended: Collection[str] = frozenset(), *, dialect: str = "neutral"
) -> list[OrphanToolCall]:
    """Return calls without a result and results without a call, in the order of their messages.

    ``suspended`` are the ids of calls that wait for a person: they have no result on purpose, and are no orphans. It
    speaks of an id's last site; earlier sites of the same id are judged as any other.

    Raises InvalidSetting for an unknown dialect and InvalidTranscript for a message that is not of that dialect.
    """
    walk = _walk(messages, dialect_named(dialect))
    found = [_orphan(site) for site in walk.open_calls(frozenset(suspended))]
    if walk.orphans:
        found = sorted(found + walk.orphans, key=_by_index)
    return found


def closable_by_append(
    messages: Sequence[Message], suspended: Collection[str] = frozenset(), *, dialect: str = "neutral"
) -> list[OrphanToolCall]:
    """Return the orphans that a close at the end of the transcript would close: calls at the last site of their id.

    Once their closes are appended, there are none left. Raises as `find_orphan_tool_calls` does.
    """
    walk = _walk(messages, dialect_named(dialect))
    return [_orphan(site) for site in walk.open_calls(frozenset(suspended)) if walk.last[site.call.id] is site]


def interrupted_result_message(result: InterruptedResult, *, dialect: str = "neutral") -> Message:
    """Return the message with one close, in the shape of a dialect: an error, with its kind where we find it again.

    Raises InvalidSetting for an unknown dialect.
    """
    call = ToolCall(result.tool_call_id, result.tool_name)
    return dialect_named(dialect).mint(call, result.text, is_error=True, error_kind=ErrorKind(result.error_kind))


def tool_result_message(
    tool_call_id: str, tool_name: str, value: object, *, is_error: bool = False, dialect: str = "neutral"
) -> Message:
    """Return the message with the real result of a call, in the shape of a dialect: a text, or any value, as JSON.

    ``is_error`` marks the result of a call that failed, where the dialect has a mark for it. Raises InvalidSetting for
    an unknown dialect.
    """
    return dialect_named(dialect).mint(ToolCall(tool_call_id, tool_name), value, is_error=is_error)


def interruption_marker_message(*, tool_use_in_flight: bool, dialect: str = "neutral") -> Message:
    """Return the user's message that says that a person stopped the run, in the shape of a dialect.

    Raises InvalidSetting for an unknown dialect.
    """
    text = INTERRUPTED_BY_USER_FOR_TOOL_USE_MARKER if tool_use_in_flight else INTERRUPTED_BY_USER_MARKER
    return dialect_named(dialect).user_message(text)


def is_interrupted_close(message: object, *, dialect: str = "neutral") -> bool:
    """Whether a message holds results that are closes, and nothing else's result. Total: whatever it is given.

    What cannot be read is not a close: so is anything in a dialect that does not exist.
    """
    try:
        kinds = list(DIALECTS[dialect].error_kinds(message))  # pyright: ignore[reportArgumentType]
    except KeyboardInterrupt:
        raise
    except BaseException:  # noqa: BLE001 - a tool's value may do anything when it is looked at
        return False
    return bool(kinds) and None not in kinds


# ---------------------------------------------------------------- the request


def request_view(
    messages: Sequence[Message], *, dialect: str = "neutral", suspended: Collection[str] = frozenset()
) -> RequestView:
    """Return what a chat API accepts of a transcript, and what was done for that. It never writes.

    Results come directly after their calls and in their order, without our own fields. Results without a call are
    left out and announced, as are results beside the one that answers. A call without a result is closed in the
    conservative words of an unknown outcome, or, where it is suspended, answered by saying what it waits for. Where an
    API needs every id to be used once, a later call under a used id gets another one, together with its result; that
    id depends on nothing that comes later, so that a request is a prefix of the next one.

    Raises InvalidSetting for an unknown dialect and InvalidTranscript for a message that is not of that dialect.
    """
    shape = dialect_named(dialect)
    views: list[MessageView] = []
    walk = _walk(messages, shape, views)
    on_hold = frozenset(suspended)
    held = [site for site in walk.sites if site.unanswered and walk.holds(site, on_hold)]
    unanswered = list(walk.open_calls(on_hold))
    closed = interrupted_results([_orphan(site) for site in unanswered])
    # By site: a dataclass that compares by value is no key.
    minted: dict[int, Message] = {
        id(site): shape.mint(site.call, close.text, is_error=True, error_kind=close.error_kind)
        for site, close in zip(unanswered, closed, strict=True)
    }
    minted |= {id(site): shape.mint(site.call, _held_text(site.call.name), is_error=False) for site in held}

    wire_ids = _WireIds()
    pieces: dict[int, list[Message]] = {}
    answers: dict[int, list[Answer]] = {}
    renamed: list[RenamedCall] = []
    for site in walk.sites:
        index = site.message_index
        if index not in answers:
            answers[index] = []
            if shape.ids_recur:
                wire_ids = _WireIds()
        wire_id = wire_ids.take(site.call.id)
        if wire_id != site.call.id:
            renamed.append(RenamedCall(site.call.id, wire_id, index))
        if where := site.real or site.close:
            if where[0] not in pieces:
                pieces[where[0]] = shape.pieces(messages[where[0]])
            piece = pieces[where[0]][where[1]]
        else:
            (piece,) = shape.pieces(minted[id(site)])
        answers[index].append(Answer(wire_id, piece))
    touched = {call.message_index for call in renamed}
    new_ids = {index: [answer.wire_id for answer in answers[index]] for index in touched}
    out, loose = shape.layout(Turns(messages, views, answers, new_ids))

    left_out = walk.unused
    left_out += (LeftOut("orphan_result", orphan.tool_call_id, orphan.message_index) for orphan in walk.orphans)
    left_out += (LeftOut("loose_reasoning", None, index) for index in loose)
    return RequestView(
        out, tuple(closed), tuple(map(_orphan, held)), tuple(sorted(left_out, key=_by_index)), tuple(renamed)
    )


class _WireIds:
    """Hands out each id once, and made-up ones in its place after that."""

    def __init__(self) -> None:
        self._used: set[str] = set()
        self._times: dict[str, int] = {}

    def take(self, call_id: str) -> str:
        wire_id = call_id
        if call_id in self._used:
            times = self._times.get(call_id, 1)
            while wire_id in self._used:
                times += 1
                suffix = f"_{times}"
                wire_id = call_id[: max(len(call_id), _LONGEST_ID) - len(suffix)] + suffix
            self._times[call_id] = times
        self._used.add(wire_id)
        return wire_id


def _held_text(tool: str) -> str:
    return (
        f"This call of {tool} is on hold: a person has to decide on it, and it has no result yet. Its result will "
        f"stand here once there is one. Do not issue it again in the meantime."
    )
