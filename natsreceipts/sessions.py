"""Sessions: logs that survive the crash of the worker that writes them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from pydantic_core import from_json, to_json

from natsreceipts.attempts import CLAIM_PATIENCE
from natsreceipts.errors import InvalidName, InvalidSetting, Unreachable
from natsreceipts.fence import patiently
from natsreceipts.identity import key_token, name_from_token
from natsreceipts.reconcile import ReconcileReport, append_marker, checked_effects, reconcile
from natsreceipts.session_store import SessionStore
from natsreceipts.session_verbs import append_message, checked_ids, compact, entry_of, resume, suspend
from natsreceipts.shown import shown_messages
from natsreceipts.silence import Silence
from natsreceipts.transcript import RequestView, request_view, tool_calls_of, tool_result_message
from natsreceipts.wake import Guarded, Waker

if TYPE_CHECKING:
    import datetime as dt
    from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection, Iterable, Mapping

    from natsreceipts._jetstream import Bucket, Entry
    from natsreceipts.attempt import Attempt
    from natsreceipts.attempts import Attempts
    from natsreceipts.decision import Effect
    from natsreceipts.dialects.base import Message, ToolCall
    from natsreceipts.entries import SessionEntry
    from natsreceipts.fence import Pace
    from natsreceipts.identity import Digest
    from natsreceipts.run import Run
    from natsreceipts.tools import ToolFunction

__all__ = [
    "LoadedSession",
    "SessionLog",
    "SessionSummary",
    "Sessions",
    "append_interruption_marker",
    "reconcile_interrupted_session",
]

_WATCH_AGAIN = 0.5
"""Seconds after which a watch tries again while no server answers."""

_WATCH_EVERY = 5.0
"""Seconds after which a watch reads although no sign of a write came."""


@dataclass(frozen=True, slots=True)
class LoadedSession:
    """A session as it was read. ``last_seq``: the sequence of its last entry, of any branch; 0 where it has none."""

    entries: list[SessionEntry]
    """The active branch, oldest first."""
    messages: list[Message]
    """The messages of the active branch, verbatim."""
    last_seq: int
    suspended: frozenset[str]
    """The ids of the calls on hold."""
    all_entries: list[SessionEntry]
    """Every entry, of all branches, in the order in which they were written."""


@dataclass(frozen=True, slots=True)
class SessionSummary:
    """One session as a list shows it."""

    key: str
    """``<tenant>.<session>`` in tokens: what follows ``sessions.`` in its subject."""
    tenant: str | None
    """None where the name is too long to stand in the key, as is ``session``."""
    session: str | None
    last_seq: int
    updated: dt.datetime
    """The server's time of its last entry."""


def _summary(entry: Entry) -> SessionSummary:
    tenant, _, session = entry.key.partition(".")
    return SessionSummary(entry.key, name_from_token(tenant), name_from_token(session), entry.revision, entry.when)


class Sessions:
    """The sessions of a toolkit."""

    def __init__(self, bucket: Bucket, attempts: Attempts, *, digest: Digest) -> None:
        self._bucket = bucket
        self._attempts = attempts
        self._digest = digest

    async def list(self, *, tenant: str | None = None) -> AsyncIterator[SessionSummary]:
        """The sessions that have an entry, of one tenant or of all, in order of their keys; an async iterator.

        Reads from any replica. Raises Unreachable, PermissionDenied, NotProvisioned, BucketReplaced.
        """
        pattern = f"{key_token(tenant) if tenant is not None else '*'}.*"
        bucket = self._bucket
        entries = await patiently(self._pace(), lambda timeout: bucket.newest_of(pattern, timeout=timeout))
        if entries is not None:
            for entry in sorted(entries, key=lambda entry: entry.key):
                yield _summary(entry)
            return
        for key in await patiently(self._pace(), lambda timeout: bucket.keys(pattern, timeout=timeout)):
            entry = await patiently(
                self._pace(), lambda timeout, key=key: bucket.newest(key, timeout=timeout, leader=False)
            )
            if entry is not None:
                yield _summary(entry)

    def _pace(self) -> Pace:
        return self._attempts.pace(CLAIM_PATIENCE, patience=CLAIM_PATIENCE)

    def open(self, tenant: str, session: str, *, dialect: str | None = None) -> SessionLog:
        """The log of one session; nothing is read or written yet, and one that has no entry is empty.

        ``dialect``: the shape of its messages, one of ``openai-chat``, ``openai-responses``, ``anthropic``,
        ``pydantic-ai``, ``langchain`` and ``neutral``; by default that of its first entry, or ``neutral``. Raises
        InvalidName and InvalidSetting.
        """
        store = SessionStore(
            self._bucket, tenant, session, dialect=dialect, pace=self._pace, seals=self._attempts.seals
        )
        return SessionLog(store, self._attempts, digest=self._digest)


