"""The entries of a session, and what they come to: the active branch, what is on hold, what goes to a model. Pure.

Entries form a tree: each names its parent. The active branch is the chain up from the newest one.

==============  =========================================================================================
kind            what it is
==============  =========================================================================================
``message``     a message, verbatim; a result that reconcile or wake wrote is one too (``close``, ``receipt``)
``marker``      a message of the user's that says that a person stopped the run
``suspend``     the calls that wait for a person from here on
``resume``      the calls that wait no longer; a claim of one of them names this entry
``compaction``  a message that stands for everything before ``keepFrom`` (or before itself) in what is sent on
==============  =========================================================================================
"""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from natsreceipts.errors import CorruptRecord, InvalidTranscript
from natsreceipts.identity import key_token
from natsreceipts.transcript import view_of

if TYPE_CHECKING:
    import datetime as dt
    from collections.abc import Mapping

    from natsreceipts.dialects.base import Message, ToolCall
    from natsreceipts.wire import CloseInfo, EntryKind, ReceiptSaid

__all__ = [
    "Branch",
    "CallSite",
    "SessionEntry",
    "ambient_entries",
    "branch_of",
    "extended",
    "forget_since",
    "remember_entry",
    "remembered",
]


@dataclass(frozen=True, slots=True)
class SessionEntry:
    """One entry of a session. As ``entry=`` of a call it says where in the session the call was asked for."""

    tenant: str
    session: str
    id: str
    parent_id: str | None
    kind: EntryKind
    run: str | None
    """The run in which its tool calls are made; None where that was not said."""
    dialect: str
    body: dict[str, Any]
    """What stands in the log: the message itself, or what the kind needs (docs/wire.md)."""
    close: CloseInfo | None
    """Set where the message is a close."""
    receipt: ReceiptSaid | None
    """What a receipt said, where the message was written by its word."""
    seq: int
    """Its place: the sequence in the stream."""
    time: dt.datetime | None
    """The server's time; None where this process has just written it (an acknowledgement carries none)."""
    stream: str = field(repr=False, compare=False)
    """Which stream it stands in."""

    @property
    def message(self) -> Message | None:
        """The message, or None for a suspend or resume; of a compaction the one that stands for what was before."""
        if self.kind in ("message", "marker"):
            return self.body
        return self.body["message"] if self.kind == "compaction" else None

    @property
    def tool_call_ids(self) -> tuple[str, ...]:
        """The ids that a suspend or resume is about."""
        return tuple(self.body["toolCallIds"]) if self.kind in ("suspend", "resume") else ()

    @property
    def token(self) -> str:
        """The session's name as it stands in subjects and fences."""
        return key_token(self.session)


class CallSite(NamedTuple):
    """A tool call at the latest place where its id is called."""

    call: ToolCall
    entry: SessionEntry
    """The entry with the call."""
    released: SessionEntry | None
    """The resume that released it, if it was on hold."""

    @property
    def claims_from(self) -> SessionEntry:
        """The entry that a claim of this call names."""
        return self.released or self.entry


class Branch(NamedTuple):
    """A chain of entries, oldest first, and what it comes to."""

    entries: list[SessionEntry]
    messages: list[Message]
    """Every message of the chain, verbatim."""
    shown: list[SessionEntry]
    """The entries whose messages go to a model: what no compaction stands for."""
    suspended: frozenset[str]
    """Ids of calls on hold."""
    sites: dict[str, CallSite]
    """By id, the calls in what is shown, at their latest site."""


def branch_of(entries: Mapping[str, SessionEntry], tip: str | None, *, stream: str) -> Branch:
    """The chain up from the entry ``tip``. It ends where a parent is no longer kept (a session has a horizon).

    Raises CorruptRecord for a parent that is not before its child, and for a message that is not of its dialect.
    """
    chain: list[SessionEntry] = []
    entry = entries.get(tip) if tip is not None else None
    while entry is not None:
        chain.append(entry)
        parent = entries.get(entry.parent_id) if entry.parent_id is not None else None
        if parent is not None and parent.seq >= entry.seq:
            key = f"{key_token(entry.tenant)}.{entry.token}"
            raise CorruptRecord(stream, key, entry.seq, "its parent does not come before it", of_session=True)
        entry = parent
    chain.reverse()
    messages = [entry.body for entry in chain if entry.kind in ("message", "marker")]
    branch = Branch(chain, messages, [], frozenset(), {})
    for entry in _shown(chain):
        branch = _with(branch, entry)
    return branch


