"""The records of notices in their bucket: written once each, and read together.

The records carry no nonce of the write (their layout is shared with other systems), so a write whose answer was lost
is recognised by its bytes. Knows keys up to the notice id as one string, the *stem*; the records are
``<stem>.spec`` and ``<stem>.status``.
"""

from __future__ import annotations

import contextlib
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from natsreceipts.errors import (
    CorruptRecord,
    NatsReceiptsError,
    Unreachable,
    UnsupportedRecord,
    with_key,
)
from natsreceipts.fence import InDoubt, Landed, NotWritten, Pace, advance, patiently, raise_refusal
from natsreceipts.notice_record import Notice, NoticeStatus, corrupt, read_spec, read_status

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from natsreceipts._jetstream import Bucket, Entry

_T = TypeVar("_T")

__all__ = ["NoticeStore", "order"]

_WRITE_PATIENCE = 15.0
"""Seconds that a write is tried for: writes are out for 4 to 10 s in a failover (measured)."""

_READ_PATIENCE = 5.0
"""Seconds that a read is tried for."""

_SETTLING = 1.0
"""Seconds for which two records that do not fit together are read again: one of the reads was stale."""

_LOOK = 1.0
"""Seconds for a look whether the bucket is still there, when a read of it had no answer."""


class NoticeStore:
    """The records of one bucket. Raised by all of it: Unreachable, PermissionDenied, NotProvisioned, BucketReplaced."""

    def __init__(self, bucket: Bucket) -> None:
        self.bucket = bucket

    def _pace(self, patience: float | None = None) -> Pace:
        return Pace(self.bucket, lease=30.0, patience=_READ_PATIENCE if patience is None else patience)

    async def _asked(self, what: str, ask: Callable[[float], Awaitable[_T]], pace: Pace | None = None) -> _T:
        """Ask until the deadline. ``what`` was asked for, and stands in the error where there is no answer."""
        pace = pace or self._pace()
        first = pace.now()
        try:
            return await patiently(pace, ask)
        except Unreachable as error:
            raise Unreachable(
                f"{what} could not be read, tried for {pace.now() - first:.1f} s ({error}); nothing was concluded from "
                f"that, and nothing written: ask again when a server answers"
            ).because(error) from error
        except NatsReceiptsError as error:
            raise with_key(error, what)  # noqa: B904 - it is the same error

    async def now(self, what: str) -> int:
        """The server's clock before a write, in nanoseconds: by it the notices of many workers have one order.

        Raises where the bucket is gone, or is not the same any more.
        """
        pace = self._pace(_WRITE_PATIENCE)
        return (await self._asked(what, lambda timeout: self.bucket.clock(timeout=timeout), pace)).now

    async def check(self, what: str) -> None:
        """Raise where the bucket is gone, or is not the same any more: before it is said that nothing is there."""
        await self._asked(what, lambda timeout: self.bucket.clock(timeout=timeout))

    async def newest(self, key: str, pace: Pace | None = None) -> Entry | None:
        """The newest revision of a key, from the leader."""
        return await self._asked(key, lambda timeout: self.bucket.newest(key, timeout=timeout), pace)

    async def written_once(self, key: str) -> Entry | None:
        """The revision of a key that is written once. That there is none, the leader and a replica have to say twice.

        A leader that was deposed goes on answering for a while, of a time before the key was written (measured): a
        single read proves nothing.
        """
        pace = self._pace()
        for _ in range(2):
            for leader in (True, False):
                found = await self._asked(
                    key, lambda timeout, leader=leader: self.bucket.newest(key, timeout=timeout, leader=leader), pace
                )
                if found is not None:
                    return found
            await pace.pause()
        return None

    async def create(self, key: str, value: bytes, *, done: str, again: str, since: int = 0) -> Entry | None:
        """Write ``value`` as the first revision of ``key``; None: it is. Else the newest of what stands there.

        ``done`` says what the write does, and ``again`` what to do where it is not known whether it is stored. What
        stood there before is not taken for the write, though it has the same bytes: what this process knew of, or is
        older than ``since``.
        """
        known = self.bucket.high_water

        def is_mine(entry: Entry) -> bool:
            return _is(entry, value) and entry.revision > known and entry.time >= since

        pace = self._pace(_WRITE_PATIENCE)
        try:
            outcome = await advance(self.bucket, key, value, expected=0, is_mine=is_mine, pace=pace)
        except NotWritten as failure:
            raise_refusal(failure, key)
            raise Unreachable(f"{key}: it was not {done}: {failure}").because(failure.cause) from failure.cause
        except InDoubt as failure:
            raise Unreachable(f"{key}: whether it was {done} is not known ({failure}); {again}").because(
                failure.cause
            ) from failure.cause
        except NatsReceiptsError as error:
            raise with_key(error, key)  # noqa: B904 - it is the same error
        if isinstance(outcome, Landed):
            return None
        standing = outcome.entry
        while standing is None:  # refused as not the first, and a stale read does not show by what
            standing = await self.newest(key, pace)
            if standing is None:
                if pace.over:
                    raise Unreachable(f"{key}: it was not {done}: another write came first, and cannot be read")
                await pace.pause()
        return standing

    async def read(self, stem: str) -> Notice | None:
        """One notice, from the leader; None where there is none, or it was deleted.

        Records that do not fit together are read again for a second. Raises CorruptRecord, UnsupportedRecord.
        """
        pace = self._pace(_SETTLING)
        while True:
            # The status first: a spec comes before it, so what is read second must show it.
            status = await self.newest(f"{stem}.status")
            spec = await self.newest(f"{stem}.spec")
            if spec is None and status is None:
                await self.check(f"{stem}.spec")
                return None
            if spec is not None and spec.erased:
                return None
            if spec is not None:
                notice = self.notice(spec, status)
                if not _runs_ahead(notice):
                    return notice
            if pace.over:
                what = "its spec is not there" if spec is None else f"it names a later spec than {spec.revision}"
                raise corrupt(self.bucket.name, f"{stem}.status", status.revision if status else 0, what)
            await pace.pause()

    async def list(
        self, pattern: str, *, of_interest: Callable[[Notice], bool] = lambda _: True, whole: bool = False
    ) -> list[Notice]:
        """The notices of interest whose stems match, by ``at`` and then by id. Raises as `read`.

        From any replica, which may lag; with ``whole`` none that the leader has is missing. That there are none is
        said of the bucket that was connected to only.
        """
        return [*(await self.find(pattern, None, of_interest=of_interest, whole=whole)).values()]

    async def find(
        self,
        pattern: str,
        unreadable: Callable[[NatsReceiptsError], None] | None,
        *,
        of_interest: Callable[[Notice], bool] = lambda _: True,
        whole: bool = False,
    ) -> dict[str, Notice]:
        """`list`, by the keys of the specs; what cannot be read goes to ``unreadable``, where that is given."""
        entries, _ = await self.since(f"{pattern}.*", 0)
        keys = [*entries]
        if whole:
            keys += await self._asked(pattern, lambda timeout: self.bucket.keys(f"{pattern}.*", timeout=timeout))
        found: dict[str, Notice] = {}
        for stem in {key.rpartition(".")[0]: None for key in keys}:
            try:
                notice = await self._found(stem, entries)
            except (CorruptRecord, UnsupportedRecord) as error:
                if unreadable is None:
                    raise
                unreadable(error)
                continue
            if notice is not None and of_interest(notice):
                found[f"{stem}.spec"] = notice
        if not found:
            await self.check(pattern)
        return dict(sorted(found.items(), key=lambda one: order(one[1])))

    async def _found(self, stem: str, entries: dict[str, Entry]) -> Notice | None:
        spec, status = entries.get(f"{stem}.spec"), entries.get(f"{stem}.status")
        if spec is not None and spec.erased:
            return None
        notice = self.notice(spec, status) if spec is not None else None
        return await self.read(stem) if notice is None or _runs_ahead(notice) else notice

    async def fresh(self, entries: dict[str, Entry], known: dict[str, int]) -> dict[str, Notice]:
        """The pending notices among what was read that are not ``known``, by their stem and in order.

        ``known`` has the revision of each spec that was seen. What a list would refuse is refused here too.
        """
        found: list[tuple[str, Notice]] = []
        seen: dict[str, int] = {}
        for stem in {key.rpartition(".")[0]: None for key in entries}:
            spec, status = entries.get(f"{stem}.spec"), entries.get(f"{stem}.status")
            if spec is not None and spec.erased:
                continue
            if spec is None and status is not None and stem in known and self._fits(status, known[stem]):
                continue
            notice = self.notice(spec, status) if spec is not None else None
            if notice is None or _runs_ahead(notice):
                notice = await self.read(stem)
            if notice is not None:
                seen[stem] = notice.spec_revision
                if stem not in known and notice.consumed is None:
                    found.append((stem, notice))
        known.update(seen)  # not before all was read: what is interrupted is begun again
        return dict(sorted(found, key=lambda one: order(one[1])))

    def _fits(self, status: Entry, spec_revision: int) -> bool:
        with contextlib.suppress(CorruptRecord, UnsupportedRecord):
            return self.status(status).observed_spec_revision <= spec_revision
        return False

    async def since(self, pattern: str, revision: int) -> tuple[dict[str, Entry], int]:
        """The newest revision of each matching key that was written after ``revision``, and where the read ended.

        In pages, so any number of keys will do, and in the order of writing, which has a spec before its status.
        """
        found: dict[str, Entry] = {}
        whole = False
        while not whole:
            entries, whole = await self._asked(pattern, partial(self._page, pattern, revision))
            found |= {entry.key: entry for entry in entries}
            revision = entries[-1].revision if entries else revision
        return found, revision

    async def _page(self, pattern: str, revision: int, timeout: float) -> tuple[list[Entry], bool]:
        try:
            return await self.bucket.since(pattern, revision, timeout=timeout)
        except Unreachable:
            # Nobody serves a stream that is gone; only its state says so.
            with contextlib.suppress(Unreachable):
                await self.bucket.clock(timeout=min(timeout, _LOOK))
            raise

    def notice(self, spec: Entry, status: Entry | None) -> Notice:
        """The notice that two entries make. Raises CorruptRecord, UnsupportedRecord."""
        notice_id = spec.key.rsplit(".", 2)[1]
        said = read_spec(self.bucket.name, spec.key, spec.revision, spec.value)
        return Notice(notice_id, said, spec.revision, self.status(status) if status is not None else None)

    def status(self, entry: Entry) -> NoticeStatus:
        """What a status says. Raises CorruptRecord (also where it was deleted), UnsupportedRecord."""
        if entry.erased:
            reason = "a delete marker stands there, so which turn carried the notice is no longer known"
            raise corrupt(self.bucket.name, entry.key, entry.revision, reason)
        return read_status(self.bucket.name, entry.key, entry.revision, entry.value)


def order(notice: Notice) -> tuple[int, str]:
    """What notices are sorted by: their instant, then their id."""
    return notice.spec.at, notice.notice_id


def _is(entry: Entry, value: bytes) -> bool:
    return not entry.erased and entry.value == value


def _runs_ahead(notice: Notice) -> bool:
    return notice.consumed is not None and notice.consumed.observed_spec_revision > notice.spec_revision
