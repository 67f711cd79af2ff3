"""Sessions, for code without an event loop."""

from __future__ import annotations

from typing import TYPE_CHECKING

from natsreceipts import sessions
from natsreceipts.sync.run import Run

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

    from natsreceipts import run as runs
    from natsreceipts.decision import Effect
    from natsreceipts.dialects.base import Message, ToolCall
    from natsreceipts.entries import SessionEntry
    from natsreceipts.errors import Unreachable
    from natsreceipts.reconcile import ReconcileReport
    from natsreceipts.sessions import LoadedSession, SessionSummary
    from natsreceipts.sync.portal import Portal
    from natsreceipts.tools import ToolFunction
    from natsreceipts.transcript import RequestView
    from natsreceipts.wake import Guarded

__all__ = ["SessionLog", "Sessions", "append_interruption_marker", "reconcile_interrupted_session"]


class Sessions:
    """The sessions of a toolkit, as `natsreceipts.Sessions`."""

    def __init__(self, portal: Portal, inner: sessions.Sessions) -> None:
        self._portal = portal
        self._inner = inner

    def list(self, *, tenant: str | None = None) -> Iterator[SessionSummary]:
        """The sessions that have an entry, of one tenant or of all, in order of their keys; an iterator."""
        return self._portal.iterate(self._inner.list(tenant=tenant))

    def open(self, tenant: str, session: str, *, dialect: str | None = None) -> SessionLog:
        """The log of one session; nothing is read or written yet, and one that has no entry is empty."""
        return SessionLog(self._portal, self._inner.open(tenant, session, dialect=dialect))


class SessionLog:
    """One session's log, as this process has read it. Every verb is that of `natsreceipts.SessionLog`.

    One worker at a time should use a session, through one log.
    """

    def __init__(self, portal: Portal, inner: sessions.SessionLog) -> None:
        self._portal = portal
        self._inner = inner

    def __repr__(self) -> str:
        return repr(self._inner)

    @property
    def tenant(self) -> str:
        """Whose session it is."""
        return self._inner.tenant

    @property
    def session(self) -> str:
        """Its name."""
        return self._inner.session

    @property
    def dialect(self) -> str:
        """The shape of its messages."""
        return self._inner.dialect

    def load(self) -> LoadedSession:
        """Read what is new, in a few requests, from the leader's last entry down."""
        return self._portal.run(self._inner.load)

    def watch(self, *, unreachable: Callable[[Unreachable | None], None] | None = None) -> Iterator[SessionEntry]:
        """The entries of the log as it stands, of all branches, and then every further one, for ever.

        ``unreachable`` is called on the toolkit's own thread.
        """
        return self._portal.iterate(self._inner.watch(unreachable=unreachable))

    def calls_in(self, message: Message) -> list[ToolCall]:
        """The tool calls of a message of this session's dialect, each with ``.id``, ``.name`` and ``.arguments``."""
        return self._inner.calls_in(message)

    def append_result(
        self, tool_call_id: str, value: object, *, is_error: bool = False, run: str | Run | None = None
    ) -> SessionEntry:
        """Append the result of a tool call, in the session's dialect: a text, or any value, as JSON."""
        return self._portal.run(
            self._inner.append_result, tool_call_id, value, is_error=is_error, run=_on_the_loop(run)
        )

    def append(self, message: Message, *, run: str | Run | None = None, entry_id: str | None = None) -> SessionEntry:
        """Append one message, verbatim, and return its entry."""
        return self._portal.run(self._inner.append, message, run=_on_the_loop(run), entry_id=entry_id)

    def branch(self, entry: SessionEntry | str | None) -> None:
        """Let the next entry follow ``entry`` (or its id; None: begin anew) instead of the newest."""
        self._portal.run(self._inner.branch, entry)

    def suspend(self, tool_call_ids: Collection[str]) -> SessionEntry:
        """Put calls on hold that wait for a person: neither reconcile nor wake touches them."""
        return self._portal.run(self._inner.suspend, tool_call_ids)

    def resume(self, tool_call_ids: Collection[str]) -> SessionEntry:
        """Release calls from hold, and return the entry that their claims name from here on."""
        return self._portal.run(self._inner.resume, tool_call_ids)

    def entry_of(self, tool_call_id: str) -> SessionEntry:
        """The entry that a claim of this call names: of its latest call, or the resume that released it."""
        return self._portal.run(self._inner.entry_of, tool_call_id)

    def compact(self, message: Message, *, keep_from: SessionEntry | str | None = None) -> SessionEntry:
        """Let ``message`` (a summary) stand for everything before ``keep_from`` in what is sent to a model."""
        return self._portal.run(self._inner.compact, message, keep_from=keep_from)

    def context(self) -> RequestView:
        """What to send to the model: ``.messages``, as its API accepts them, and how they differ from the log."""
        return self._portal.run(self._inner.context)

    def interrupt(
        self,
        *,
        tool_use_in_flight: bool,
        guarded: Mapping[str, Guarded] | Iterable[ToolFunction[...]] | None = None,
        effects: Mapping[str, Effect | str] | None = None,
        started: Collection[str] | None = None,
    ) -> ReconcileReport:
        """Record that a person stopped the run: close what has no result, then append the marker that says so."""
        return self._portal.run(
            self._inner.interrupt,
            tool_use_in_flight=tool_use_in_flight,
            guarded=guarded,
            effects=effects,
            started=started,
        )

    def wake(
        self,
        *,
        guarded: Mapping[str, Guarded] | Iterable[ToolFunction[...]] | None = None,
        effects: Mapping[str, Effect | str] | None = None,
        started: Collection[str] | None = None,
        dry_run: bool = False,
    ) -> ReconcileReport:
        """Close the calls that the session was cut off in, with their receipts as evidence, so that it can go on.

        Key functions in ``guarded`` are called on the toolkit's own thread.
        """
        return self._portal.run(self._inner.wake, guarded=guarded, effects=effects, started=started, dry_run=dry_run)

    def reconcile(
        self,
        tool_effects: Mapping[str, Effect | str] | None,
        suspended: Collection[str],
        started: Collection[str] | None,
    ) -> ReconcileReport:
        """For `reconcile_interrupted_session`."""
        return self._portal.run(
            sessions.reconcile_interrupted_session, self._inner, tool_effects, suspended, started=started
        )

    def mark_interrupted(self, *, tool_use_in_flight: bool) -> str:
        """For `append_interruption_marker`."""
        return self._portal.run(sessions.append_interruption_marker, self._inner, tool_use_in_flight=tool_use_in_flight)


def _on_the_loop(run: str | Run | None) -> str | runs.Run | None:
    return run.inner if isinstance(run, Run) else run


def reconcile_interrupted_session(
    session: SessionLog,
    tool_effects: Mapping[str, Effect | str] | None = None,
    suspended: Collection[str] = frozenset(),
    started: Collection[str] | None = None,
) -> ReconcileReport:
    """Close the calls of the active branch that have no result, by what the log alone tells.

    As `natsreceipts.reconcile_interrupted_session`.
    """
    return session.reconcile(tool_effects, suspended, started)


def append_interruption_marker(session: SessionLog, *, tool_use_in_flight: bool) -> str:
    """Append the user's message that says that a person stopped the run, and return its entry's id.

    As `natsreceipts.append_interruption_marker`.
    """
    return session.mark_interrupted(tool_use_in_flight=tool_use_in_flight)