def extended(branch: Branch, entry: SessionEntry) -> Branch | None:
    """The branch with one more entry at its end; ``branch`` is used up. None: it has to be made anew."""
    if entry.kind == "compaction":
        return None
    branch.entries.append(entry)
    if entry.kind in ("message", "marker"):
        branch.messages.append(entry.body)
    return _with(branch, entry)


def _shown(chain: list[SessionEntry]) -> list[SessionEntry]:
    """The entries that count: the last compaction stands for all before the first one that it keeps."""
    last = next((index for index in range(len(chain) - 1, -1, -1) if chain[index].kind == "compaction"), None)
    if last is None:
        return chain
    keep_from = chain[last].body["keepFrom"]
    first = next((index for index in range(last) if chain[index].id == keep_from), last)
    # An earlier compaction among what is kept stands for messages that this one's message stands for, too.
    kept = [entry for entry in chain[first:last] if entry.kind != "compaction"]
    return [chain[last], *kept, *chain[last + 1 :]]


def _with(branch: Branch, entry: SessionEntry) -> Branch:
    """What is shown, on hold and called, with one more entry."""
    suspended, sites = branch.suspended, branch.sites
    if entry.kind == "suspend":
        return branch._replace(suspended=suspended.union(entry.tool_call_ids))
    if entry.kind == "resume":
        for call_id in entry.tool_call_ids:
            if call_id in sites:
                sites[call_id] = sites[call_id]._replace(released=entry)
        return branch._replace(suspended=suspended.difference(entry.tool_call_ids))
    message = entry.message
    if message is None:
        return branch
    branch.shown.append(entry)
    try:
        view = view_of(message, dialect=entry.dialect)
    except InvalidTranscript as error:
        key = f"{key_token(entry.tenant)}.{entry.token}"
        raise CorruptRecord(entry.stream.partition(" ")[0], key, entry.seq, error.reason, of_session=True) from error
    for call in view.calls:
        sites[call.id] = CallSite(call, entry, None)
    if suspended:  # what was on hold was an earlier call of that id, or is answered now
        answered = [result.id for result in view.results if result.error_kind is None]
        suspended = suspended.difference([call.id for call in view.calls], answered)
    return branch._replace(suspended=suspended) if suspended is not branch.suspended else branch


# ---------------------------------------------------------------- the entry that calls are made from

_MOST_SESSIONS = 64

_ambient: ContextVar[tuple[SessionEntry, ...]] = ContextVar("natsreceipts_entries", default=())
"""For each session the entry that was last returned for its calls, newest last."""


def remember_entry(entry: SessionEntry) -> None:
    """Make this the entry that the calling code's guarded calls name from here on, in its run."""
    session = (entry.stream, entry.tenant, entry.session)
    others = [other for other in _ambient.get() if (other.stream, other.tenant, other.session) != session]
    _ambient.set((*others, entry)[-_MOST_SESSIONS:])


def remembered() -> tuple[SessionEntry, ...]:
    """What the ambient scope holds now."""
    return _ambient.get()


def forget_since(before: tuple[SessionEntry, ...]) -> None:
    """Go back to what was `remembered`, at the end of a turn: the next one in this task is not of its sessions."""
    _ambient.set(before)


def ambient_entries(tenant: str, run: str, *, stream: str | None) -> tuple[SessionEntry, ...]:
    """For each session that the ambient scope knows, the entry that calls in this run are asked for in.

    Which of several sessions a call is of cannot be known, so it answers to the fences of all of them.
    """
    return tuple(
        entry
        for entry in _ambient.get()
        if entry.tenant == tenant and entry.run == run and stream in (None, entry.stream)
    )
