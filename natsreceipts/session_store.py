"""The log of a session on the stream: read it, append to it behind a fence, branch.

Every append expects the session's last sequence, so of two writers one is refused (`SessionConflict`). An append
whose answer was lost is recognised by its bytes, which hold the entry's id. Request and answer only, no task and no
timer.
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pydantic
from pydantic_core import to_json

from natsreceipts.dialects import DIALECTS, dialect_named
from natsreceipts.entries import Branch, SessionEntry, branch_of, extended
from natsreceipts.errors import (
    CorruptRecord,
    InvalidName,
    InvalidSetting,
    InvalidTranscript,
    SessionConflict,
    Unreachable,
)
from natsreceipts.fence import InDoubt, Landed, NotWritten, Pace, newest, patiently, raise_refusal, report
from natsreceipts.identity import key_token
from natsreceipts.seals import Seals
from natsreceipts.wire import CloseInfo, EntryKind, EntryRecord, ReceiptSaid, read_entry

if TYPE_CHECKING:
    import datetime as dt
    from collections.abc import Callable

    from natsreceipts._jetstream import Bucket, Entry
    from natsreceipts.dialects.base import Message

__all__ = ["SessionStore", "entry_id_of", "stream_mark"]

_ROOM = 512
"""Bytes kept free below the server's max_payload for an entry's headers."""

_SEAL = 256
"""Bytes that a seal adds at most, beside what base64 does."""

_LOST: Any = object()


class SessionStore:
    """One session's entries as this process knows them, and the one way to add to them.

    `natsreceipts.SessionLog` is what a host gets; this is the part of it that reconcile and wake share.
    """

    def __init__(
        self,
        bucket: Bucket,
        tenant: str,
        session: str,
        *,
        dialect: str | None,
        pace: Callable[[], Pace],
        seals: Seals | None = None,
    ) -> None:
        for what, name in (("tenant", tenant), ("session", session)):
            try:
                key_token(name)
            except InvalidName as error:
                raise InvalidName(what, error.value, error.reason) from None
        if dialect is not None:
            dialect_named(dialect)
        self.tenant = tenant
        self.session = session
        self.bucket = bucket
        self.pace = pace
        """Tries for one operation."""
        self.key = f"{key_token(tenant)}.{key_token(session)}"
        self.entries: dict[str, SessionEntry] = {}
        """Every entry that was read, by id, in order."""
        self.last_seq = 0
        self.known_seq = 0
        """The last sequence that the host knows of: `last_seq`, unless more was only shown (`glance`)."""
        self._expected = 0
        """The session's last sequence on the server: `last_seq`, or 0 where all of it has expired."""
        self._stream = stream_mark(bucket)
        self._dialect = dialect
        self._tip: str | None = None
        self._head: Any = _LOST
        """The parent of the next entry, where `branch` said so."""
        self._branch: tuple[str | None, Branch] | None = None
        self._loaded = False
        self._in_doubt: EntryRecord | None = None
        self._doubtful_value = b""
        """As it was sent: sealed again, it would be other bytes."""
        self._seals = seals or Seals(None)
        self._lock = asyncio.Lock()

    @property
    def dialect(self) -> str:
        """The dialect of the session's messages: as it was opened with, else that of its first entry."""
        return self._dialect or "neutral"

    @property
    def knows_dialect(self) -> bool:
        """Whether that is the session's dialect for sure."""
        return self._dialect is not None or self._loaded

    @property
    def tip(self) -> str | None:
        """The id of the entry that the next one follows."""
        return self._tip if self._head is _LOST else self._head

    def fits(self, body: Message, *, run: str | None, receipt: ReceiptSaid | None) -> bool:
        """Whether the server takes an entry with this message (and, as it may have one, a close)."""
        record = self._record("message", body, run=run, close=None, receipt=receipt)
        name = receipt.tool_call_id if receipt is not None else ""
        value = record.to_bytes()
        size = len(value) if not self._seals.on else len(value) * 4 // 3 + _SEAL
        return size + len(to_json(name)) <= self._room and _reads_back(value)

    @property
    def _room(self) -> int:
        return self.bucket.max_payload - _ROOM

    # ------------------------------------------------------------------ reading

    async def refresh(self) -> None:
        """Take in what was written since the last look, as something that the host knows of from here on.

        Raises Unreachable, CorruptRecord, UnsupportedRecord, BucketReplaced, PermissionDenied, NotProvisioned.
        """
        await self.glance()
        self.known_seq = self.last_seq

    async def glance(self) -> None:
        """Take in what was written since, for somebody who only shows it: who then appends is told of it first."""
        async with self._lock:
            first = not self._loaded
            await self._catch_up(self.pace())
            if first:
                self.known_seq = self.last_seq

    async def time_of(self, entry: SessionEntry) -> dt.datetime | None:
        """The server's time of an entry, which an acknowledgement does not carry; None where it is not kept."""
        if entry.time is None:
            found = await patiently(
                self.pace(), lambda timeout: self.bucket.successor(self.key, entry.seq - 1, timeout=timeout)
            )
            if found is None or found.revision != entry.seq:
                return None
            entry = self.entries[entry.id] = replace(entry, time=found.when)
        return entry.time

    async def look(self) -> None:
        """`refresh` for somebody who looks at what is there: an append in doubt that is there is so no longer."""
        await self.refresh()
        if self._in_doubt is not None and self._in_doubt.id in self.entries:
            self._in_doubt = None

    async def ensure_loaded(self) -> None:
        """`refresh`, unless the session was read before."""
        if not self._loaded:
            await self.refresh()

    async def _catch_up(self, pace: Pace) -> tuple[SessionEntry, ...]:
        """Read in pages from any replica, up to what the leader says is last. Returns the entries that were new."""
        missed: list[SessionEntry] = []
        while True:
            whole = False
            while not whole:
                after = self.last_seq
                found, whole = await patiently(
                    pace, lambda timeout, after=after: self.bucket.since(self.key, after, timeout=timeout)
                )
                missed += [await self._take(entry) for entry in found]
            last = await newest(self.bucket, self.key, pace)
            if last is None or last.revision <= self.last_seq:
                break
            if pace.over:
                raise Unreachable(f"session {self.key}: its newest entry cannot be read yet; nothing was appended")
            await pace.pause()
        self._expected = self.last_seq
        if self.last_seq and (last is None or last.revision < self.last_seq):
            await patiently(pace, lambda timeout: self.bucket.clock(timeout=timeout))  # raises if it was replaced
            if last is None:
                self._expected = 0
        self._loaded = True
        return tuple(missed)

    async def _take(self, entry: Entry) -> SessionEntry:
        record = read_entry(self.bucket.name, self.key, entry.revision, entry.value)
        if record.sealed is not None:
            try:
                record = await self._seals.opened_entry(self.tenant, self.key, entry.revision, record)
            except ValueError as error:
                why = f"what is sealed in it: {error}"
                raise CorruptRecord(self.bucket.name, self.key, entry.revision, why, of_session=True) from error
        if record.dialect not in DIALECTS:
            why = f"its dialect {record.dialect[:40]!r} is not known to this version"
            raise CorruptRecord(self.bucket.name, self.key, entry.revision, why, of_session=True)
        if self._dialect is None:
            self._dialect = record.dialect
        if record.dialect != self._dialect:
            raise InvalidSetting(
                f"session {self.session} of {self.tenant} was opened as {self._dialect!r}, and its entry "
                f"{entry.revision} is in the dialect {record.dialect!r}: open it with that one"
            )
        return self._add(self._entry_of(record, entry.revision, entry.when))

    def _entry_of(self, record: EntryRecord, seq: int, when: dt.datetime | None) -> SessionEntry:
        return SessionEntry(
            tenant=self.tenant,
            session=self.session,
            id=record.id,
            parent_id=record.parent_id,
            kind=record.kind,
            run=record.run_id,
            dialect=record.dialect,
            body=record.body,
            close=record.close,
            receipt=record.receipt,
            seq=seq,
            time=when,
            stream=self._stream,
        )

    def _add(self, entry: SessionEntry) -> SessionEntry:
        self.entries[entry.id] = entry
        if self._branch is not None and self._branch[0] == entry.parent_id:
            longer = None
            with contextlib.suppress(CorruptRecord):  # told where the branch is made
                longer = extended(self._branch[1], entry)
            self._branch = (entry.id, longer) if longer is not None else None
        self._tip = entry.id
        self.last_seq = self._expected = entry.seq
        return entry

    def branch(self) -> Branch:
        """The branch that the next entry goes on, as far as it was read."""
        tip = self.tip
        if self._branch is None or self._branch[0] != tip:
            self._branch = (tip, branch_of(self.entries, tip, stream=self.bucket.name))
        return self._branch[1]

    # ------------------------------------------------------------------ writing

    async def append(
        self,
        kind: EntryKind,
        body: Message,
        *,
        run: str | None = None,
        close: CloseInfo | None = None,
        receipt: ReceiptSaid | None = None,
        expected: int | None = None,
        entry_id: str | None = None,
    ) -> SessionEntry:
        """Append one entry after what the host knows of. ``expected``: after this sequence instead.

        Raises SessionConflict with the entries that were missed, InvalidTranscript and InvalidSetting for an entry
        that cannot be kept, Unreachable where it was not appended or where that is not known (the same append
        made again is then recognised), PermissionDenied, NotProvisioned, BucketReplaced.
        """
        async with self._lock:
            pace = self.pace()
            if not self._loaded:
                await self._catch_up(pace)
                self.known_seq = self.last_seq
            record = self._record(kind, body, run=run, close=close, receipt=receipt, entry_id=entry_id)
            doubtful = self._in_doubt
            again = doubtful is not None and _same(doubtful, record)  # the same append, made again
            if doubtful is not None and again and doubtful.id in self.entries:
                self._in_doubt, self._head = None, _LOST
                self.known_seq = max(self.known_seq, self.entries[doubtful.id].seq)
                return self.entries[doubtful.id]
            expected = self.known_seq if expected is None else expected
            if expected != self.last_seq:
                raise self._conflict(tuple(entry for entry in self.entries.values() if entry.seq > expected))
            if doubtful is not None and again and doubtful.parent_id == record.parent_id:
                record = doubtful  # if it has landed meanwhile, it is found by its id
            return await self._write(record, pace)

    def _record(
        self,
        kind: EntryKind,
        body: Message,
        *,
        run: str | None,
        close: CloseInfo | None,
        receipt: ReceiptSaid | None,
        entry_id: str | None = None,
    ) -> EntryRecord:
        said: dict[str, Any] = {"close": close, "receipt": receipt}
        said = {name: value for name, value in said.items() if value is not None}
        return EntryRecord(
            v=1,
            id=entry_id or self.bucket.nonce(),
            parent_id=self.tip,
            kind=kind,
            run_id=run,
            dialect=self.dialect,
            body=body,
            **said,
        )

    async def _write(self, record: EntryRecord, pace: Pace) -> SessionEntry:
        again = self._in_doubt is record
        if not again and not _reads_back(record.to_bytes()):
            raise InvalidTranscript(self.dialect, 0, "it is nested too deeply to be read back")
        value = self._doubtful_value if again else await self._value_of(record)
        if len(value) > self._room:
            raise InvalidSetting(
                f"session {self.session} of {self.tenant}: an entry of {len(value):,} bytes is more than the server "
                f"takes ({self._room:,}); nothing was appended. Keep large contents elsewhere, and a reference in it"
            )
        self._in_doubt, self._doubtful_value = record, value
        try:
            outcome = await report(
                self.bucket,
                self.key,
                value,
                expected=self._expected,
                is_this_write=lambda entry: entry.value == value,
                pace=pace,
                doubt=again,
            )
        except NotWritten as failure:
            self._in_doubt = None
            raise_refusal(failure)
            raise Unreachable(f"session {self.key}: nothing was appended: {failure}").because(
                failure.cause
            ) from failure.cause
        except InDoubt as failure:
            raise Unreachable(
                f"session {self.key}: whether entry {record.id} was appended is not known ({failure}); append the "
                f"same message again with this log, which finds out, or load the session and look"
            ).because(failure.cause) from failure.cause
        if isinstance(outcome, Landed):
            self._in_doubt = None
            self._head = _LOST
            self._dialect = record.dialect
            self.known_seq = outcome.revision
            return self._add(self._entry_of(record, outcome.revision, None))
        self._in_doubt = None  # refused for certain
        try:
            missed = await self._missed(pace)
        except Unreachable as error:
            raise Unreachable(
                f"session {self.key}: nothing was appended: somebody else has written first, and it could not be read "
                f"what ({error}). Load the session, and go on from there"
            ).because(error) from error
        if not missed:
            return await self._write(record, pace)
        if (there := self.entries.get(record.id)) is not None:  # another writer gave its entry the same name
            self._head = _LOST
            return self.same(there, record.body)
        raise self._conflict(missed)

    async def _value_of(self, record: EntryRecord) -> bytes:
        return (await self._seals.sealed_entry(self.tenant, self.key, record)).to_bytes()

    def same(self, entry: SessionEntry, body: Message) -> SessionEntry:
        """The entry, where it says what an append under its id is to say. Raises InvalidSetting."""
        if entry.body != body:
            raise InvalidSetting(
                f"entry_id={entry.id!r} stands in session {self.session} of {self.tenant} already, with another message"
            )
        return entry

    async def _missed(self, pace: Pace) -> tuple[SessionEntry, ...]:
        """What came before a refused append; nothing: append again.

        Then all that was read has expired meanwhile, or the read is stale, or who refused was: a deposed leader, that
        has not heard of the entry that the append expects.
        """
        before = self._expected
        missed = await self._catch_up(pace)
        if not missed and self._expected == before:
            if pace.over:
                raise Unreachable(
                    f"session {self.key}: the server refused an append as overtaken, and reads do not show by what; "
                    f"nothing was appended"
                )
            await pace.pause()
        return missed

    def check_known(self) -> None:
        """Raise SessionConflict where more was read than the host knows of."""
        own = self._in_doubt.id if self._in_doubt is not None else None
        missed = [each for each in self.entries.values() if each.seq > self.known_seq and each.id != own]
        if missed:
            raise self._conflict(tuple(missed))

    def _conflict(self, missed: tuple[SessionEntry, ...]) -> SessionConflict:
        self.known_seq = self.last_seq
        return SessionConflict(self.tenant, self.session, missed=missed)

    def go_on_from(self, entry: SessionEntry | str | None) -> None:
        """Let the next entry follow that one (None: begin anew)."""
        entry_id = entry_id_of(entry)
        if entry_id is not None and entry_id not in self.entries:
            raise InvalidName("entry", entry_id, "the session has no such entry, as far as this log has read it")
        self._head = entry_id


def entry_id_of(entry: object) -> str | None:
    """The id of an entry, or None. Raises InvalidName for what is neither an entry nor an id."""
    if isinstance(entry, SessionEntry):
        return entry.id
    if entry is None or isinstance(entry, str):
        return entry
    raise InvalidName("entry", entry, "use an entry of the session, or its id")


def stream_mark(bucket: Bucket) -> str:
    """What tells a session stream from any other: entries of another say nothing here."""
    return f"{bucket.name} of {bucket.created}"


def _same(one: EntryRecord, other: EntryRecord) -> bool:
    return one.model_copy(update={"id": other.id, "parent_id": other.parent_id}) == other


def _reads_back(value: bytes) -> bool:
    """Whether an entry can be read again: what is nested too deeply can be written, and never read."""
    try:
        EntryRecord.model_validate_json(value)
    except pydantic.ValidationError:
        return False
    return True