class SessionLog:
    """One session's log, as this process has read it. Made by ``toolkit.sessions.open(tenant, session)``.

    Everything that is appended goes behind what was read: where somebody else wrote in between, SessionConflict is
    raised, with what was missed, and nothing was appended. Every verb that writes raises it, and further Unreachable
    (nothing was appended, or that is not known: the error says which), PermissionDenied, NotProvisioned,
    BucketReplaced, and for entries that cannot be read CorruptRecord and UnsupportedRecord.

    One worker at a time should use a session, through one log.
    """

    def __init__(self, store: SessionStore, attempts: Attempts, *, digest: Digest) -> None:
        self._store = store
        self._attempts = attempts
        self._digest = digest
        self._late: dict[str, Message] = {}
        self._watching: dict[str, Attempt] = {}

    def __repr__(self) -> str:
        return f"SessionLog({self.tenant!r}, {self.session!r})"

    @property
    def tenant(self) -> str:
        """Whose session it is."""
        return self._store.tenant

    @property
    def session(self) -> str:
        """Its name."""
        return self._store.session

    @property
    def dialect(self) -> str:
        """The shape of its messages."""
        return self._store.dialect

    @property
    def store(self) -> SessionStore:
        """The log below, for `reconcile_interrupted_session` and `append_interruption_marker`."""
        return self._store

    async def load(self) -> LoadedSession:
        """Read what is new, in a few requests, from the leader's last entry down. Raises as the verbs that write."""
        await self._store.look()
        branch = self._store.branch()
        return LoadedSession(
            list(branch.entries),
            from_json(to_json(branch.messages)),
            self._store.last_seq,
            branch.suspended,
            list(self._store.entries.values()),
        )

    async def watch(
        self, *, unreachable: Callable[[Unreachable | None], None] | None = None
    ) -> AsyncGenerator[SessionEntry, None]:
        """The entries of the log as it stands, of all branches, and then every further one, for ever.

        Lives through a server restart: a subscription is only the hint. Through another log than the one that is
        written with, best. Raises what `load` raises, except Unreachable, which it waits out unless the toolkit is
        closed. ``unreachable`` is called with the Unreachable when no server answers any more, and with None when one
        does again.
        """
        store = self._store
        seen, silence = 0, Silence(unreachable)
        async with store.bucket.hints(store.key) as hint:
            while True:
                try:
                    await store.glance()
                except Unreachable as error:
                    if store.bucket.closed:
                        raise
                    silence.begins(error)
                    await hint.wait(_WATCH_AGAIN)
                    continue
                silence.ends()
                for entry in [entry for entry in store.entries.values() if entry.seq > seen]:
                    seen = entry.seq
                    yield entry
                await hint.wait(_WATCH_EVERY)

    def calls_in(self, message: Message) -> list[ToolCall]:
        """The tool calls of a message of this session's dialect, each with ``.id``, ``.name`` and ``.arguments``.

        ``arguments`` is None where they are no JSON object. Raises InvalidTranscript, and InvalidSetting on a log that
        does not know its dialect yet: it was opened without one, and nothing was read or written.
        """
        if not self._store.knows_dialect:
            raise InvalidSetting(f"{self!r} does not know its dialect yet: load it first, or name it in open()")
        return tool_calls_of(message, dialect=self.dialect)

    async def append_result(
        self, tool_call_id: str, value: object, *, is_error: bool = False, run: str | Run | None = None
    ) -> SessionEntry:
        """Append the result of a tool call, in the session's dialect: a text, or any value, as JSON.

        ``is_error`` marks the result of a call that failed, where the dialect has a mark for it. Raises InvalidName
        for an id that the active branch, as far as it was read, does not call, and what `append` raises.
        """
        await self._store.ensure_loaded()
        if not isinstance(cast("object", tool_call_id), str):
            raise InvalidName("tool call", tool_call_id, "use the id of a tool call, a string")
        site = self._store.branch().sites.get(tool_call_id)
        if site is None:
            raise InvalidName("tool call", tool_call_id, "the active branch, as far as it was read, does not call it")
        name = site.call.name
        message = tool_result_message(tool_call_id, name, value, is_error=is_error, dialect=self.dialect)
        return await self.append(message, run=run)

    async def append(
        self, message: Message, *, run: str | Run | None = None, entry_id: str | None = None
    ) -> SessionEntry:
        """Append one message, verbatim, and return its entry.

        ``entry_id``: the entry's id, where the message has a name of its own (that of the job that brought it, say):
        where the session has an entry of that id, nothing is appended and that one is returned, so that a redelivered
        job does not say the same thing twice. By default a fresh nonce.

        ``run``: the run in which its tool calls are made, by default the ambient one of this tenant; without a run,
        wake can prove nothing about them. The entry of a message with tool calls is what their claims name: it
        becomes the ambient one for guarded calls of that run, or is given to them as ``entry=``.

        Raises InvalidTranscript for a message that is not of the session's dialect or no plain JSON, and
        InvalidSetting for one that is larger than the server takes.
        """
        return await append_message(self._store, message, run=run, entry_id=entry_id)

    async def branch(self, entry: SessionEntry | str | None) -> None:
        """Let the next entry follow ``entry`` (or its id; None: begin anew) instead of the newest.

        Nothing is written by this: once something is appended, that is the active branch, and what followed ``entry``
        is no longer on it. Raises InvalidName for an entry that this session does not have.
        """
        await self._store.ensure_loaded()
        self._store.go_on_from(entry)

    async def suspend(self, tool_call_ids: Collection[str]) -> SessionEntry:
        """Put calls on hold that wait for a person: neither reconcile nor wake touches them.

        Raises InvalidName for an id that no call without a result has.
        """
        return await suspend(self._store, tool_call_ids)

    async def resume(self, tool_call_ids: Collection[str]) -> SessionEntry:
        """Release calls from hold, and return the entry that their claims name from here on (the ambient one, too).

        Raises InvalidName for an id that is not suspended.
        """
        return await resume(self._store, tool_call_ids)

    async def entry_of(self, tool_call_id: str) -> SessionEntry:
        """The entry that a claim of this call names: of its latest call, or the resume that released it.

        As far as this log has read the session (it is read where it never was): a worker that stalled must not take
        a later call that reuses the id for its own. The entry becomes the ambient one. Raises InvalidName, and
        SessionConflict where `context` has shown what somebody else wrote.
        """
        return await entry_of(self._store, tool_call_id)

    async def compact(self, message: Message, *, keep_from: SessionEntry | str | None = None) -> SessionEntry:
        """Let ``message`` (a summary) stand for everything before ``keep_from`` in what is sent to a model.

        ``keep_from``: the first entry with a message that is still sent (or its id; None: none of those so far). The
        log itself keeps everything. Raises InvalidName for an entry that is not on the active branch, InvalidSetting
        where a call without a result would be summed up.
        """
        return await compact(self._store, message, keep_from=keep_from)

    async def context(self) -> RequestView:
        """What to send to the model: ``.messages``, as its API accepts them, and how they differ from the log.

        Never writes. A compaction stands for what it sums up, and a close whose attempt came to a result after all
        gives way to that result. What somebody else has written since this log was last loaded, woken or written with
        is in it, and the next append is refused for it (SessionConflict): another worker may be at it. Raises
        Unreachable.
        """
        store = self._store
        await store.glance()
        messages = await shown_messages(store, self._attempts, self._late)
        # Copies: a host may add to them what its API takes, and the log is to stay what it is.
        messages = from_json(to_json(messages))
        return request_view(messages, dialect=store.dialect, suspended=store.branch().suspended)

    async def interrupt(
        self,
        *,
        tool_use_in_flight: bool,
        guarded: Mapping[str, Guarded] | Iterable[ToolFunction[...]] | None = None,
        effects: Mapping[str, Effect | str] | None = None,
        started: Collection[str] | None = None,
    ) -> ReconcileReport:
        """Record that a person stopped the run: close what has no result, then append the marker that says so.

        ``tool_use_in_flight``: whether tool calls were. With ``guarded`` the calls are closed as `wake` closes them,
        whose parameters these are, and which may raise SessionBusy; without, by what the log alone tells, so that what
        a receipt knows of them is not told (as `reconcile_interrupted_session`).
        """
        if guarded is not None:
            report = await self.wake(guarded=guarded, effects=effects, started=started)
        else:
            report = await reconcile_interrupted_session(self, effects, started=started)
        marker = await append_interruption_marker(self, tool_use_in_flight=tool_use_in_flight)
        return ReconcileReport(report.recovered, self._store.last_seq, marker)

    async def wake(
        self,
        *,
        guarded: Mapping[str, Guarded] | Iterable[ToolFunction[...]] | None = None,
        effects: Mapping[str, Effect | str] | None = None,
        started: Collection[str] | None = None,
        dry_run: bool = False,
    ) -> ReconcileReport:
        """Close the calls that the session was cut off in, with their receipts as evidence, so that it can go on.

        ``guarded`` maps the tools that leave receipts, by the name that the model calls them by, to their `@tool`
        functions, or to a function of the model's arguments (a dict), or of these and the id of the tool call, that
        gives ``args`` or ``(args, distinct)`` exactly as the worker's calls do; it must have no effect itself. Where
        equal calls of a turn are numbered, as the integrations do, it is `natsreceipts.integrations.NumberedCalls`. A
        list of `@tool` functions is taken by their names. ``effects`` gives the effects of the other tools by name,
        which the words depend on.
        ``started``: the ids of the calls that a live caller saw start. ``dry_run`` tells what would be done, and
        writes nothing.

        To be called before a session goes on, always: where nothing is missing it costs two reads. A call whose lease
        is over may be looked at twice, a third of that lease apart.

        Raises SessionBusy where another worker holds a live lease on one of the calls (nothing was written: come back
        in ``retry_after`` seconds), InvalidSetting, and what the verbs that write raise, SessionConflict aside.
        """
        waker = Waker(
            self._store,
            self._attempts,
            digest=self._digest,
            guarded=guarded,
            effects=checked_effects("effects", effects),
            started=None if started is None else checked_ids("started", started),
            dry_run=dry_run,
            watching=self._watching,
        )
        report = await waker.wake()
        self._watching.clear()
        return report


