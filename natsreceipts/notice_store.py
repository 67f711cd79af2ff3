"""The records of notices in their bucket: written once each, and read together.

The records carry no nonce of the write (their layout is shared with other systems), so a write whose answer was lost
is recognised by its bytes. Knows keys up to the notice id as one string, the *stem*; the records are
``<stem>.spec`` and ``<stem>.status``.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from natsreceipts.errors import (
    BucketReplaced,
    CorruptRecord,
    NatsReceiptsError,
    NotProvisioned,
    PermissionDenied,
    Unreachable,
    with_key,
)
from natsreceipts.fence import InDoubt, Landed, NotWritten, Pace, advance, clock, newest, patiently
from natsreceipts.notice_record import Notice, NoticeStatus, read_spec, read_status

if TYPE_CHECKING:
    from natsreceipts._jetstream import Bucket, Entry

__all__ = ["NoticeStore", "order"]

_WRITE_PATIENCE = 15.0
"""Seconds that a write is tried for: writes are out for 4 to 10 s in a failover (measured)."""

_READ_PATIENCE = 5.0
"""Seconds that a read is tried for."""

_SETTLING = 1.0
"""Seconds for which two records that do not fit together are read again: one of the reads was stale."""


class NoticeStore:
    """The records of one bucket. Raised by all of it: Unreachable, PermissionDenied, NotProvisioned, BucketReplaced."""

    def __init__(self, bucket: Bucket) -> None:
        self.bucket = bucket

    def _pace(self, patience: float = _READ_PATIENCE) -> Pace:
        return Pace(self.bucket, lease=30.0, patience=patience)

    async def now(self) -> int:
        """Milliseconds by the server's clock, so that the notices of many workers have one order."""
        return (await clock(self.bucket, self._pace())).now // 1_000_000

    async def newest(self, key: str, pace: Pace | None = None) -> Entry | None:
        """The newest revision of a key, from the leader."""
        try:
            return await newest(self.bucket, key, pace or self._pace())
        except NatsReceiptsError as error:
            raise with_key(error, key)  # noqa: B904 - it is the same error

    async def create(self, key: str, value: bytes, *, done: str, again: str) -> Entry | None:
        """Write ``value`` as the first revision of ``key``; None: it is. Else the newest of what stands there.

        ``done`` says what the write does, and ``again`` what to do where it is not known whether it is stored.
        """
        pace = self._pace(_WRITE_PATIENCE)
        try:
            outcome = await advance(
                self.bucket, key, value, expected=0, is_mine=lambda entry: _is(entry, value), pace=pace
            )
        except NotWritten as failure:
            if isinstance(failure.cause, PermissionDenied | NotProvisioned | BucketReplaced):
                raise with_key(failure.cause, key) from None
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
                return None
            if spec is not None and spec.erased:
                return None
            if spec is not None:
                notice = self.notice(spec, status)
                if not _runs_ahead(notice):
                    return notice
            if pace.over:
                what = "its spec is not there" if spec is None else f"it names a later spec than {spec.revision}"
                raise CorruptRecord(self.bucket.name, f"{stem}.status", status.revision if status else 0, what)
            await pace.pause()

    async def list(self, pattern: str, *, whole: bool = False) -> list[Notice]:
        """All notices whose stems match, by ``at`` and then by id. Raises as `read`.

        From any replica, which may lag; with ``whole`` none that the leader has is missing.
        """
        entries, _ = await self.since(f"{pattern}.*", 0)
        keys = [*entries]
        if whole:
            keys += await patiently(self._pace(), lambda timeout: self.bucket.keys(f"{pattern}.*", timeout=timeout))
        found: list[Notice] = []
        for stem in {key.rpartition(".")[0]: None for key in keys}:
            spec, status = entries.get(f"{stem}.spec"), entries.get(f"{stem}.status")
            if spec is not None and spec.erased:
                continue
            notice = self.notice(spec, status) if spec is not None else None
            if notice is None or _runs_ahead(notice):
                notice = await self.read(stem)
            if notice is not None:
                found.append(notice)
        return sorted(found, key=order)

    async def since(self, pattern: str, revision: int) -> tuple[dict[str, Entry], int]:
        """The newest revision of each matching key that was written after ``revision``, and where the read ended.

        In pages, so any number of keys will do, and in the order of writing, which has a spec before its status.
        """
        found: dict[str, Entry] = {}
        whole = False
        while not whole:
            entries, whole = await patiently(self._pace(), partial(self._page, pattern, revision))
            found |= {entry.key: entry for entry in entries}
            revision = entries[-1].revision if entries else revision
        return found, revision

    async def _page(self, pattern: str, revision: int, timeout: float) -> tuple[list[Entry], bool]:
        return await self.bucket.since(pattern, revision, timeout=timeout)

    def notice(self, spec: Entry, status: Entry | None) -> Notice:
        """The notice that two entries make. Raises CorruptRecord, UnsupportedRecord."""
        notice_id = spec.key.rsplit(".", 2)[1]
        said = read_spec(self.bucket.name, spec.key, spec.revision, spec.value)
        return Notice(notice_id, said, spec.revision, self.status(status) if status is not None else None)

    def status(self, entry: Entry) -> NoticeStatus:
        """What a status says. Raises CorruptRecord (also where it was deleted), UnsupportedRecord."""
        if entry.erased:
            reason = "a delete marker stands there, so which turn carried the notice is no longer known"
            raise CorruptRecord(self.bucket.name, entry.key, entry.revision, reason)
        return read_status(self.bucket.name, entry.key, entry.revision, entry.value)


def order(notice: Notice) -> tuple[int, str]:
    """What notices are sorted by: their instant, then their id."""
    return notice.spec.at, notice.notice_id


def _is(entry: Entry, value: bytes) -> bool:
    return not entry.erased and entry.value == value


def _runs_ahead(notice: Notice) -> bool:
    return notice.consumed is not None and notice.consumed.observed_spec_revision > notice.spec_revision
