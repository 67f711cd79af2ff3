"""The receipts of a namespace as people and programs look at them, and settle what nobody knows."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime as dt
from functools import partial
from typing import TYPE_CHECKING, Any, get_args

from natsreceipts._jetstream import Entry
from natsreceipts.attempt import Attempt, Blocked, Judged
from natsreceipts.attempts import CLAIM_PATIENCE, Attempts
from natsreceipts.background import merged
from natsreceipts.decision import Ambiguous, Effect
from natsreceipts.errors import (
    CorruptRecord,
    InvalidSetting,
    NatsReceiptsError,
    NotClaimed,
    NotResolvable,
    ReceiptErased,
    SealedError,
    StaleRevision,
    Unreachable,
    UnsupportedRecord,
    brief,
    with_key,
)
from natsreceipts.fence import InDoubt, NotWritten, Pace, clock, newest, patiently, raise_refusal
from natsreceipts.identity import ReceiptKey, key_token, split_kv_key
from natsreceipts.notice import check_text
from natsreceipts.receipt import Receipt, Revision, Sealed
from natsreceipts.resolving import (
    UNSET,
    check_notifiable,
    check_resolvable,
    live,
    names_of,
    resolution_of,
)
from natsreceipts.seals import STEP
from natsreceipts.seen import Seen, seen_of
from natsreceipts.server_time import ServerTime
from natsreceipts.silence import Silence
from natsreceipts.wire import ErrorInfo, Payload, ReceiptRecord, Status

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable

    from natsreceipts._jetstream import Bucket
    from natsreceipts.announce import Announcer

__all__ = ["ReceiptStore"]

_READ_PATIENCE = 5.0
"""Seconds that a read is tried for."""

_WATCH_AGAIN = 0.5
"""Seconds after which a watch tries again while no server answers."""

_WATCH_EVERY = 5.0
"""Seconds after which a watch reads although no sign of a write came."""

_LISTED_AT_ONCE = 128
"""Receipts that a long list holds in memory at a time: 32 MiB, as long as payloads move out at 256 KiB."""


class ReceiptStore:
    """The receipts of a namespace. ``get``, ``list``, ``history``, ``revisions`` and ``watch`` never write."""

    def __init__(self, bucket: Bucket, attempts: Attempts, announcer: Announcer) -> None:
        self._bucket = bucket
        self._attempts = attempts
        self._announcer = announcer

    def bucket(self, key: ReceiptKey | str) -> str:
        """The name of the bucket that holds a receipt, as the ``nats`` CLI knows it. Raises InvalidName."""
        return self._bucket.of(_kv_key(key)).name

    async def get(self, key: ReceiptKey | str) -> Receipt | None:
        """The receipt of a call (a ReceiptKey or its KV key), or None where none was ever written.

        Reads from the leader, for up to 5 s. Raises ReceiptErased, CorruptRecord, UnsupportedRecord, Unreachable,
        PermissionDenied, NotProvisioned, BucketReplaced, InvalidName, PayloadMissing, KeyMissing, SealBroken.
        """
        entry = await self._newest(key)
        if entry is None:
            return None
        seen = seen_of(self.bucket(key), key, entry)
        receipt = await self._opened(self._view(seen), strictly=True)
        if not receipt.large:
            return receipt
        return dataclasses.replace(receipt, result=await self._attempts.load(seen, seen.record.result))

    async def history(self, key: ReceiptKey | str) -> list[Receipt]:
        """The kept revisions of a receipt, oldest first (the bucket keeps 8 or more). Raises as `get`.

        Delete markers among them are left out, and one that cannot be read is raised: `revisions` gives both.
        """
        found: list[Receipt] = []
        for revision in await self.revisions(key):
            if revision.problem is not None:
                raise revision.problem
            if revision.receipt is not None:
                found.append(revision.receipt)
        return found

    async def revisions(self, key: ReceiptKey | str) -> list[Revision]:
        """The kept revisions of a key, oldest first, with delete markers and what cannot be read.

        Empty where nothing was ever written. Raises Unreachable, PermissionDenied, NotProvisioned, BucketReplaced,
        InvalidName.
        """
        kv_key = _kv_key(key)
        found: list[Revision] = []
        revision, whole = 0, False
        while not whole:
            entries, whole = await self._since(kv_key, revision, key)
            found += [await self._revision(key, entry) for entry in entries]
            revision = entries[-1].revision if entries else revision
        return found

    async def _revision(self, key: ReceiptKey | str, entry: Entry) -> Revision:
        receipt: Receipt | None = None
        problem: NatsReceiptsError | None = None
        if not entry.erased:
            try:
                receipt = await self._opened(self._view(seen_of(self.bucket(key), key, entry)))
            except (CorruptRecord, UnsupportedRecord) as error:
                problem = error
        return Revision(entry.revision, _time(entry.time), receipt, entry.erased, problem, entry.value)

    async def payload(self, receipt: Receipt, payload: Payload) -> Any:
        """The value of a payload of a receipt's record (its result, a step, the arguments), wherever it is kept.

        Raises PayloadMissing, KeyMissing, SealBroken, CorruptRecord, Unreachable, PermissionDenied.
        """
        place = _place_of(receipt.record, payload)
        return await self._attempts.load(Seen(receipt.record, receipt.revision, None), payload, place)

    async def server_time(self) -> ServerTime:
        """The server's clock, by which leases end and receipts expire. Raises as `get`."""
        now, leader_since = await clock(self._bucket, self._pace())
        return ServerTime(_time(now), _time(leader_since) if leader_since else None, self._bucket.retention)

    async def list(
        self,
        *,
        tenant: str | None = None,
        run: str | None = None,
        tool: str | None = None,
        status: Status | None = None,
        unreadable: Callable[[NatsReceiptsError], None] | None = None,
        erased: Callable[[str, Revision], None] | None = None,
    ) -> AsyncIterator[Receipt]:
        """The newest revision of each receipt, filtered by names and status; an async iterator, in order of keys.

        Erased receipts are left out, whatever the ``status``: ``erased`` is called with the KV key and the delete
        marker of each. Raises as `get`; where one cannot be read, ``unreadable`` is called with its CorruptRecord or
        UnsupportedRecord, or else the first of these is raised after all others were given.
        """
        if status is not None and status not in get_args(Status):
            raise InvalidSetting(f"status={brief(status)}: use one of {', '.join(get_args(Status))}")
        pattern = _pattern(tenant, run, tool)
        problems: list[NatsReceiptsError] = []
        async for entries in self._newest_of(pattern):
            for entry in entries:
                receipt = await self._shown(entry, unreadable or problems.append, erased)
                if receipt is not None and (status is None or receipt.status == status):
                    yield receipt
        if problems:
            raise problems[0]

    async def _newest_of(self, pattern: str) -> AsyncIterator[list[Entry]]:
        """The newest entries of the keys that match, in order of keys, a part at a time where they are many."""
        entries = await patiently(self._pace(), lambda timeout: self._bucket.newest_of(pattern, timeout=timeout))
        if entries is not None:
            yield sorted(entries, key=lambda entry: entry.key)
            return
        keys = await patiently(self._pace(), lambda timeout: self._bucket.keys(pattern, timeout=timeout))
        for start in range(0, len(keys), _LISTED_AT_ONCE):
            part = keys[start : start + _LISTED_AT_ONCE]
            yield await patiently(
                self._pace(), lambda timeout, part=part: self._bucket.newest_each(part, timeout=timeout)
            )

    async def watch(
        self,
        *,
        tenant: str | None = None,
        run: str | None = None,
        tool: str | None = None,
        unreadable: Callable[[NatsReceiptsError], None] | None = None,
        erased: Callable[[str, Revision], None] | None = None,
        unreachable: Callable[[Unreachable | None], None] | None = None,
    ) -> AsyncGenerator[Receipt, None]:
        """The receipts that match, as they stand, and then every further revision in order, for ever.

        Lives through a server restart: a subscription is only the hint, and what is yielded is read from the
        stream after the last revision seen. Raises what `get` raises, except Unreachable, which it waits out unless
        the toolkit is closed. With ``unreadable`` that is called with what cannot be read, and the watch goes on.
        ``erased`` is called with the KV key and the delete marker where a receipt is deleted, in order with what is
        yielded. ``unreachable`` is called with the Unreachable when no server answers any more, so that what was
        yielded may be old, and with None when one does again (of a bucket in partitions, for each).
        """
        pattern = _pattern(tenant, run, tool)
        shown = partial(self._shown, unreadable=unreadable, erased=erased)
        parts = [self._watch(bucket, pattern, shown, unreachable) for bucket in self._bucket.parts(pattern)]
        async with contextlib.aclosing(parts[0] if len(parts) == 1 else merged(parts)) as receipts:
            async for receipt in receipts:
                yield receipt

    async def _watch(
        self,
        bucket: Bucket,
        pattern: str,
        shown: Callable[[Entry], Awaitable[Receipt | None]],
        unreachable: Callable[[Unreachable | None], None] | None,
    ) -> AsyncGenerator[Receipt, None]:
        revision, silence = 0, Silence(unreachable)
        async with bucket.hints(pattern) as hint:
            latest: dict[str, Entry] | None = {}
            while True:
                try:
                    async for entry in _after(bucket, pattern, revision):
                        revision = entry.revision
                        if latest is not None:
                            latest[entry.key] = entry
                        elif (receipt := await shown(entry)) is not None:
                            yield receipt
                except Unreachable as error:
                    if bucket.closed:
                        raise
                    silence.begins(error)
                    await hint.wait(_WATCH_AGAIN)
                    continue
                silence.ends()
                if latest is not None:
                    for entry in latest.values():
                        if (receipt := await shown(entry)) is not None:
                            yield receipt
                    latest = None
                await hint.wait(_WATCH_EVERY)

    async def resolve(
        self,
        key: ReceiptKey | str,
        *,
        revision: int,
        completed: object = UNSET,
        not_applied: bool = False,
        by: str,
        reason: str,
        notify: str | None = None,
        even_if_running: bool = False,
    ) -> Receipt:
        """Settle a call whose outcome nobody knows, on the ``revision`` that you looked at.

        Say what the outside world shows: ``completed=result`` (it landed, and this is its result), or
        ``not_applied=True`` (it did not land and can no longer land, so it may be tried again). ``by`` and
        ``reason`` stay on record. For ambiguous receipts, for running ones whose lease is over (made ambiguous
        first, which may take a third of their lease), and for erased ones; for a live one only with
        ``even_if_running``, where you know more than its lease does (stop its worker first: one that claimed or
        renewed less than a third of a lease ago may still begin).

        ``notify`` names an agent, the one whose call it was: once the call is settled a notice of that is filed to
        it, on the call's run and at its tenant's endpoint (`run.notices`). Where that fails the call stays settled,
        and it is logged. A name or a run that notices have no room for is an InvalidName before anything is written.

        Raises StaleRevision where the receipt has moved on, NotResolvable for a status that is not to be settled,
        CallInFlight for a live attempt, InvalidSetting for bad arguments, Unreachable where it could not be
        written or it is not known whether it was, and what `get` raises. Nothing else was changed in any case.
        """
        if even_if_running is not True and even_if_running is not False:
            raise InvalidSetting(f"even_if_running={brief(even_if_running)}: use True or False")
        if type(revision) is not int or revision < 1:
            raise InvalidSetting(f"revision={brief(revision)}: use the revision that you looked at, an int from 1")
        resolution, value = resolution_of(completed, not_applied=not_applied, by=by, reason=reason)
        if notify is not None:
            check_text("notify", notify)
        entry = await self._newest(key)
        if entry is None:
            raise NotResolvable(key, status="absent", reason="no attempt was ever made")
        if entry.erased:
            if entry.revision != revision:
                raise StaleRevision(key, revision=revision, current=entry.revision, status="erased")
            names = key if isinstance(key, ReceiptKey) else names_of(key, await self.revisions(key))
            check_notifiable(names, notify)
            attempt = Attempt(names, effect=Effect.OPAQUE, lease=30.0)
            standing = Judged(self._erased(names, await self._kept_fences(names, revision)), revision)
        else:
            seen = seen_of(self.bucket(key), key, entry)
            if seen.revision != revision:
                raise StaleRevision(key, revision=revision, current=seen.revision, status=seen.record.status)
            check_notifiable(seen.record.key, notify)
            attempt = Attempt(
                seen.record.key, effect=seen.record.effect or Effect.OPAQUE, lease=(seen.record.lease_ms or 0) / 1000
            )
            standing = await self._standing(attempt, seen, even_if_running=even_if_running)
        pace = self._attempts.pace(max(attempt.lease, 6.0), patience=CLAIM_PATIENCE)
        try:
            settled = await self._attempts.resolve(attempt, standing, resolution, pace)
        except NatsReceiptsError as error:
            raise with_key(error, attempt.key)  # noqa: B904 - it is the same error
        except NotWritten as failure:
            raise_refusal(failure, attempt.key)
            raise Unreachable(f"{attempt.kv_key}: it was not settled: {failure}").because(
                failure.cause
            ) from failure.cause
        except InDoubt as failure:
            raise Unreachable(
                f"{attempt.kv_key}: whether it was settled is not known ({failure}); look at the receipt before you "
                f"do anything else"
            ).because(failure.cause) from failure.cause
        if settled is None:
            raise await self._stale(key, revision)
        receipt = await self._resolved(key, settled, value)
        if notify is not None:
            await self._announcer.resolved(notify, receipt)
        return receipt

    async def _resolved(self, key: ReceiptKey | str, settled: Judged, value: Any) -> Receipt:
        """What was settled, as it was written: it stands, whether or not it can be read back now."""
        entry = None
        with contextlib.suppress(NatsReceiptsError):
            entry = await self._newest(key)
        if entry is None or entry.revision != settled.revision:
            # Its server's timestamp is all that cannot be known here.
            stamp = dt.datetime.now(dt.UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
            entry = Entry(settled.record.key.kv_key, settled.revision, stamp, b"", erased=False)
        receipt = self._view(Seen(settled.record, settled.revision, entry))
        sealed = isinstance(receipt.result, Sealed)
        return dataclasses.replace(receipt, result=value) if receipt.large or sealed else receipt

    async def _stale(self, key: ReceiptKey | str, revision: int) -> StaleRevision:
        entry = await self._newest(key)
        if entry is None:
            return StaleRevision(key, revision=revision, current=0, status="absent")
        status = "erased" if entry.erased else "unreadable"
        with contextlib.suppress(NatsReceiptsError):
            status = seen_of(self.bucket(key), key, entry).record.status
        return StaleRevision(key, revision=revision, current=entry.revision, status=status)

    async def _standing(self, attempt: Attempt, seen: Seen, *, even_if_running: bool) -> Judged:
        record = seen.record
        if record.status == "ambiguous":
            return Judged(record, seen.revision)
        check_resolvable(record, attempt.key)
        if record.status == "failed":
            return Judged(record, seen.revision)
        if even_if_running:
            return Judged(record, seen.revision)
        pace = self._attempts.pace(attempt.lease, patience=CLAIM_PATIENCE)
        expires_in = await self._attempts.expires_in(attempt, seen, pace)
        if expires_in > 0:
            raise live(attempt.key, expires_in)
        effect = record.effect or Effect.OPAQUE
        blocked = Blocked(seen, Ambiguous("its lease is over"), effect, expires_in)
        try:
            judged = await self._attempts.condemn(attempt, blocked)
        except NotClaimed as failure:
            raise with_key(
                Unreachable("its lease is over, and that could not be written down; nothing was settled"), attempt.key
            ) from failure.__cause__
        if judged is None:
            raise await self._stale(attempt.key, seen.revision)
        return judged

    async def _kept_fences(self, key: ReceiptKey, marker: int) -> dict[str, int]:
        """The fences that stood before a marker: a model was told what they keep true. A purge leaves none."""
        fences: dict[str, int] = {}
        bucket, revision = self._bucket.of(key.kv_key), 0
        pace = self._pace()
        while revision < marker:
            entries, whole = await patiently(
                pace, lambda timeout, after=revision: bucket.since(key.kv_key, after, timeout=timeout)
            )
            for entry in entries:
                revision = entry.revision
                with contextlib.suppress(ReceiptErased, CorruptRecord, UnsupportedRecord):
                    fences |= seen_of(bucket.name, key, entry).record.fences or {}
            if whole and revision < marker:  # the replica that was asked is behind
                if pace.over:
                    raise Unreachable(f"{key.kv_key}: what stood there before it was deleted cannot be read yet")
                await pace.pause()
        return fences

    def _erased(self, key: ReceiptKey, fences: dict[str, int]) -> ReceiptRecord:
        """What is assumed of a receipt that was erased: an opaque attempt whose outcome nobody knows."""
        kept: dict[str, Any] = {"fences": fences} if fences else {}
        return ReceiptRecord(
            v=1,
            write=self._bucket.nonce(),
            status="ambiguous",
            tenant_id=key.tenant,
            run_id=key.run,
            tool_name=key.tool,
            args_hash=key.args_hash,
            effect=Effect.OPAQUE,
            attempts=1,
            **kept,
        )

    def _pace(self) -> Pace:
        return Pace(self._bucket, lease=30.0, patience=_READ_PATIENCE)

    async def _newest(self, key: ReceiptKey | str) -> Entry | None:
        kv_key = _kv_key(key)
        try:
            return await newest(self._bucket, kv_key, self._pace())
        except NatsReceiptsError as error:
            raise with_key(error, key)  # noqa: B904 - it is the same error

    async def _since(self, pattern: str, revision: int, key: ReceiptKey | str) -> tuple[list[Entry], bool]:
        try:
            return await self._bucket.since(pattern, revision, timeout=_READ_PATIENCE)
        except NatsReceiptsError as error:
            raise with_key(error, key)  # noqa: B904 - it is the same error

    async def _shown(
        self,
        entry: Entry,
        unreadable: Callable[[NatsReceiptsError], None] | None,
        erased: Callable[[str, Revision], None] | None,
    ) -> Receipt | None:
        if entry.erased:
            if erased is not None:
                erased(entry.key, Revision(entry.revision, _time(entry.time), None, True, None, entry.value))
            return None
        try:
            return await self._opened(self._view(seen_of(self.bucket(entry.key), entry.key, entry)))
        except (CorruptRecord, UnsupportedRecord) as error:
            if unreadable is None:
                raise
            unreadable(error)
            return None

    def _inline(self, seen: Seen, payload: Payload | None) -> Any:
        if payload is not None and payload.sealed is not None:
            return Sealed(payload.sealed.key)
        if payload is None or payload.object is not None:
            return None
        try:
            return payload.value()
        except ValueError as error:
            raise CorruptRecord(
                self.bucket(seen.record.key), seen.record.key, seen.revision, f"payload: {error}"
            ) from error

    async def _opened(self, receipt: Receipt, *, strictly: bool = False) -> Receipt:
        """With what is sealed in it opened; what does not open stays sealed, or is raised (``strictly``)."""
        record = receipt.record
        seen = Seen(record, receipt.revision, None)
        found: dict[str, Any] = {}
        try:
            for place in ("result", "args"):
                if isinstance(getattr(receipt, place), Sealed):
                    found[place] = await self._attempts.load(seen, getattr(record, place), place)
            if record.error is not None and record.error.sealed is not None:
                found["error"] = await self._attempts.error_of(record)
        except SealedError:
            if strictly:
                raise
        return dataclasses.replace(receipt, **found) if found else receipt

    def _view(self, seen: Seen) -> Receipt:
        record = seen.record
        return Receipt(
            key=record.key,
            kv_key=record.key.kv_key,
            revision=seen.revision,
            updated=_time(seen.time),
            status=record.status,
            attempts=record.attempts,
            effect=record.effect,
            result=self._inline(seen, record.result),
            large=record.result is not None and record.result.object is not None,
            error=_shown_error(record.error),
            resolved=record.resolved,
            args=self._inline(seen, record.args),
            steps=tuple(record.steps or ()),
            worker=record.holder.worker if record.holder else None,
            lease=record.lease_ms / 1000 if record.lease_ms else None,
            record=record,
        )


async def _after(bucket: Bucket, pattern: str, revision: int) -> AsyncIterator[Entry]:
    whole = False
    while not whole:
        entries, whole = await bucket.since(pattern, revision, timeout=_READ_PATIENCE)
        for entry in entries:
            revision = entry.revision
            yield entry


def _shown_error(error: ErrorInfo | None) -> ErrorInfo | None:
    if error is None or error.sealed is None:
        return error
    return error.model_copy(update={"message": str(Sealed(error.sealed.key))})


def _place_of(record: ReceiptRecord, payload: Payload) -> str:
    """Where a payload stands in a record: what it is sealed is bound to that."""
    step = next((name for name, each in (record.steps or {}).items() if each is payload), None)
    return f"{STEP}{step}" if step is not None else "args" if payload is record.args else "result"


def _time(nanoseconds: int) -> dt.datetime:
    return dt.datetime.fromtimestamp(nanoseconds / 1e9, tz=dt.UTC)


def _kv_key(key: ReceiptKey | str) -> str:
    if isinstance(key, ReceiptKey):
        return key.kv_key
    split_kv_key(key)
    return key


def _pattern(tenant: str | None, run: str | None, tool: str | None) -> str:
    tokens = [key_token(name) if name is not None else "*" for name in (tenant, run, tool)]
    return ".".join([*tokens, "*"])