async def reconcile_interrupted_session(
    session: SessionLog,
    tool_effects: Mapping[str, Effect | str] | None = None,
    suspended: Collection[str] = frozenset(),
    started: Collection[str] | None = None,
) -> ReconcileReport:
    """Close the calls of the active branch that have no result, by what the log alone tells.

    No tool is executed, and no receipt is asked (`SessionLog.wake` does). ``tool_effects``: effects by tool name;
    unknown tools count as writes. ``suspended``: ids to leave alone, beside those that the log itself says are on
    hold. ``started``: the ids that a live caller saw start, so that the others never did. What a close at the end of
    the log cannot close is left to `SessionLog.context`; a second reconcile appends nothing.
    """
    return await reconcile(
        session.store,
        effects=checked_effects("tool_effects", tool_effects),
        suspended=checked_ids("suspended", suspended),
        started=None if started is None else checked_ids("started", started),
    )


async def append_interruption_marker(session: SessionLog, *, tool_use_in_flight: bool) -> str:
    """Append the user's message that says that a person stopped the run, and return its entry's id.

    Only after `reconcile_interrupted_session`: between a call and its result it would break the transcript, so that
    InvalidSetting is raised where a call has no result and is not suspended.
    """
    return await append_marker(session.store, tool_use_in_flight=tool_use_in_flight)
